"""Slots of pools against numpy; conditionals and loops that XLA hoists nothing out of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.collectives import as_varying, varying_axes
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.pipeline.pools import CONDITIONALS, add, get, loop, put, run_if, run_one, zeros

STAGES, OTHERS = 4, 2
MESH = make_mesh(Layout(pp=STAGES, tp=OTHERS))
STAGED = P(Axis.PP)


def on_mesh(body: Callable, ins: Any, outs: Any) -> Callable:
    return jax.jit(jax.shard_map(body, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=True))


# ---- slots --------------------------------------------------------------------------------------


def tree(*lead: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.standard_normal((*lead, 2, 3)).astype(np.float32),
        "b": [rng.integers(0, 9, lead).astype(np.int32)],  # each slot is a number
    }


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("where", [(), (0,), (4,), (3, 1), (4, 0, 2)])
def test_get_and_put_take_any_number_of_indices(where: tuple[int, ...]) -> None:
    lead = (5, 3, 4)
    pool, values = tree(*lead), tree(*lead[len(where) :], seed=1)

    def both(pool: Any, values: Any, *where: Array) -> tuple[Any, Any]:
        return get(pool, *where), put(pool, values, *where)

    want = jax.tree.map(np.copy, pool)
    jax.tree.map(lambda x, y: x.__setitem__(where, y), want, values)
    for run, numbers in ((both, where), (jax.jit(both), map(jnp.int32, where))):
        part, changed = run(pool, values, *numbers)
        same(part, jax.tree.map(lambda x: x[where], pool))
        same(changed, want)


def test_add_adds_to_one_slot_only() -> None:
    pool, values = tree(5), tree(seed=1)
    want = jax.tree.map(np.copy, pool)
    jax.tree.map(lambda x, y: x.__setitem__(3, x[3] + y), want, values)
    same(add(pool, values, jnp.int32(3)), want)


def test_put_keeps_the_type_of_the_pool() -> None:
    pool = put(jnp.zeros((2, 3), jnp.bfloat16), jnp.full(3, 1.5), 1)
    assert pool.dtype == jnp.bfloat16
    np.testing.assert_array_equal(pool.astype(float), [[0] * 3, [1.5] * 3])


def test_zeros_vary_as_the_array_and_over_stages() -> None:
    def body(x: Array) -> Array:
        slots = zeros(jax.eval_shape(lambda: x * 2), 3, 2)
        assert varying_axes(slots) == {"pp", "tp"}
        assert slots.dtype == jnp.int32
        assert varying_axes(zeros(jax.eval_shape(lambda: jnp.ones(2)))) == {"pp"}
        slots = put(slots, x, 2, 1)
        assert varying_axes(put(slots, jnp.int32([7]), 0, 0)) == {"pp", "tp"}
        return slots[None, None]

    found = on_mesh(body, P(Axis.TP), P(Axis.PP, Axis.TP))(np.arange(2, dtype=np.int32))
    want = np.zeros((STAGES, OTHERS, 3, 2, 1), np.int32)
    want[:, :, 2, 1, 0] = np.arange(2)
    np.testing.assert_array_equal(found, want)


# ---- conditionals, and loops with zero or one iteration -----------------------------------------

TICKS = np.array([[1, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]], np.int32)


def careless(name: str, carry: Any, row: dict, body: Callable) -> Any:
    """The obvious loop, whose loop-invariant code XLA hoists."""
    with jax.named_scope(name):
        return lax.fori_loop(0, row[name], lambda i, carry: body(carry, row), carry)


def make_run(loop: Callable) -> Callable:
    """A scan over `TICKS` that adds the psum over tp of 3 * w[1] at each tick that a stage takes.

    The weight is the same at every tick, so by default XLA hoists the psum out of the loop.
    """

    def body(w: Array) -> Array:
        def work(total: Array, row: dict) -> Array:
            return total + lax.psum(row["number"] * get(w, row["slot"]), Axis.TP)

        def tick(total: Array, row: Array) -> tuple[Array, None]:
            taken = row[lax.axis_index(Axis.PP)]
            numbers = {"some": taken, "number": jnp.int32(3), "slot": jnp.int32(1)}
            return loop("some", total, numbers, work), None

        start = as_varying(jnp.zeros(w.shape[1:], w.dtype), [Axis.PP])
        return lax.scan(tick, start, jnp.asarray(TICKS))[0][None]

    return on_mesh(body, P(Axis.PP, Axis.TP), STAGED)


W = np.arange(2.0 * STAGES * OTHERS * 3, dtype=np.float32).reshape(2 * STAGES, OTHERS, 3)


@pytest.mark.parametrize("loop", [run_if, loop, careless])
def test_a_body_runs_zero_times_or_once(loop: Callable) -> None:
    """Stages run the body, which contains a psum over tp, in different ticks."""
    found = np.asarray(make_run(loop)(W))
    np.testing.assert_array_equal(found[:, 0], 3 * TICKS.sum(0)[:, None] * W[1::2].sum(1))


def sums(loop: Callable) -> int:
    """Number of all-reduces over tp that the compiled program executes on all stages together."""
    text = make_run(loop).lower(W).compile().as_text()
    sizes = {str(axis): size for axis, size in MESH.shape.items()}
    found = list(collectives_from_hlo(text, sizes, {"some": int(TICKS.sum())}))
    assert [(c.kind, c.axes) for c in found] == [("all-reduce", ("tp",))]
    return found[0].count


@pytest.mark.parametrize("loop", [run_if, loop])
def test_xla_moves_nothing_out(loop: Callable) -> None:
    """Collectives, even loop-invariant ones, run only on the stages and ticks that need them."""
    assert sums(loop) == TICKS.sum()


@pytest.mark.parametrize("names", [("sum", "double"), ("double", "sum")])
def test_one_body_runs_or_none(names: tuple[str, str]) -> None:
    """Each stage runs its choice: a psum over tp, once per stage that takes it, or a doubling."""
    chosen = np.array([[1, 2, 0, 1], [2, 2, 1, 0], [0, 1, 1, 1], [1, 0, 2, 2]], np.int32)

    def body(w: Array) -> Array:
        bodies = {
            "sum": lambda total, row: total + lax.psum(row["number"] * get(w, 1), Axis.TP),
            "double": lambda total, row: 2 * total,
        }

        def tick(total: Array, row: Array) -> tuple[Array, None]:
            taken = row[lax.axis_index(Axis.PP)]
            numbers = {"sum": taken == 1, "double": taken == 2, "number": 3}
            numbers = {name: jnp.int32(number) for name, number in numbers.items()}
            return run_one("some", total, numbers, {name: bodies[name] for name in names}), None

        start = as_varying(jnp.zeros(w.shape[1:], w.dtype), [Axis.PP])
        return lax.scan(tick, start, jnp.asarray(chosen))[0][None]

    want = np.zeros((STAGES, 3))
    for row in chosen[..., None]:
        want = np.where(row == 1, want + 3 * W[1::2].sum(1), np.where(row == 2, 2 * want, want))
    run = on_mesh(body, P(Axis.PP, Axis.TP), STAGED)
    np.testing.assert_array_equal(np.asarray(run(W))[:, 0], want)
    if CONDITIONALS:
        text = run.lower(W).compile().as_text()
        counts = {"sum": int((chosen == 1).sum()), "double": int((chosen == 2).sum())}
        trips = {f"some/{number}": counts[name] for number, name in enumerate(names)}
        sizes = {str(axis): size for axis, size in MESH.shape.items()}
        assert [c.count for c in collectives_from_hlo(text, sizes, trips)] == [counts["sum"]]


def test_xla_moves_the_sum_out_of_a_careless_loop() -> None:
    """The hoisted sum runs on every stage, needed or not."""
    assert sums(careless) != TICKS.sum()
