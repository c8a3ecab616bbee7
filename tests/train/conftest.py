"""A trainer in a separate folder, and the rows of an uninterrupted run."""

import jax
import pytest
from bad_files import base, changed, tree
from runs import TEXT, Trainer, numbers

import jaxptd.train
from jaxptd.config import Config
from jaxptd.errors import run_command
from jaxptd.run import lock
from jaxptd.train import main


@pytest.fixture(scope="session", autouse=True)
def devices():
    """Initializes JAX with all tests' devices, not only those that the first command needs."""
    assert len(jax.devices()) == 8


@pytest.fixture
def train(tmp_path, capfd):
    return Trainer(tmp_path, capfd)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Rows of an uninterrupted run."""
    trainer = Trainer(tmp_path_factory.mktemp("whole"), None)
    assert main(trainer.options) == 0
    return numbers(trainer.run_dir.metrics())


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Runs the training command with a config; it must fail, and change nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lock, "PATIENCE", 0)
    (tmp_path / "text.txt").write_text(TEXT)

    def run(fields: dict, start: Config | None = None) -> str:
        given = {"data.source": "text.txt", "train.run_dir": "out"} | fields
        words = {"json": False, "quiet": False}
        read = lambda *_, **__: (changed(start or base(), given), words)  # noqa: E731
        monkeypatch.setattr(jaxptd.train, "read_run", read)
        before = tree(tmp_path)
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command(jaxptd.train.main)
        err = capfd.readouterr().err
        assert (end.value.code, err.count("\n")) == (2, 1), err
        assert err.startswith("error: ")
        assert len(err) < 12_000  # it contains a name of 10,000 characters unshortened
        assert tree(tmp_path) == before
        return err

    return run
