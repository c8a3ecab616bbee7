"""Each loss and every gradient of encoders are transformers', in float64.

By default for numbers that transformers computed; the slow tests run transformers itself, on every
kind of layout.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hugging import encoders, reference, write_directory
from turns import slow

import jaxptd
from jaxptd import Layout, Program, TrainConfig, make_mesh
from jaxptd.hf.directory import Directory
from jaxptd.hf.load import config_of
from jaxptd.hf.read import read_params
from jaxptd.models.families import family_of

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUTS = [
    Layout(),
    Layout(dp=2, tp=2, sequence_parallel=True),
    Layout(cp=2, ring="blockwise"),
    Layout(row=2, col=2),
    Layout(row=2, col=2, attention2d="blocks"),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=4, schedule="zb-v"),
    Layout(dp=4, zero=2),
    Layout(dp=4, zero=3),
    Layout(pp=2, cp=2, tp=2, sequence_parallel=True, schedule="interleaved", virtual_stages=2),
]


def computed(name: str, folder: Path, layout: Layout) -> tuple[dict[str, float], dict[str, Any]]:
    """Our losses with their sum as `loss`, and our gradients by transformers' names."""
    wanted, directory = encoders.REFERENCES[name], Directory(folder)
    config = config_of(directory, dtype="float64", **wanted.sizes)
    train = TrainConfig(global_batch_size=encoders.ROWS, micro_batches=layout.pp)
    config = dataclasses.replace(config, layout=layout, train=train)
    program = Program(config, make_mesh(layout))
    state = program.states.new(read_params(program, directory))
    batch = wanted.batch(np.random.default_rng(0))
    _, metrics, gradients = program.step_with_gradients(state, batch)
    terms = family_of(config.model).losses(config.model)
    # The only term has no column of its own.
    losses = {name: float(metrics.get(name, metrics["loss"])) for name in ("loss", *terms)}
    return losses, jaxptd.hf.names(program, dict(gradients), is_canonical=False)


def check_losses(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == {"loss", *expected}
    for name, value in {"loss": sum(expected.values()), **expected}.items():
        assert abs(found[name] - value) < 1e-12, name


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("bert", Layout(cp=2, tp=2, sequence_parallel=True, ring="blockwise")),
        ("t5", Layout()),
        slow("t5-1.1", Layout()),
    ],
    ids=str,
)
def test_numbers_are_those_of_transformers(tmp_path: Path, name: str, layout: Layout) -> None:
    tensors, config = encoders.TINY[name]
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    folder = write_directory(tmp_path / name, tensors(), base=config, shards=2)
    with jax.enable_x64(True):
        losses, gradients = computed(name, folder, layout)
    check_losses(losses, golden["losses"])
    assert set(gradients) == set(golden["gradients"])
    for tensor, expected in golden["gradients"].items():
        scale = max(expected[0], 1e-3)  # of a key's bias the gradient is zero but for roundings
        found = reference.summary(gradients[tensor])
        np.testing.assert_allclose(found, expected, atol=1e-10 * scale, err_msg=tensor)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each model, written by transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    found = {name: tmp_path_factory.mktemp("hf") / name for name in encoders.REFERENCES}
    for name, folder in found.items():
        encoders.make(encoders.REFERENCES[name], folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", encoders.REFERENCES)
def test_transformers_itself_agrees(folders, name: str, layout: Layout) -> None:
    wanted = encoders.REFERENCES[name]
    batch = wanted.batch(np.random.default_rng(0))
    losses, expected = encoders.losses_and_gradients(wanted, folders[name], batch)
    with jax.enable_x64(True):
        found, gradients = computed(name, folders[name], layout)
    check_losses(found, losses)
    assert set(gradients) == set(expected)
    for tensor, x in expected.items():
        scale = max(float(np.linalg.norm(x)), 1e-6)  # a key's bias has none but roundings
        assert np.linalg.norm(gradients[tensor] - x) < 1e-10 * scale, tensor
