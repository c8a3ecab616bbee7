"""The two products of a layer on a grid, of activations and weights with dims as it has them.

Letters: B batch, T position, D model; `in`, `out` the dims of heads or of the MLP's hidden units.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.matmul.grid import Grid
from jaxptd.summa2d import matmul


@partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def column(x: Array, w: Array, grid: Grid) -> Array:
    """Reshapes again in backward: a scan would keep second copies of weights and attention."""
    h = matmul(x, w.reshape(w.shape[0], -1), grid)
    return h.reshape(*x.shape[:-1], *w.shape[1:])


@partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def row(h: Array, w: Array, cut: int, grid: Grid) -> Array:
    lead = h.ndim - (w.ndim - 1)
    h = jnp.moveaxis(h, lead + cut, lead)  # so that blocks of `in` are contiguous
    w = jnp.moveaxis(w, cut, 0)
    return matmul(h.reshape(*h.shape[:lead], -1), w.reshape(-1, w.shape[-1]), grid)
