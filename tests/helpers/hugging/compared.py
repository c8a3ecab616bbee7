"""Our losses and gradients on a layout, and transformers', in float64."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxptd
from hugging import encoders, reference
from jaxptd import Layout, Program, TrainConfig, make_mesh
from jaxptd.hf.directory import Directory
from jaxptd.hf.load import config_of
from jaxptd.hf.read import read_params
from jaxptd.models.families import family_of

Losses = dict[str, float]


def computed(name: str, folder: Path, layout: Layout) -> tuple[Losses, dict[str, Any]]:
    """Our losses, with their sum as `loss`, and our gradients by transformers' names."""
    wanted, directory = encoders.ALL[name], Directory(folder)
    with jax.enable_x64(True):
        config = config_of(directory, dtype="float64", **wanted.sizes)
        train = TrainConfig(global_batch_size=encoders.ROWS, micro_batches=layout.pp)
        config = dataclasses.replace(config, layout=layout, train=train)
        program = Program(config, make_mesh(layout))
        state = program.states.new(read_params(program, directory))
        batch = wanted.batch(np.random.default_rng(0))
        _, metrics, gradients = program.step_with_gradients(state, batch)
        # A single term is logged as `loss`, without a separate column.
        terms = family_of(config.model).losses(config.model)
        names = ("loss", *(name for name, term in terms.items() if term.trained))
        losses = {name: float(metrics.get(name, metrics["loss"])) for name in names}
        return losses, jaxptd.hf.names(program, dict(gradients), is_canonical=False)


def check_losses(found: Losses, expected: Losses) -> None:
    assert found.keys() == {"loss", *expected}
    for name, value in {"loss": sum(expected.values()), **expected}.items():
        assert abs(found[name] - value) < 1e-12, name


def check_golden(name: str, golden: Path, folder: Path, layout: Layout) -> None:
    """Asserts that every loss and gradient equals transformers', read from a golden file."""
    expected = json.loads(golden.read_text())
    losses, gradients = computed(name, folder, layout)
    check_losses(losses, expected["losses"])
    reference.check_summaries(gradients, expected["gradients"])


def compare(name: str, folder: Path, layout: Layout) -> None:
    """Asserts that every loss and gradient equals that of transformers' model, run here."""
    wanted = encoders.ALL[name]
    batch = wanted.batch(np.random.default_rng(0))
    losses, expected = encoders.losses_and_gradients(wanted, folder, batch)
    found, gradients = computed(name, folder, layout)
    check_losses(found, losses)
    assert set(gradients) == set(expected)
    for tensor, x in expected.items():
        scale = max(float(np.linalg.norm(x)), 1e-6)  # a key's bias has only rounding noise
        assert np.linalg.norm(gradients[tensor] - x) < 1e-10 * scale, tensor
