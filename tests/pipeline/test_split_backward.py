"""A layer's backward split into B and W, against the unsplit one; and what forward saves."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from jax import Array, lax

from jaxptd.analysis.jaxprs import equations
from jaxptd.pipeline.pools import LayerInputs
from jaxptd.pipeline.split_backward import PassedStorage, SplitBackward, TracedLayer, trace_layer

T, D, F = 4, 3, 5  # all different, so that a shape identifies an array


def dense(params: dict, inputs: LayerInputs, x: Array) -> Array:
    """Two matmuls, and a mask computed from the inputs alone."""
    mask_TF = jnp.cos(inputs.token_info[:, None] * jnp.arange(1.0, F + 1))
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
    h = jnp.sin(product(x, params["a"]) * inputs.token_info[:, None] + params["c"])
    return x + product(h, params["b"])


def scanned(params: dict, inputs: LayerInputs, x: Array) -> Array:
    """Several layers in a loop, and a matmul after it."""

    def one(x: Array, scale: Array) -> tuple[Array, None]:
        return jnp.tanh(x @ params["a"] * scale) @ params["b"] + x, None

    x, _ = lax.scan(one, x, inputs.token_info)
    return jnp.sin(x @ params["a"] + params["c"]) @ params["b"]


def nested(params: dict, inputs: LayerInputs, x: Array) -> Array:
    """Calls within calls."""
    inner = jax.jit(jax.checkpoint(jax.jit(with_rule)))
    return jax.checkpoint(dense)(params, inputs, inner(params, inputs, x))


def chosen(params: dict, inputs: LayerInputs, x: Array) -> Array:
    return lax.cond(inputs.token_info[0] > 0, dense, with_rule, params, inputs, x)


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
    a, b, c, token_info, x, dy = (
        jnp.asarray(rng.standard_normal(shape))
        for shape in ((D, F), (F, D), (F,), (T,), (T, D), (T, D))
    )
    return {"a": a, "b": b, "c": c}, LayerInputs(token_info, jnp.int32(0)), x, dy


def trace(run: Callable) -> tuple[TracedLayer, list[Array], SplitBackward]:
    """The traced layer, what its forward saves, and its split backward."""
    params, inputs, x, dy = arguments()
    layer, shapes = trace_layer(run, params, inputs, x)
    _, saved = layer.forward(params, inputs, x)
    assert [(k.shape, k.dtype) for k in saved] == [(s.shape, s.dtype) for s in shapes]
    return layer, saved, layer.split(saved, params, inputs, dy)


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == want.dtype == jnp.float64
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-15 * float(jnp.linalg.norm(want)))


@pytest.mark.parametrize("name", LAYERS)
def test_both_programs_give_the_gradients_of_the_whole_backward(name: str) -> None:
    run = LAYERS[name]
    with jax.enable_x64(True):
        params, inputs, x, dy = arguments()
        layer, saved, split = trace(run)
        y, back = jax.vjp(lambda params, x: run(params, inputs, x), params, x)
        same(layer.forward(params, inputs, x)[0], y)
        wanted = back(dy)
        same(layer.backward(saved, params, inputs, dy), wanted)
        dx, passed = split.input_backward((saved, params, inputs), dy)
        same(dx, wanted[1])
        same(split.weight_backward((saved, params, inputs), passed), wanted[0])


@pytest.mark.parametrize("name", LAYERS)
def test_passed_arrays_may_replace_saved_ones_that_only_b_reads(name: str) -> None:
    """Saved arrays that W does not read may hold anything by then."""
    with jax.enable_x64(True):
        params, inputs, _, dy = arguments()
        layer, saved, split = trace(LAYERS[name])
        _, passed = split.input_backward((saved, params, inputs), dy)
        storage = PassedStorage.plan(
            [*map(jax.typeof, saved)], split.weight_reads, [*map(jax.typeof, passed)]
        )
        replacing, rest = storage.separate(passed)
        assert not any(split.weight_reads[i] for i in replacing)
        left = [
            replacing.get(i, k if need else jnp.full_like(k, jnp.nan))
            for i, (k, need) in enumerate(zip(saved, split.weight_reads, strict=False))
        ]
        found = split.weight_backward((left, params, inputs), storage.join(left, rest))
        same(found, layer.backward(saved, params, inputs, dy)[0])


# ---- which matmuls are in B and which in W ------------------------------------------------------


def products(program: Callable, *arguments: Any) -> list[tuple[int, ...]]:
    """Shapes of the results of all matmuls."""
    traced = jax.make_jaxpr(program)(*arguments)
    dots = [eqn for eqn in equations(traced) if eqn.primitive.name == "dot_general"]
    return sorted(eqn.outvars[0].aval.shape for eqn in dots)


def products_of_both(run: Callable) -> list[list[tuple[int, ...]]]:
    """The matmuls of the whole backward, of B and of W."""
    params, inputs, _, dy = arguments()
    layer, saved, split = trace(run)
    example = (saved, params, inputs)
    _, passed = split.input_backward(example, dy)
    whole = products(layer.backward, *example, dy)
    return [
        whole,
        products(split.input_backward, example, dy),
        products(split.weight_backward, example, passed),
    ]


@pytest.mark.parametrize("name", ["dense", "custom_vjp", "jit"])
def test_b_has_the_products_for_the_input_and_w_those_for_the_weights(name: str) -> None:
    _, of_b, of_w = products_of_both(LAYERS[name])
    assert of_b == sorted([(T, D), (T, F)])
    assert [sorted(shape) for shape in of_w] == [[D, F], [D, F]]


@pytest.mark.parametrize("name", LAYERS)
def test_no_product_is_computed_twice(name: str) -> None:
    whole, of_b, of_w = products_of_both(LAYERS[name])
    assert sorted(of_b + of_w) == whole


def test_b_recomputes_what_remat_recomputes() -> None:
    """The first of forward's two matmuls is recomputed; nothing needs the second."""
    _, of_b, of_w = products_of_both(LAYERS["checkpoint"])
    assert of_b == sorted([(T, F), (T, D), (T, F)])
    assert len(of_w) == 2


