"""Adafactor: the squares of a matrix's gradients, kept as the means of its rows and columns.

Step size and weight decay are those of the other optimizers: no step relative to the parameter's
size. Source: Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxptd.optimizers.matrices import Sums
from jaxptd.optimizers.moments import Factors, factors
from jaxptd.params import Stored

DECAY = 0.8  # of step t's mean, 1 - t**-0.8 is kept
LEAST = 1e-30  # mean of squares
LARGEST_RMS = 1.0  # of a matrix's step


class Squares(NamedTuple):
    """steps: so far, int32. nu: means of squares by parameter, `Factors` of matrices."""

    steps: Array
    nu: Any


def scale_by_factors(stored: Mapping[str, Stored]) -> optax.GradientTransformation:
    """Divides gradients by the roots of their mean squares, matrix by matrix.

    Args:
        stored: how each parameter is held, so that means are those of whole matrices.
    """

    def init(params: Any) -> Squares:
        nu = jax.tree_util.tree_map_with_path(_zeros, params)
        return Squares(jnp.zeros((), jnp.int32), nu)

    def _zeros(path: Any, p: Array) -> Any:
        each = stored[path[0].key]
        if not each.info.matrix:
            return jnp.zeros_like(p)
        return Factors(*(jnp.zeros(form.stored_shape, p.dtype) for form in factors(each)))

    def update(grads: Any, state: Squares, params: Any = None) -> tuple[Any, Squares]:
        wide = jnp.result_type(jnp.float32, *grads.values())
        kept = 1 - (state.steps + 1).astype(wide) ** -DECAY
        new = {
            name: _scaled(g, state.nu[name], kept.astype(g.dtype), Sums(stored[name]))
            for name, g in grads.items()
        }
        direction = {name: step for name, (step, _) in new.items()}
        return direction, Squares(state.steps + 1, {name: nu for name, (_, nu) in new.items()})

    return optax.GradientTransformation(init, update)


def _scaled(g: Array, nu: Any, kept: Array, sums: Sums) -> tuple[Array, Any]:
    """A parameter's direction, its root mean square at most `LARGEST_RMS`, and its new means."""
    if sums.info.matrix:
        block = sums.block(g)
        nu = _new_factors(block, nu, kept, sums)
        step = block * _reciprocal_root(nu, sums)
    else:
        nu = kept * nu + (1 - kept) * (g**2 + LEAST)
        step = sums.block(g * nu**-0.5)
    rms = jnp.sqrt(sums.mean(step**2, "rc"))
    return sums.held(step / jnp.maximum(1, rms / LARGEST_RMS)), nu


def _new_factors(block: Array, old: Factors, kept: Array, sums: Sums) -> Factors:
    squares = block**2
    new = (sums.mean(squares, "c"), sums.mean(squares, "r"))
    return Factors(
        *(
            kept * mean + (1 - kept) * (square.squeeze(sums.dims(kind)) + LEAST)
            for mean, square, kind in zip(old, new, "cr", strict=True)
        )
    )


def _reciprocal_root(nu: Factors, sums: Sums) -> Array:
    """1 / sqrt(rows x columns / mean of rows), with all dims of the parameter."""
    rows, columns = (
        jnp.expand_dims(mean, sums.dims(kind)) for mean, kind in zip(nu, "cr", strict=True)
    )
    mean = sums.mean_of_blocks(sums.without_padding(rows, "r"), "r", sums.axes("r"))
    return (rows / mean) ** -0.5 * columns**-0.5
