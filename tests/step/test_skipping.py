"""Skipped steps and float16 with loss scaling are the same on every layout."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contract import relative
from turns import slow

from jaxptd.checkpoint.canonical import from_canonical, to_canonical
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program
from jaxptd.step import state as step_state

PIPELINE = Layout(pp=2, dp=2, tp=2, schedule="zb-h1")
GRID = Layout(dp=2, row=2, col=2)
MORE = [PIPELINE, tiny.CONTEXT_PARALLEL, GRID, Layout(cp=4, ring="rsa"), Layout(row=2, col=2, cp=2)]
MORE += [Layout(pp=2, tp=2, cp=2, sequence_parallel=True), Layout(pp=2, schedule="gpipe")]
MORE += [dataclasses.replace(GRID, zero=3), dataclasses.replace(PIPELINE, zero=2)]
MORE += [Layout(dp=2, cp=2, zero=1), Layout(offload="optimizer")]
EVERY = [slow(tiny.SEQUENCE_PARALLEL), slow(Layout(dp=2, tp=2, zero=3, offload="optimizer"))]
EVERY += [slow(layout) for layout in MORE]


ONE = {"num_layers": 1}


@functools.cache
def program(layout: Layout, *, skip_above: float = 0.0, **choices) -> Program:
    config = tiny.config(layout, **choices)
    optimizer = dataclasses.replace(config.optimizer, skip_above=skip_above)
    return Program(dataclasses.replace(config, optimizer=optimizer), make_mesh(layout))


def steps(program: Program, state: dict, count: int) -> tuple[dict, list[dict]]:
    """The state after some steps, and their metrics."""
    rows = []
    for _ in range(count):
        batch = program.place(tiny.batch(int(state["step"])))
        state, metrics = program.train_step(state, batch)
        rows.append({name: float(x) for name, x in metrics.items()})
    return state, rows


def scaled(program: Program, scale: float) -> dict:
    """The initial state with another loss scale."""
    state = program.init_state()
    like = state["guard"]["scale"]
    return {
        **state,
        "guard": {**state["guard"], "scale": jax.device_put(np.float32(scale), like.sharding)},
    }


def column(rows: list[dict], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows])


def copied(tree):
    return jax.tree.map(np.array, tree)


# ---- the guard --------------------------------------------------------------------------------


def after(scale: float, good: int, *, norm: float, sound: bool, dtype="float16") -> tuple:
    start = {**step_state.new_guard(dtype), "scale": jnp.float32(scale), "good": jnp.int32(good)}
    start |= {"skipped": jnp.int32(5), "in_row": jnp.int32(2)}
    end = step_state.after_step(start, jnp.array(sound), jnp.float32(norm), dtype)
    assert {name: x.dtype for name, x in end.items()} == {n: x.dtype for n, x in start.items()}
    return tuple(float(end[name]) for name in ("scale", "good", "skipped", "in_row"))


def test_the_scale_is_halved_by_an_overflow_and_doubled_by_many_good_steps():
    last = step_state.GROW_AFTER - 1
    assert after(8, 3, norm=1, sound=True) == (8, 4, 5, 0)
    assert after(8, last, norm=1, sound=True) == (16, 0, 5, 0)
    assert after(8, last, norm=math.inf, sound=False) == (4, 0, 6, 3)
    assert after(8, 3, norm=math.nan, sound=False) == (4, 0, 6, 3)
    assert after(1, 3, norm=math.nan, sound=False) == (1, 0, 6, 3)
    assert after(step_state.LARGEST_SCALE, last, norm=0, sound=True) == (
        step_state.LARGEST_SCALE,
        0,
        5,
        0,
    )


def test_an_explosion_is_no_overflow():
    assert after(8, 3, norm=1e9, sound=False) == (8, 0, 6, 3)


def test_other_precisions_are_not_scaled():
    assert after(1, 1999, norm=1, sound=True, dtype="bfloat16") == (1, 2000, 5, 0)
    assert after(1, 3, norm=math.nan, sound=False, dtype="float32") == (1, 0, 6, 3)
    assert float(step_state.new_guard("float32")["scale"]) == 1
    assert float(step_state.new_guard("float16")["scale"]) == 2**15


@pytest.mark.parametrize(
    ("loss", "norm", "limit", "sound"),
    [
        (1, 5, 0, True),
        (1, 5, 5, True),
        (1, 5.1, 5, False),
        (math.nan, 5, 0, False),
        (math.inf, 5, 0, False),
        (1, math.nan, 0, False),
        (1, math.nan, 9, False),
        (1, math.inf, 0, False),
    ],
)
def test_which_steps_are_taken(loss, norm, limit, sound):
    assert bool(step_state.is_sound(jnp.float32(loss), jnp.float32(norm), limit)) is sound


# ---- steps ------------------------------------------------------------------------------------


def assert_left(before: dict, state: dict) -> None:
    for name in ("params", "optimizer"):
        for old, new in zip(*map(jax.tree.leaves, (before[name], state[name])), strict=True):
            np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_an_explosion_is_skipped_in_any_precision():
    run, cautious = program(Layout(), **ONE), program(Layout(), skip_above=1e-9, **ONE)
    state, _ = steps(run, run.init_state(), 1)  # so that the moments are not zero
    before = copied(state)
    state, rows = steps(cautious, state, 2)
    assert_left(before, state)
    assert int(state["step"]) == 3
    assert column(rows, "skipped").tolist() == column(rows, "skipped_in_row").tolist() == [1, 2]
    assert rows[0]["learning_rate"] < rows[1]["learning_rate"]  # depends only on the step
    state, (row,) = steps(run, state, 1)
    assert (row["skipped"], row["skipped_in_row"]) == (2, 0)
    assert np.abs(np.asarray(state["params"]["norm.w"]) - before["params"]["norm.w"]).max() > 0
    assert "loss_scale" not in row


def test_the_loss_is_the_mean_of_counted_targets_and_a_step_without_any_is_skipped():
    run, batch = program(Layout(), **ONE), tiny.batch()
    counted = np.random.default_rng(0).random(batch["targets"].shape) < 0.3
    masks = [np.ones_like(counted), counted, ~counted, np.zeros_like(counted)]
    rows = []
    for mask in masks:
        state = run.init_state()
        before = copied(state)
        targets = np.where(mask, batch["targets"], -1)
        state, metrics = run.train_step(state, run.place({**batch, "targets": targets}))
        rows.append(metrics)
    skipped, losses = column(rows, "skipped"), column(rows, "loss")
    whole, some, others = (losses[i] * masks[i].sum() for i in range(3))
    assert whole == pytest.approx(some + others, rel=1e-6)
    assert skipped.tolist() == [0, 0, 0, 1]
    assert_left(before, state)


@functools.cache
def overflowing(layout: Layout) -> list[dict]:
    """Metrics of a step that overflows, and of five with a scale far below overflow."""
    run = program(layout, dtype="float16")
    state = scaled(run, 2.0**40)
    before = copied(state)
    state, first = steps(run, state, 1)
    assert_left(before, state)
    assert {float(x.data) for x in state["guard"]["scale"].addressable_shards} == {2.0**39}
    state["guard"]["scale"] = scaled(run, 2.0**10)["guard"]["scale"]
    return first + steps(run, state, 5)[1]


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_an_overflow_is_skipped_and_float16_trains_alike_on_every_layout(layout):
    """Results in float16 differ by rounding errors of 2**-11."""
    rows, want = overflowing(layout), overflowing(Layout())
    assert column(rows, "skipped").tolist() == [1] * 6
    assert column(rows, "skipped_in_row").tolist() == [1, 0, 0, 0, 0, 0]
    assert not np.isfinite(rows[0]["grad_norm"])
    np.testing.assert_allclose(column(rows, "loss"), column(want, "loss"), rtol=2**-11)
    norms = (column(each, "grad_norm")[1:] for each in (rows, want))
    np.testing.assert_allclose(*norms, rtol=4 * 2**-11)


@pytest.mark.slow
def test_a_scale_that_is_too_large_decreases_by_itself():
    """The final scale varies with the layout, as local sums are smaller on more devices."""
    run = program(Layout(dp=2), dtype="float16", **ONE)
    state, rows = steps(run, scaled(run, 2.0**26), 12)
    skipped = int(rows[-1]["skipped"])
    assert 2 <= skipped <= 9
    scale = 2.0 ** (26 - np.minimum(np.arange(12), skipped))
    np.testing.assert_array_equal(column(rows, "loss_scale"), scale)
    assert (int(state["step"]), int(state["guard"]["good"])) == (12, 12 - skipped)
    assert float(state["guard"]["scale"]) == 2.0 ** (26 - skipped)
    small, large = (steps(run, scaled(run, scale), 1)[1][0]["grad_norm"] for scale in (2**9, 2**15))
    assert small == pytest.approx(large, rel=2**-8)


@pytest.mark.slow
def test_a_resumed_run_has_the_scale_and_continues_bit_for_bit(monkeypatch):
    monkeypatch.setattr(step_state, "GROW_AFTER", 4)
    run = Program(
        tiny.config(tiny.SEQUENCE_PARALLEL, dtype="float16"), make_mesh(tiny.SEQUENCE_PARALLEL)
    )
    state, first = steps(run, run.init_state(), 3)
    saved = copied(to_canonical(run, state))
    _, rest = steps(run, state, 4)
    assert [row["loss_scale"] / 2**15 for row in first + rest] == [1, 1, 1, 1, 2, 2, 2]
    target = jax.tree.map(lambda x: x.sharding, to_canonical(run, run.init_state()))
    back = from_canonical(run, jax.tree.map(jax.device_put, saved, target))
    assert steps(run, back, 4)[1] == rest


# ---- float16 ----------------------------------------------------------------------------------


def gradients(run: Program, state: dict | None = None) -> dict[str, np.ndarray]:
    _, metrics, grads = run.step_with_gradients(state or run.init_state(), run.place(tiny.batch()))
    assert int(metrics["skipped"]) == 0
    assert {g.dtype for g in grads.values()} == {jnp.dtype("float32")}
    return copied(run.canonical(grads))


def errors(found: dict, expected: dict) -> np.ndarray:
    return np.array([relative(found[name], want) for name, want in expected.items()])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [tiny.SEQUENCE_PARALLEL, *MORE], ids=str)
def test_float16_on_a_layout_is_float16_on_one_device(layout):
    """Results differ from float32 by about ten successive roundings of 2**-11 each."""
    exact = gradients(program(Layout(), dropout=0.1))
    one = gradients(program(Layout(), dtype="float16", dropout=0.1))
    found = gradients(program(layout, dtype="float16", dropout=0.1))
    assert 1e-4 < errors(one, exact).max() < 10 * 2**-11
    assert errors(found, exact).max() < 10 * 2**-11
    assert errors(found, one).max() < 10 * 2**-11


@pytest.mark.slow
def test_the_scale_keeps_small_gradients():
    """A tiny scale makes gradients underflow in float16."""
    run, exact = program(Layout(), dtype="float16"), program(Layout())
    norms = [
        steps(each, state, 1)[1][0]["grad_norm"]
        for each, state in (
            (exact, exact.init_state()),
            (run, run.init_state()),
            (run, scaled(run, 2.0**-14)),
        )
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert abs(norms[2] / norms[0] - 1) > 0.1


@pytest.mark.slow
def test_float16_learns_as_float32_does():
    curves = {
        dtype: column(steps(run, run.init_state(), 30)[1], "loss")
        for dtype in ("float32", "float16")
        for run in [program(tiny.SEQUENCE_PARALLEL, dtype=dtype)]
    }
    np.testing.assert_allclose(curves["float16"], curves["float32"], rtol=5e-3)
