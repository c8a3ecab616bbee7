"""Compares a step of any layout with one device's step, which is cached per model."""

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from jaxptd.analysis.comparison import FirstSteps, Outcome, Tensors, compare, perturbed
from jaxptd.analysis.verification import SEEDS, OneStep, Report, verify
from jaxptd.mesh import Layout, make_mesh

ROOT = Path(__file__).parents[2]


@functools.cache
def one_device(choice: tuple[tuple[str, Any], ...]) -> tuple[Tensors, Outcome, list[Outcome]]:
    """Parameters, a step from them, and steps from parameters perturbed by one rounding error."""
    config = tiny.config(Layout(), micro_batches=1, **dict(choice))
    one = tiny.FromZeros(config, make_mesh(Layout()))
    start, eps = tiny.random_params(one), float(np.finfo(one.resolved.master_dtype).eps)
    step = OneStep(one)
    return start, step.run(start), [step.run(perturbed(start, eps, seed)) for seed in SEEDS]


# Fields that change how a step is computed, not its result: one device need not use them.
HOW = ("remat", "scan_layers", "micro_batches", "kernels")


def report(layout: Layout, dtype: Any, **choice: Any) -> Report:
    """The report of `verify`, with one device's step from the cache."""
    with jax.enable_x64(True):
        same = {name: value for name, value in choice.items() if name not in HOW}
        start, expected, rounded = one_device(tuple((same | {"dtype": dtype}).items()))
        config = tiny.config(layout, dtype=dtype, **choice)
        spread = tiny.FromZeros(config, make_mesh(layout))
        found = OneStep(spread).run(start)
        steps = FirstSteps(config.optimizer, spread.infos, float(np.finfo(dtype).eps))
        rows = compare(expected, [(each, expected) for each in rounded], found, steps=steps)
        return Report(layout, dtype, list(rows))


def verified(layout: Layout, dtype: Any = "float64", **choice: Any) -> Report:
    """The report of `verify`, by default of a model with dropout."""
    with jax.enable_x64(True):
        return verify(tiny.config(layout, **{"dropout": 0.1, **choice}), dtype=dtype)


def hold(layout: Layout, **choice: Any) -> None:
    """Asserts that a step in float64 equals one device's."""
    found = report(layout, "float64", **choice)
    assert found.wrong == []
    assert found.worst_gradient <= 1e-12


def case(choice: dict, micro_batches: int, **layout: Any) -> Any:
    """A parameter set (layout, choice) of pytest, with a readable id."""
    made = Layout(**layout)
    how = " ".join(str(value) for name, value in choice.items() if name in HOW)
    return pytest.param(
        made, choice | {"micro_batches": micro_batches}, id=f"{made} m={micro_batches} {how}"
    )


def hold_in_a_process(
    layout: str, *, num_layers: int, batch: int = 16, micro_batches: int = 8, **model: Any
) -> None:
    """Runs `verify` as a command, on as many devices as the layout needs.

    Args:
        layout: fields of the layout, such as `dp=2 tp=2`.
        num_layers: number of layers.
        batch: sequences per step.
        micro_batches: number of micro-batches in each device's share of the batch.
        model: other fields of the model.
    """
    command = [sys.executable, "-m", "jaxptd.verify", "--config", "configs/test-tiny.yaml"]
    fields = {"num_layers": num_layers, **model}
    sizes = [f"--model.{name}={value}" for name, value in fields.items()]
    sizes += [f"--train.global_batch_size={batch}", f"--train.micro_batches={micro_batches}"]
    spread = [f"--layout.{each}" for each in layout.split()]
    ended = subprocess.run(
        [*command, "--quiet", "--data.tokenizer=bytes", *sizes, *spread],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    worst = re.search(r"one device in float64: gradients\s+to\s+(\S+)", ended.stdout)
    assert worst, ended.stdout
    assert float(worst[1]) <= 1e-12
