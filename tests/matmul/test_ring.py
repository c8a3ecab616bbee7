"""Matmuls in ring steps against dense ones: values, gradients, hops and residuals."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import TOLERANCES, relative
from jax import Array
from jax.sharding import PartitionSpec as P
from turns import by_turns, slow

from jaxptd.analysis.count import collectives_of
from jaxptd.analysis.jaxprs import equations
from jaxptd.collectives import varying_axes
from jaxptd.costs.collective import PERMUTE, Collective
from jaxptd.matmul.ring import gather_product, product_scatter, visited_sums
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.pipeline.split_backward import SplitBackward

B, D, HEADS, SIZE = (
    2,
    6,
    3,
    5,
)  # w is [D, 3 n, SIZE] or its transpose; its sharded dim divides over n
X, H = P(None, Axis.TP), P(None, None, Axis.TP)
FORMS: dict[str, tuple[Callable, P, P, P]] = {
    "gather": (gather_product, X, P(None, Axis.TP), H),
    "scatter": (product_scatter, H, P(Axis.TP), X),
}


def tokens(devices: int) -> int:
    return 2 * devices


def inputs(form: str, devices: int) -> tuple[np.ndarray, ...]:
    """x, w and the gradient of y, global."""
    rng, heads = np.random.default_rng(0), (HEADS * devices, SIZE)
    wide, narrow = (B, tokens(devices), *heads), (B, tokens(devices), D)
    shapes = (narrow, (D, *heads), wide) if form == "gather" else (wide, (*heads, D), narrow)
    return tuple(rng.standard_normal(shape) for shape in shapes)


def dense(form: str, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    """y, dx, dw."""
    if form == "gather":
        sums = "btd,dnh->btnh", "btnh,dnh->btd", "btd,btnh->dnh"
    else:
        sums = "btnh,nhd->btd", "btd,nhd->btnh", "btnh,btd->nhd"
    pairs = (x, w), (dy, w), (x, dy)
    return [np.einsum(how, *pair) for how, pair in zip(sums, pairs, strict=True)]


def on_ring(form: str, devices: int, stages: int = 1) -> Callable:
    """x, w, dy -> y, dx, dw."""
    product, x, w, y = FORMS[form]

    def body(a: Array, b: Array, dy: Array) -> tuple[Array, ...]:
        result, back = jax.vjp(partial(product, axis=Axis.TP), a, b)
        return result, *back(dy)

    return jax.shard_map(
        body,
        mesh=make_mesh(Layout(tp=devices, pp=stages)),
        in_specs=(x, w, y),
        out_specs=(y, x, w),
        check_vma=True,
    )


@pytest.mark.parametrize("devices", [slow(1), slow(2), 3, slow(4), slow(8)])
@pytest.mark.parametrize(("form", "dtype"), by_turns(list(FORMS), list(TOLERANCES)))
def test_value_and_gradients_are_the_dense_ones(form: str, devices: int, dtype: str) -> None:
    x, w, dy = inputs(form, devices)
    with jax.enable_x64(dtype == "float64"):
        found = jax.jit(on_ring(form, devices))(*(jnp.asarray(a, dtype) for a in (x, w, dy)))
    for name, got, want in zip(("y", "dx", "dw"), found, dense(form, x, w, dy), strict=True):
        assert got.dtype == dtype
        assert relative(np.asarray(got), want) <= TOLERANCES[dtype], name


@pytest.mark.parametrize("form", ["gather", slow("scatter")])
def test_the_precision_is_that_of_x_and_of_dw_that_of_w(form: str) -> None:
    """bfloat16 has 8 bits; y is rounded once per hop if sums travel, dw once at the end."""
    x, w, dy = (a.astype(np.float32) for a in inputs(form, 4))
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in (x, dy)]
    y, dx, dw = jax.jit(on_ring(form, 4))(narrow[0], w, narrow[1])
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    rounded = np.asarray(narrow[0], np.float32), np.asarray(narrow[1], np.float32)
    want = dense(form, rounded[0], np.asarray(jnp.asarray(w, jnp.bfloat16), np.float32), rounded[1])
    for got, exact, bits in zip((y, dx, dw), want, (8, 8, 22), strict=True):
        assert relative(np.asarray(got, np.float32), exact) <= 2.0**-bits * 2


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_three_or_two_rounds_of_hops_and_nothing_else(form: str, devices: int) -> None:
    """Forward sends one array; backward sends sums and blocks of x, or blocks of dy."""
    arrays = [jnp.asarray(a, jnp.float32) for a in inputs(form, devices)]
    traced = jax.jit(on_ring(form, devices)).trace(*arrays)
    moved = collectives_of(traced.jaxpr, make_mesh(Layout(tp=devices)))
    hops = (3 if form == "gather" else 2) * (devices - 1)
    block = B * tokens(devices) // devices * D * 4
    assert moved == [Collective(PERMUTE, ("tp",), hops, hops * block)] * (devices > 1)


@pytest.mark.parametrize("form", ["gather", slow("scatter")])
def test_without_a_permute_the_numbers_are_the_same(form: str) -> None:
    """Compares with a mesh of two stages, where CPUs use all-gathers instead."""
    arrays = [jnp.asarray(a, jnp.float32) for a in inputs(form, 4)]
    permuted, gathered = (jax.jit(on_ring(form, 4, stages))(*arrays) for stages in (1, 2))
    for a, b in zip(permuted, gathered, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_a_split_backward_leaves_the_weights_products_to_w(form: str) -> None:
    """Splits backward as zero-bubble schedules do: n matmuls and n - 1 hops in B, and in W."""
    product, x_spec, w_spec, y_spec = FORMS[form]
    counted: list[dict[str, int]] = []

    def count(run: Callable, *arguments: Any) -> None:
        names = [each.primitive.name for each in equations(jax.make_jaxpr(run)(*arguments).jaxpr)]
        counted.append({name: names.count(name) for name in ("dot_general", "ppermute")})

    def body(x: Array, w: Array, dy: Array) -> tuple[Array, Array]:
        def backward(kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
            dx, dw = jax.vjp(partial(product, axis=Axis.TP), *kept)[1](dy)
            return dw, dx

        split = SplitBackward.trace(backward, (x, w), dy)
        dx, passed = split.input_backward((x, w), dy)
        count(split.input_backward, (x, w), dy)
        count(split.weight_backward, (x, w), passed)
        return dx, split.weight_backward((x, w), passed)

    x, w, dy = inputs(form, 4)
    specs = {"in_specs": (x_spec, w_spec, y_spec), "out_specs": (x_spec, w_spec)}
    with jax.enable_x64(True):
        run = jax.jit(jax.shard_map(body, mesh=make_mesh(Layout(tp=4)), **specs))
        found = run(x, w, dy)
    for got, want in zip(found, dense(form, x, w, dy)[1:], strict=True):
        assert relative(np.asarray(got), want) <= 1e-12
    assert counted == [{"dot_general": 4, "ppermute": 3}] * 2


def test_a_sequence_that_does_not_split_is_refused() -> None:
    x, w, _ = inputs("scatter", 4)
    arguments = {"in_specs": (H, P(Axis.TP)), "out_specs": X, "mesh": make_mesh(Layout(tp=4))}
    run = jax.shard_map(partial(product_scatter, axis=Axis.TP), **arguments)
    with pytest.raises(ValueError, match="7 tokens do not split over tp=4"):
        jax.eval_shape(run, x[:, :7], w)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_whole_is_kept_for_backward(form: str) -> None:
    """Residuals are the local operands only."""
    product, x_spec, w_spec, y_spec = FORMS[form]
    kept: list[tuple[int, ...]] = []

    def body(x: Array, w: Array) -> Array:
        y, back = jax.vjp(partial(product, axis=Axis.TP), x, w)
        kept.extend(leaf.shape for leaf in jax.tree.leaves(back))
        assert varying_axes(y) == {"tp"}
        return y

    x, w, _ = inputs(form, 4)
    specs = {"in_specs": (x_spec, w_spec), "out_specs": y_spec}
    jax.eval_shape(jax.shard_map(body, mesh=make_mesh(Layout(tp=4)), **specs), x, w)
    elements = sorted(int(np.prod(shape)) for shape in kept)
    assert elements == sorted((x.size // 4, w.size // 4))


# ---- functions other than matmuls ----------------------------------------------------------------

AROUND = (Axis.EP, Axis.TP)


def part(x: tuple[Any, Any], shift: Any, w: Any) -> Any:
    """A device's term in the sum for its own or another's tokens; linear in neither."""
    return jnp.sin(x[0] @ w[0] + shift[:, None]) * x[1] @ w[1]


@functools.cache
def visits(layout: Layout) -> Callable:
    """x, its accompanying numbers, w of each device, dy -> the sums, dx, dw."""

    def body(x: Any, shift: Array, w: Any, dy: Array) -> Any:
        (own,) = w
        y, back = jax.vjp(lambda x, w: visited_sums(part, x, shift, w, AROUND), x, own)
        dx, dw = back(dy)
        return y, dx, [dw]

    tokens, experts = P(AROUND), P(AROUND)
    specs = tokens, tokens, experts, tokens
    mesh, out = make_mesh(layout), (tokens, tokens, experts)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out))


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(ep=2), Layout(ep=3), slow(Layout(ep=2, tp=2))], ids=str
)
def test_each_block_visits_every_device_and_its_sum_returns(layout: Layout) -> None:
    rng, devices = np.random.default_rng(0), layout.ep * layout.tp
    x = rng.standard_normal((2 * devices, 3)), rng.standard_normal((2 * devices, 4))
    w = rng.standard_normal((devices, 3, 4)), rng.standard_normal((devices, 4, 5))
    dy, number = rng.standard_normal((2 * devices, 5)), np.arange(2 * devices)

    def on_one(x: Any, w: Any) -> Any:
        return sum(part(x, number, (w[0][i], w[1][i])) for i in range(devices))

    with jax.enable_x64(True):
        flat = [tuple(each.reshape(-1, *each.shape[2:]) for each in w)]
        found = visits(layout)(x, number, flat, dy)
        y, back = jax.vjp(on_one, x, w)
        expected = y, *back(np.asarray(dy))
        found, expected = jax.tree.map(np.asarray, (found, expected))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative(got.reshape(want.shape), want) < 1e-14


def test_gradients_of_what_stays_are_added_up_in_float32() -> None:
    """bfloat16 rounds 256 + 1 to 256, so a sum over eight blocks would depend on their order."""
    x = np.array([256.0, *[1.0] * 7], np.float32)

    def body(x: Array, w: Array) -> Array:
        def times(x: Array, _: Array, w: Array) -> Array:
            return x * w

        fixed = jnp.zeros(1, jnp.int32)
        _, back = jax.vjp(lambda w: visited_sums(times, x, fixed, w, AROUND), w)
        return back(jnp.ones_like(x))[0]

    mesh, specs = make_mesh(Layout(ep=8)), (P(AROUND), P(AROUND))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(AROUND), check_vma=True)
    found = jax.jit(run)(jnp.asarray(x, jnp.bfloat16), jnp.ones(8, jnp.bfloat16))
    assert set(np.asarray(found, np.float32).tolist()) == {264.0}  # 263, rounded once


def test_blocks_and_sums_make_as_many_hops_as_there_are_others() -> None:
    x, w = (np.ones((6, 3)), np.ones((6, 4))), [(np.ones((9, 4)), np.ones((12, 5)))]
    traced = jax.make_jaxpr(visits(Layout(ep=3)))(x, np.arange(6), w, np.ones((6, 5)))
    (found,) = collectives_of(traced, make_mesh(Layout(ep=3)))
    forward, backward = 3 + 4 + 1 + 5, (3 + 4 + 1 + 5) + (3 + 4)  # features of a token
    assert found == Collective(PERMUTE, (Axis.EP,), 2 * (4 + 6), 2 * 2 * 4 * (forward + backward))
