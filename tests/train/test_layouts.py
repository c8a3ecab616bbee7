"""Every layout trains like one device: loss and gradient norm of 30 steps."""

import functools
from typing import get_args

import jax
import numpy as np
import pytest
from runs import (
    CONFIG,
    CONTEXT,
    DP2_TP2,
    DP2_TP4,
    GRID,
    PP2,
    SEQUENCE,
    TEXT,
    TP2,
    TP4,
)
from turns import latin, slow

from jaxptd.analysis.comparison import ROUNDINGS
from jaxptd.commands.command_line import load_config
from jaxptd.data import number_documents
from jaxptd.mesh import SCHEDULES, RingKind, make_mesh
from jaxptd.step import Program


def batches(count: int) -> np.ndarray:
    """Rows of text, int32[count, 8, 17]."""
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(ids) - 17, (count, 8, 1))
    return ids[starts + np.arange(17)]


@functools.cache
def curve(*overrides: str, roundings: float = 0) -> np.ndarray:
    """Loss and gradient norm of 30 steps, with dropout and two micro-batches: [30, 2].

    roundings: rounding errors by which to perturb each parameter before each step.
    """
    config = load_config(CONFIG, ["--model.vocab_size=257", *overrides])
    program = Program(config, make_mesh(config.layout))
    state, rows = program.init_state(), []
    for step, batch in enumerate(batches(30)):
        if roundings:
            state["params"] = {
                name: moved(p, roundings, step) for name, p in state["params"].items()
            }
        fields = {"tokens": batch[:, :-1], "targets": batch[:, 1:]}
        if config.data.documents == "apart":  # every line is a document
            fields["segments"] = number_documents(batch[:, :-1], ord("\n"))
        state, metrics = program.train_step(state, program.place(fields))
        rows.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(rows)


def moved(p: jax.Array, roundings: float, seed: int) -> jax.Array:
    """A parameter with each element perturbed by this many rounding errors, up or down."""
    signs = np.random.default_rng(seed).choice([-1, 1], p.shape)
    return (p * (1 + roundings * float(np.finfo(p.dtype).eps) * signs)).astype(p.dtype)


def spread(*overrides: str) -> np.ndarray:
    """Running maximum of the shift of one device's curve due to a rounding error in each step."""
    expected = curve(*overrides)
    change = np.abs(curve(*overrides, roundings=1) / expected - 1)
    return np.maximum.accumulate(change)


KINDS = get_args(RingKind)
DP4 = ("--layout.dp=4",)
LAYOUTS = [DP4, TP2, TP4, DP2_TP2, DP2_TP4]
LAYOUTS += [(*layout, SEQUENCE) for layout in LAYOUTS[1:]]
LAYOUTS += [(*DP2_TP4, SEQUENCE, "--layout.collective_matmul=true")]
RINGS = [(f"--layout.cp={cp}", f"--layout.ring={ring}") for cp in (2, 8) for ring in KINDS]
RINGS += [(*CONTEXT, f"--layout.ring={ring}") for ring in KINDS]
LAYOUTS += [*RINGS, ("--layout.cp=4", *TP2)]
GRIDS = [(*GRID, f"--layout.matmul2d={kind}") for kind in ("gather", "summa", "fox", "cannon")]
GRIDS += [
    (*GRID, "--layout.dp=2"),
    (*GRID, "--layout.cp=2"),
    (*GRID, "--layout.attention2d=blocks"),
]
GRIDS += [("--layout.row=2", "--layout.col=4", f"--layout.ring={ring}") for ring in KINDS]
GRIDS += [("--layout.row=2", "--layout.col=4", "--layout.matmul2d_slices=2")]
GRIDS += [("--layout.row=2", "--layout.col=4", "--layout.matmul2d=summa")]
LAYOUTS += GRIDS
SAMPLES = (*DP4, "--layout.balance=samples")
TOKENS = (*CONTEXT, "--layout.ring=gather", "--layout.balance=tokens")
PIPELINES = [(*PP2, "--layout.dp=2"), (*PP2, *TP2, SEQUENCE), (*PP2, *GRID), (*PP2, *RINGS[0])]
LAYOUTS += PIPELINES
ZEROS = [
    (*layout, f"--layout.zero={stage}")
    for layout in (DP4, (*DP2_TP4, SEQUENCE), (*GRID, "--layout.dp=2"), CONTEXT, PIPELINES[0])
    for stage in (1, 2, 3)
]
LAYOUTS += ZEROS
WAYS = [(f"--model.remat={remat}",) for remat in ("dots", "attention", "full")]
WAYS += [("--model.scan_layers=false",), ("--train.micro_batches=1",), ("--train.micro_batches=4",)]


def name(overrides: tuple[str, ...]) -> str:
    return " ".join(o.rpartition(".")[2] for o in overrides)


@pytest.mark.parametrize(
    "overrides",
    [slow(CONTEXT), slow(GRIDS[4]), slow(ZEROS[-1])],
    ids=name,
)
def test_a_layout_trains_as_one_device_does(overrides):
    expected = curve()
    assert expected[-1, 0] < 0.6 * expected[0, 0]  # it learns
    np.testing.assert_allclose(curve(*overrides), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", LAYOUTS + WAYS, ids=name)
def test_every_layout_trains_as_one_device_does(overrides):
    np.testing.assert_allclose(curve(*overrides), curve(), rtol=1e-5)
    with jax.enable_x64(True):
        double = "--model.dtype=float64"
        np.testing.assert_allclose(curve(double, *overrides), curve(double), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "micro_batches", "remat"), latin(SCHEDULES, (1, 4, 8), ("none", "full"))
)
def test_every_schedule_trains_as_one_device_does(schedule, remat, micro_batches):
    model = ("--model.num_layers=5",)
    how = (f"--model.remat={remat}", f"--train.micro_batches={micro_batches}")
    found = curve(*model, *PP2, *TP2, f"--layout.schedule={schedule}", *how)
    allowed = ROUNDINGS * np.maximum(spread(*model), np.finfo(np.float32).eps)
    np.testing.assert_array_less(np.abs(found / curve(*model) - 1), allowed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [DP2_TP4, *RINGS, GRIDS[5], GRIDS[6], SAMPLES, TOKENS], ids=name
)
def test_every_layout_keeps_documents_apart_as_one_device_does(overrides):
    apart = "--data.documents=apart"
    assert np.abs(curve(apart) - curve()).max() > 1e-3
    np.testing.assert_allclose(curve(apart, *overrides), curve(apart), rtol=1e-5)
