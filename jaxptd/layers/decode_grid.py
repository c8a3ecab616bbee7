"""A grid on which tokens are whole, for generation: one token cannot be cut over row.

The parameters lie as `Grid2D` has them: a run's own are used where they are. What is small, the
activations of a few tokens, is gathered; products of weights are as local as in training.
"""

import dataclasses

from jax import Array, lax
from jax.typing import DTypeLike

from jaxptd import collectives
from jaxptd.layers.form import TensorParallel, local_rows, product
from jaxptd.layers.tensor_parallel import Grid2D, make_form
from jaxptd.mesh import Axis, Layout


@dataclasses.dataclass(frozen=True)
class DecodeGrid2D(Grid2D):
    """`x[B, T, D/col]` and `h[B, T, F/col]`, the same along row."""

    token_axes: tuple[Axis, ...] = ()
    logit_axes: tuple[Axis, ...] = ()

    def column(self, x: Array, w: Array) -> Array:
        return lax.psum(product(self._turn(x, -1), w, 1), Axis.ROW)

    def row(self, h: Array, w: Array, cut: int) -> Array:
        dims = w.ndim - 1
        h = self._turn(h, h.ndim - dims + cut)
        return lax.psum(product(h, w, dims), Axis.ROW)

    def _turn(self, x: Array, dim: int) -> Array:
        """Cut along `dim` over col -> over row."""
        return collectives.local_block(self.gather(x, dim), Axis.ROW, dim)

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        x_BTD = lax.psum(local_rows(table, tokens_BT, Axis.COL).astype(dtype), Axis.COL)
        x_BTD = collectives.gather_from(x_BTD, Axis.ROW, -1)
        return collectives.local_block(x_BTD, Axis.COL, -1)

    def positions(self, position_T: Array, table: Array, dtype: DTypeLike) -> Array:
        return lax.psum(local_rows(table, position_T, Axis.ROW).astype(dtype), Axis.ROW)

    def local_tokens(self, position_T: Array) -> Array:
        return position_T

    def local_logits(self, x_BT: Array) -> Array:
        return x_BT


def for_decoding(layout: Layout) -> TensorParallel:
    """The form of a layout, with no token cut."""
    form = make_form(dataclasses.replace(layout, sequence_parallel=False, collective_matmul=False))
    if not isinstance(form, Grid2D):
        return form
    return DecodeGrid2D(form.rows, form.cols, form.grid, form.ring, form.head_dim)
