"""What W of a split backward recomputes instead of receiving."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.analysis.jaxprs import equations
from jaxptd.matmul.ring import AGAIN
from jaxptd.pipeline.split_backward import SplitBackward

T, D, F = 4, 3, 6


def ring(arguments: tuple, dy: Array) -> tuple:
    """Derives a second piece from the first, behind a barrier that also waits for a matmul."""
    x, a, b = arguments
    product = dy @ a.T
    piece, product = lax.optimization_barrier((dy, product))
    other = checkpoint_name(jnp.sin(piece), AGAIN)
    other, product = lax.optimization_barrier((other, product))
    dx = product + other @ b.T
    return (x.T @ piece, x.T @ other), dx


def views(arguments: tuple, dy: Array) -> tuple:
    """W reads all of dy and its parts, B only the parts."""
    x, a, b = arguments
    upper, lower = (lax.slice(dy, (i, 0), (i + T // 2, F)) for i in (0, T // 2))
    dx = jnp.concatenate([upper @ a.T, lower @ b.T])
    return (x.T @ dy, x[: T // 2].T @ upper + x[T // 2 :].T @ lower), dx


def part_of_larger(arguments: tuple, dy: Array) -> tuple:
    """W reads part of an array that it does not receive."""
    x, a, b = arguments
    wide = jnp.concatenate([jnp.sin(dy), jnp.cos(dy)], axis=1)
    part = lax.slice(wide, (0, 0), (T, F))
    return (x.T @ part, jnp.zeros_like(b)), part @ a.T + wide @ jnp.concatenate([a, b], 1).T


def named_product(arguments: tuple, dy: Array) -> tuple:
    """A named array that needs a matmul."""
    x, a, b = arguments
    other = checkpoint_name(dy @ (a.T @ b), AGAIN)
    return (x.T @ dy, x.T @ other), other @ a.T


CASES: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
    "ring": (ring, [(T, F)]),
    "views": (views, [(T, F)]),
    "part of a larger array": (part_of_larger, [(T, F)]),
    "a named product": (named_product, [(T, F), (T, F)]),
}


def example() -> tuple[tuple[Array, Array, Array], Array]:
    rng = np.random.default_rng(0)
    x, a, b, dy = (rng.standard_normal(shape) for shape in ((T, D), (D, F), (D, F), (T, F)))
    return (jnp.asarray(x), jnp.asarray(a), jnp.asarray(b)), jnp.asarray(dy)


def products(function: Callable, *arguments: Any) -> int:
    every = equations(jax.make_jaxpr(function)(*arguments))
    return sum(eqn.primitive.name == "dot_general" for eqn in every)


@pytest.mark.parametrize("name", CASES)
def test_w_is_passed_what_it_cannot_make(name: str) -> None:
    backward, shapes = CASES[name]
    with jax.enable_x64(True):
        arguments, dy = example()
        split = SplitBackward.trace(backward, arguments, dy)
        dx, passed = split.input_backward(arguments, dy)
        found = split.weight_backward(arguments, passed)
        assert [x.shape for x in passed] == shapes
        for mine, whole in zip((found, dx), backward(arguments, dy), strict=True):
            jax.tree.map(np.testing.assert_array_equal, mine, whole)
        both = products(split.input_backward, arguments, dy)
        both += products(split.weight_backward, arguments, passed)
        assert both == products(backward, arguments, dy)


def test_a_barrier_keeps_the_operands_that_w_needs() -> None:
    arguments, dy = example()
    split = SplitBackward.trace(ring, arguments, dy)
    _, passed = split.input_backward(arguments, dy)
    every = equations(jax.make_jaxpr(split.weight_backward)(arguments, passed))
    barriers = [eqn for eqn in every if eqn.primitive.name == "optimization_barrier"]
    assert [len(eqn.invars) for eqn in barriers] == [1]  # the first result is passed