def test_b_computes_gradients_that_need_no_product() -> None:
    """B computes the bias gradient, for which W would need a whole activation."""
    params, inputs, _, dy = arguments()
    _, saved, split = trace(dense)
    _, passed = split.input_backward((saved, params, inputs), dy)
    assert (F,) in [x.shape for x in passed]
    sums = [
        eqn.primitive.name
        for eqn in equations(jax.make_jaxpr(split.weight_backward)((saved, params, inputs), passed))
    ]
    assert "reduce_sum" not in sums


# ---- what is saved ------------------------------------------------------------------------------


def shapes(saved: list[Array]) -> list[tuple[int, ...]]:
    return sorted(k.shape for k in saved)


# Without cond: its branches return their operands as residuals.
@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"cond"}))
def test_parameters_are_never_saved(name: str) -> None:
    saved = shapes(trace(LAYERS[name])[1])
    assert not {(D, F), (F, D), (F,), (T,)} & set(saved)


def test_what_depends_on_inputs_alone_is_not_saved() -> None:
    """The layer's x and one activation are saved, but not the mask `[T, F]`."""

    def linear(params: dict, inputs: LayerInputs, x: Array) -> Array:
        mask_TF = jnp.cos(inputs.token_info[:, None] * jnp.arange(1.0, F + 1))
        return (x @ params["a"] * mask_TF) @ params["b"]

    assert shapes(trace(linear)[1]) == [(T, D), (T, F)]
    whole = jax.vjp(linear, arguments()[0], *arguments()[1:3])[1]
    assert shapes(jax.tree.leaves(whole)).count((T, F)) > 1


def test_with_remat_only_x_is_saved() -> None:
    assert shapes(trace(LAYERS["checkpoint"])[1]) == [(T, D)]


# ---- where B's results wait for W ---------------------------------------------------------------

SHAPE = st.sampled_from([(2,), (3,), (2, 2), (1, 2)])


@drawn(st.lists(st.tuples(SHAPE, st.booleans()), max_size=6), st.lists(SHAPE, max_size=6))
def test_passed_arrays_replace_saved_ones_and_join_again(saved: list, passing: list) -> None:
    values = [np.full(shape, i) for i, (shape, _) in enumerate(saved)]
    passed = [np.full(shape, 100 + i) for i, shape in enumerate(passing)]
    needed = [need for _, need in saved]
    forms = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in some] for some in (values, passed)]
    storage = PassedStorage.plan(forms[0], needed, forms[1])
    replacing, rest = storage.separate(passed)
    assert [x.shape for x in rest] == [s.shape for s in storage.between]
    for i, x in replacing.items():
        assert not needed[i]
        assert x.shape == values[i].shape
        values[i] = x
    assert len(replacing) + len(rest) == len(passed)
    for found, want in zip(storage.join(values, rest), passed, strict=True):
        np.testing.assert_array_equal(found, want)
    rows = [(math.prod(shape), shape[-1]) for shape in passing]
    for row in set(rows):
        free = sum(not need and (math.prod(form), form[-1]) == row for form, need in saved)
        taken = sum((x.size, x.shape[-1]) == row for x in replacing.values())
        assert taken == min(free, rows.count(row))
