"""Saves on one layout, restores on another: bits of every ordered pair, then training."""

import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from jaxptd.checkpoint import Checkpoints
from jaxptd.checkpoint.canonical import abstract_canonical, from_canonical, to_canonical
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program, State

LAYOUTS = {
    "one": Layout(),
    "dp8": Layout(dp=8),
    "tp4": Layout(tp=4),
    "sp": Layout(dp=2, tp=4, sequence_parallel=True),
    "cp": Layout(cp=4),
    "2x2": Layout(row=2, col=2),
    "2x4 padded": Layout(row=2, col=4),
    "1f1b": Layout(pp=4, ep=2),
    "interleaved": Layout(pp=2, tp=2, schedule="interleaved"),
    "uneven": Layout(pp=2, tp=2, stage_layers=(1, 3)),
    "zero1": Layout(dp=3, cp=2, zero=1),
    "zero2 tp": Layout(ep=2, tp=4, zero=2),
    "zero3 pp": Layout(pp=2, dp=4, zero=3),
    "zero3 cp": Layout(dp=2, ep=2, cp=2, zero=3),
    "zero3 ulysses": Layout(cp=2, ulysses=2, zero=3),
    "zero3 2x2": Layout(dp=2, row=2, col=2, zero=3),
    "zero3 split": Layout(replicas=2, dp=2, tp=2, zero=3, replica_state="split"),
    "zero3 uneven": Layout(pp=2, dp=3, stage_layers=(1, 3), schedule="zb-h1", zero=3),
}
DEFAULT = ("zero3 cp", "zero3 2x2", "zero3 split")  # the slow tests cover all layouts
SIZES = {"num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 12, "batch": 24, "micro_batches": 1}


@functools.cache
def program(name: str) -> Program:
    layout = LAYOUTS[name]
    return tiny.FromZeros(tiny.config(layout, **SIZES), make_mesh(layout))


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def numbers() -> Any:
    """Canonical state of random values: parameters, moments and step."""
    leaves, tree = jax.tree.flatten(abstract_canonical(program("one")))
    draw = np.random.default_rng(0)
    return jax.tree.unflatten(
        tree,
        [draw.normal(size=x.shape).astype(x.dtype) if x.shape else x.dtype.type(7) for x in leaves],
    )


def on(name: str, canonical: Any) -> State:
    """State of a layout, from a canonical state on any devices."""
    target = abstract_canonical(program(name))
    placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), canonical, target)
    return from_canonical(program(name), placed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoints]:
    """Returns a function that saves the state of `numbers` from a layout's stored form."""

    @functools.cache
    def save(name: str) -> Checkpoints:
        held = on(name, numbers())
        expected = jax.tree.map(lambda x: (x.shape, x.dtype), program(name).abstract_state)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), held) == expected
        checkpoints = Checkpoints(tmp_path_factory.mktemp("saved"), keep=1)
        checkpoints.save(7, to_canonical(program(name), held), description={})
        return checkpoints

    return save


def check_same_bits(saved: Callable[[str], Checkpoints], names: Iterable[str], there: str) -> None:
    """Checks that all restored states are equal, then converts the last to the layout and back."""
    state, target = numbers(), abstract_canonical(program(there))
    for here in names:
        if here != there:
            restored = saved(here).restore(7, target)
            same(restored, state)
            for x, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
                assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    same(to_canonical(program(there), from_canonical(program(there), restored)), state)


@pytest.mark.parametrize("there", DEFAULT)
def test_from_some_layouts_the_same_bits_come_to_others(saved, there: str) -> None:
    check_same_bits(saved, DEFAULT, there)


@pytest.mark.slow
@pytest.mark.parametrize("there", LAYOUTS)
def test_from_every_layout_the_same_bits_come_to_every_other(saved, there: str) -> None:
    check_same_bits(saved, LAYOUTS, there)


def test_there_are_enough_layouts() -> None:
    assert len(LAYOUTS) >= 12


# ---- training continues -------------------------------------------------------------------------

BEFORE, AFTER = 2, 2  # steps


@functools.cache
def rows(step: int) -> dict[str, np.ndarray]:
    """Batch of a step, counted from 0."""
    shape = (SIZES["batch"], tiny.MODEL.seq_length + 1)
    ids = np.random.default_rng(step).integers(0, tiny.VOCAB, shape).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def steps(name: str, state: State, numbers: range) -> tuple[State, list[tuple[float, float]]]:
    """State after these steps, with each step's loss and gradient norm."""
    found = []
    for step in numbers:
        state, metrics = program(name).train_step(state, program(name).place(rows(step)))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return state, found


@functools.cache
def begun(name: str) -> Any:
    """Canonical state of a layout after its first steps, as numpy arrays."""
    state = Program(program(name).config, program(name).mesh).init_state()
    state, _ = steps(name, state, range(BEFORE))
    return jax.tree.map(np.asarray, to_canonical(program(name), state))


@functools.cache
def uninterrupted() -> list[tuple[float, float]]:
    """Loss and gradient norm of the next steps, on one device."""
    return steps("one", on("one", begun("one")), range(BEFORE, BEFORE + AFTER))[1]


def check_training_continues(here: str, there: str, folder: Path) -> None:
    """Saves on one layout, restores on another and compares the next steps with one device's."""
    checkpoints, target = Checkpoints(folder, keep=1), abstract_canonical(program(there))
    state = begun(here)
    checkpoints.save(BEFORE, to_canonical(program(here), on(here, state)), description={})
    restored = checkpoints.restore(BEFORE, target)
    same(restored, state)
    assert int(restored["step"]) == BEFORE
    _, found = steps(there, from_canonical(program(there), restored), range(BEFORE, BEFORE + AFTER))
    np.testing.assert_allclose(found, uninterrupted(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("here", "there"), list(itertools.pairwise((*LAYOUTS, "one"))))
def test_the_curve_goes_on_from_every_layout_to_the_next(here, there, tmp_path) -> None:
    """Tests neighbours only, since every pair is compared bit for bit above."""
    check_training_continues(here, there, tmp_path)
