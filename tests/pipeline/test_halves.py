"""A layer's backward in two halves against the whole of it; what is kept, and what is left out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxptd.analysis.jaxprs import equations
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.pipeline.model import LayerInputs
from jaxptd.pipeline.split_backward import Between, Halves, Layer, lean, trace_layer

T, D, F = 4, 3, 5  # sizes that tell what an array is by its shape


def dense(params: dict, inputs: LayerInputs, x: Array) -> Array:
    """Two products; a mask computed from the inputs alone."""
    mask_TF = jnp.cos(inputs.places[:, None] * jnp.arange(1.0, F + 1))
    return x + jnp.tanh(x @ params["a"] + params["c"]) * mask_TF @ params["b"]


@jax.custom_vjp
def product(x: Array, w: Array) -> Array:
    return x @ w


def product_fwd(x: Array, w: Array) -> tuple[Array, tuple]:
    return x @ w, (x, w)


def product_bwd(saved: tuple, dy: Array) -> tuple:
    x, w = saved
    return dy @ w.T, x.T @ dy


product.defvjp(product_fwd, product_bwd)


def with_rule(params: dict, inputs: LayerInputs, x: Array) -> Array:
    h = jnp.sin(product(x, params["a"]) * inputs.places[:, None] + params["c"])
    return x + product(h, params["b"])


def scanned(params: dict, inputs: LayerInputs, x: Array) -> Array:
    """Several layers in a loop, and a product after it."""

    def one(x: Array, scale: Array) -> tuple[Array, None]:
        return jnp.tanh(x @ params["a"] * scale) @ params["b"] + x, None

    x, _ = lax.scan(one, x, inputs.places)
    return jnp.sin(x @ params["a"] + params["c"]) @ params["b"]


def nested(params: dict, inputs: LayerInputs, x: Array) -> Array:
    """Calls within calls."""
    inner = jax.jit(jax.checkpoint(jax.jit(with_rule)))
    return jax.checkpoint(dense)(params, inputs, inner(params, inputs, x))


def chosen(params: dict, inputs: LayerInputs, x: Array) -> Array:
    return lax.cond(inputs.places[0] > 0, dense, with_rule, params, inputs, x)


LAYERS: dict[str, Callable] = {
    "dense": dense,
    "custom_vjp": with_rule,
    "scan": scanned,
    "checkpoint": jax.checkpoint(dense),
    "jit": jax.jit(dense),
    "nested": nested,
    "cond": chosen,
}


def arguments() -> tuple[dict, LayerInputs, Array, Array]:
    rng = np.random.default_rng(0)
    a, b, c, places, x, dy = (
        jnp.asarray(rng.standard_normal(shape))
        for shape in ((D, F), (F, D), (F,), (T,), (T, D), (T, D))
    )
    return {"a": a, "b": b, "c": c}, LayerInputs(places, jnp.int32(0)), x, dy


def trace(run: Callable) -> tuple[Layer, list[Array], Halves]:
    """The layer, what it keeps, its halves."""
    params, inputs, x, dy = arguments()
    layer, shapes = trace_layer(run, params, inputs, x)
    _, kept = layer.forward(params, inputs, x)
    assert [(k.shape, k.dtype) for k in kept] == [(s.shape, s.dtype) for s in shapes]
    return layer, kept, layer.split(kept, params, inputs, dy)


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == want.dtype == jnp.float64
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-15 * float(jnp.linalg.norm(want)))


@pytest.mark.parametrize("name", LAYERS)
def test_both_halves_are_the_whole_backward(name: str) -> None:
    run = LAYERS[name]
    with jax.enable_x64(True):
        params, inputs, x, dy = arguments()
        layer, kept, halves = trace(run)
        y, back = jax.vjp(lambda params, x: run(params, inputs, x), params, x)
        same(layer.forward(params, inputs, x)[0], y)
        wanted = back(dy)
        same(layer.backward(kept, params, inputs, dy), wanted)
        dx, passed = halves.now((kept, params, inputs), dy)
        same(dx, wanted[1])
        same(halves.then((kept, params, inputs), passed), wanted[0])


@pytest.mark.parametrize("name", LAYERS)
def test_what_passes_may_lie_over_what_only_the_first_half_reads(name: str) -> None:
    """The rest of what is kept can be anything by then."""
    with jax.enable_x64(True):
        params, inputs, _, dy = arguments()
        layer, kept, halves = trace(LAYERS[name])
        _, passed = halves.now((kept, params, inputs), dy)
        between = Between.over(list(map(jax.typeof, kept)), halves.needs, passed)
        over, rest = between.part(passed)
        assert not any(halves.needs[i] for i in over)
        left = [
            over.get(i, k if need else jnp.full_like(k, jnp.nan))
            for i, (k, need) in enumerate(zip(kept, halves.needs, strict=False))
        ]
        found = halves.then((left, params, inputs), between.join(left, rest))
        same(found, layer.backward(kept, params, inputs, dy)[0])


# ---- which products are in which half -----------------------------------------------------------


def products(program: Callable, *arguments: Any) -> list[tuple[int, ...]]:
    """Shapes of the results of all products."""
    traced = jax.make_jaxpr(program)(*arguments)
    dots = [eqn for eqn in equations(traced) if eqn.primitive.name == "dot_general"]
    return sorted(eqn.outvars[0].aval.shape for eqn in dots)


def products_of_halves(run: Callable) -> list[list[tuple[int, ...]]]:
    """Of the whole backward, of the first half and of the second."""
    params, inputs, _, dy = arguments()
    layer, kept, halves = trace(run)
    example = (kept, params, inputs)
    _, passed = halves.now(example, dy)
    whole = products(layer.backward, *example, dy)
    return [whole, products(halves.now, example, dy), products(halves.then, example, passed)]


@pytest.mark.parametrize("name", ["dense", "custom_vjp", "jit"])
def test_products_for_the_input_first_and_for_the_weights_later(name: str) -> None:
    _, now, then = products_of_halves(LAYERS[name])
    assert now == sorted([(T, D), (T, F)])
    assert [sorted(shape) for shape in then] == [[D, F], [D, F]]


@pytest.mark.parametrize("name", LAYERS)
def test_no_product_is_made_twice(name: str) -> None:
    whole, now, then = products_of_halves(LAYERS[name])
    assert sorted(now + then) == whole


def test_what_is_run_again_is_run_in_the_first_half() -> None:
    """With its two products, of forward, of which the second is not needed."""
    _, now, then = products_of_halves(LAYERS["checkpoint"])
    assert now == sorted([(T, F), (T, D), (T, F)])
    assert len(then) == 2


def test_sums_without_a_product_are_made_in_the_first_half() -> None:
    """Of the bias's gradient: else a whole activation would have to wait for it."""
    params, inputs, _, dy = arguments()
    _, kept, halves = trace(dense)
    _, passed = halves.now((kept, params, inputs), dy)
    assert (F,) in [x.shape for x in passed]
    sums = [
        eqn.primitive.name
        for eqn in equations(jax.make_jaxpr(halves.then)((kept, params, inputs), passed))
    ]
    assert "reduce_sum" not in sums


