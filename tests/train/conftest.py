"""A trainer in a folder of its own, and the rows of a run that nothing interrupted."""

import jax
import pytest
from runs import Trainer, numbers

from jaxptd.train import main


@pytest.fixture(scope="session", autouse=True)
def devices():
    """JAX starts with the devices of all tests, not with those that the first command needs."""
    assert len(jax.devices()) == 8


@pytest.fixture
def train(tmp_path, capfd):
    return Trainer(tmp_path, capfd)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The rows of a run that nothing interrupted."""
    trainer = Trainer(tmp_path_factory.mktemp("whole"), None)
    assert main(trainer.options) == 0
    return numbers(trainer.run_dir.metrics())