# ---- what is kept -------------------------------------------------------------------------------


def shapes(kept: list[Array]) -> list[tuple[int, ...]]:
    return sorted(k.shape for k in kept)


@pytest.mark.parametrize(
    "name", sorted(LAYERS.keys() - {"cond"})
)  # its branches hand out what they had
def test_parameters_are_never_kept(name: str) -> None:
    kept = shapes(trace(LAYERS[name])[1])
    assert not {(D, F), (F, D), (F,), (T,)} & set(kept)


def test_what_is_made_of_what_is_given_alone_is_not_kept() -> None:
    """The input, the activation and its slope are, but not the mask `[T, F]`."""

    def linear(params: dict, inputs: LayerInputs, x: Array) -> Array:
        mask_TF = jnp.cos(inputs.places[:, None] * jnp.arange(1.0, F + 1))
        return (x @ params["a"] * mask_TF) @ params["b"]

    assert shapes(trace(linear)[1]) == [(T, D), (T, F)]
    whole = jax.vjp(linear, arguments()[0], *arguments()[1:3])[1]
    assert shapes(jax.tree.leaves(whole)).count((T, F)) > 1


def test_only_the_input_is_kept_of_what_is_run_again() -> None:
    assert shapes(trace(LAYERS["checkpoint"])[1]) == [(T, D)]


# ---- what nobody needs --------------------------------------------------------------------------


def test_a_psum_that_nobody_needs_is_left_out() -> None:
    """`jax.vjp` runs the forward pass, whose result nobody asks for."""
    mesh, spec = make_mesh(Layout(tp=2)), P(Axis.TP)

    def back(w: Array, dy: Array) -> Array:
        return jax.vjp(lambda w: lax.psum(jnp.sin(w) * 2, Axis.TP), w)[1](dy)[0]

    def traced(body: Callable) -> Any:
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
        return jax.make_jaxpr(mapped)(w, dy), mapped(w, dy)

    w, dy = jnp.arange(6.0), jnp.arange(3.0)
    (plain, want), (shorter, found) = traced(back), traced(partial(lean, back))
    assert [str(program).count("psum") > 0 for program in (plain, shorter)] == [True, False]
    np.testing.assert_array_equal(found, want)


def test_lean_gives_what_the_program_gives() -> None:
    def program(x: dict, y: Array) -> dict:
        jnp.exp(x["a"])
        return {"sum": x["a"] + y, "same": y, "number": 2.0 * jnp.ones(3)}

    x, y = {"a": jnp.arange(3.0)}, jnp.ones(3)
    found, want = lean(program, x, y), program(x, y)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(partial(lean, program))(x, y).eqns]
    assert "exp" not in names


# ---- where what passes lies ---------------------------------------------------------------------

SHAPE = st.sampled_from([(2,), (3,), (2, 2)])


@drawn(st.lists(st.tuples(SHAPE, st.booleans()), max_size=6), st.lists(SHAPE, max_size=6))
def test_between_lays_over_what_is_free_and_joins_again(kept: list, passing: list) -> None:
    values = [np.full(shape, i) for i, (shape, _) in enumerate(kept)]
    passed = [np.full(shape, 100 + i) for i, shape in enumerate(passing)]
    needed = [need for _, need in kept]
    forms = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in some] for some in (values, passed)]
    between = Between.over(forms[0], needed, forms[1])
    over, rest = between.part(passed)
    assert [x.shape for x in rest] == [s.shape for s in between.shapes]
    for i, x in over.items():
        assert not needed[i]
        assert x.shape == values[i].shape
        values[i] = x
    assert len(over) + len(rest) == len(passed)
    for found, want in zip(between.join(values, rest), passed, strict=True):
        np.testing.assert_array_equal(found, want)
    for shape in set(passing):  # as many as there is place for
        free = sum(not need and form == shape for form, need in kept)
        assert sum(x.shape == shape for x in over.values()) == min(free, passing.count(shape))
