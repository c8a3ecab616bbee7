"""2D tensor parallelism: matrices and activations in blocks on a row x col grid of devices.

`Grid2D` is for training, `DecodeGrid2D` for generation, with the same blocks of parameters.
`tensor_parallel.py` explains each method and the letters.

Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxptd import collectives, summa2d
from jaxptd.attention.attend import AttentionInputs, attend
from jaxptd.attention.kernel import Kernel, Scores
from jaxptd.layers import grid_attention
from jaxptd.layers.tensor_parallel import (
    ExpertSums,
    Factors,
    PackedWeight,
    TensorParallel,
    both_gradients,
    joined_products,
    local_rows,
    matmul,
)
from jaxptd.matmul.grid import Grid
from jaxptd.matmul.padding import padded
from jaxptd.matmul.precision import BlockMatmul, block_matmul
from jaxptd.mesh import Axis


@dataclasses.dataclass(frozen=True)
class TensorParallel2D(TensorParallel):
    """The grid in training and in generation: `w[D/row, F/col]`, `w[F/row, D/col]`.

    Sizes that the grid does not divide are padded with zeros at the end. The padding stays zero
    because its weights and gradients are.

    Args:
        rows: number of devices along row.
        cols: number of devices along col.
        grid: how devices multiply.
    """

    rows: int
    cols: int
    grid: Grid

    @property
    def inner_devices(self) -> int:
        return self.cols

    def padded(self, size: int, each: int = 1) -> int:
        return padded(size, (self.rows, self.cols, self.grid.slices), each)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        inputs: AttentionInputs,
        *,
        kernel: Kernel,
        scores: Scores,
    ) -> Array:
        ring = self.ring
        if self.axes.head_dim == 0:
            return attend(q, k, v, inputs, ring=ring, kernel=kernel, scores=scores)
        return grid_attention.attend(
            q, k, v, inputs, grid=self.grid, ring=ring, dropout=kernel.dropout, scores=scores
        )

    def visit_experts(
        self, sums: ExpertSums, x: Array, weight: Array, expert: Array, w: Any
    ) -> Array:
        raise NotImplementedError("a grid has no experts; configs refuse them")


@final
@dataclasses.dataclass(frozen=True)
class Grid2D(TensorParallel2D):
    """Training: `x[B, T/row, D/col]`, `h[B, T/row, F/col]`.

    No device ever holds a whole row or column of an activation or a matrix.

    Args:
        block_matmul: multiplies two blocks of a layer.
    """

    block_matmul: BlockMatmul = block_matmul

    def column_parallel(self, x: Array, weights: Sequence[PackedWeight]) -> list[Array]:
        """x[B, T/row, D/col], w[D/row, *out] -> h[B, T/row, *out], both `out` sharded over col."""
        return joined_products(lambda x, w: _column(x, w, self.grid, self.block_matmul), x, weights)

    def square(self, x: Array, w: Array) -> Array:
        return _column(x, w, self.grid, block_matmul)

    def logits(self, x: Array, w: Array) -> Array:
        return _column(
            *both_gradients(x, w), self.grid, block_matmul
        )  # sums w's gradient, in its precision

    def row_parallel(
        self, h: Array, w: Array, shard_dim: int, beside: Factors | None = None
    ) -> Array:
        """h[B, T/row, *in], `in` sharded over col, w[*in, D/col], `in` sharded over row -> x."""
        assert beside is None, "a config with a grid has no adapters"
        return _row(h, w, shard_dim, self.grid, self.block_matmul)

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        """tokens[B, T], table[V/col, D/row] -> x: trades slices of D for slices of T, then adds."""
        x_BTD = local_rows(table, tokens_BT, Axis.COL).astype(dtype)
        x_BTD = lax.all_to_all(x_BTD, Axis.ROW, split_axis=1, concat_axis=2, tiled=True)
        return collectives.reduce_scatter(x_BTD, Axis.COL, 2)

    def positions(self, position_T: Array, table: Array, dtype: DTypeLike) -> Array:
        """positions[T], table[S/row, D/col] -> [T/row, D/col]: rows of the table, added."""
        x_TD = local_rows(table, position_T, Axis.ROW).astype(dtype)
        return collectives.reduce_scatter(x_TD, Axis.ROW, 0)


@partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def _column(x: Array, w: Array, grid: Grid, block_matmul: BlockMatmul) -> Array:
    """Reshapes again in backward: a scan would save second copies of weights and attention."""
    h = summa2d.matmul(x, w.reshape(w.shape[0], -1), grid, block_matmul)
    return h.reshape(*x.shape[:-1], *w.shape[1:])


@partial(jax.checkpoint, static_argnums=(2, 3, 4), prevent_cse=False)
def _row(h: Array, w: Array, shard_dim: int, grid: Grid, block_matmul: BlockMatmul) -> Array:
    lead = h.ndim - (w.ndim - 1)
    h = jnp.moveaxis(h, lead + shard_dim, lead)  # makes blocks of `in` contiguous
    w = jnp.moveaxis(w, shard_dim, 0)
    return summa2d.matmul(
        h.reshape(*h.shape[:lead], -1), w.reshape(-1, w.shape[-1]), grid, block_matmul
    )


@final
@dataclasses.dataclass(frozen=True)
class DecodeGrid2D(TensorParallel2D):
    """Generation: `x[B, T, D/col]` and `h[B, T, F/col]`, replicated along row.

    One token cannot be sharded over row. Parameters are sharded as in `Grid2D`, so a training run's
    are used in place. The activations of a few tokens are small and gathered.
    """

    def column_parallel(self, x: Array, weights: Sequence[PackedWeight]) -> list[Array]:
        return joined_products(self._product, x, weights)

    def _product(self, x: Array, w: Array) -> Array:
        return lax.psum(matmul(self._col_to_row(x, -1), w, 1), Axis.ROW)

    def row_parallel(
        self, h: Array, w: Array, shard_dim: int, beside: Factors | None = None
    ) -> Array:
        assert beside is None, "a config with a grid has no adapters"
        dims = w.ndim - 1
        h = self._col_to_row(h, h.ndim - dims + shard_dim)
        return lax.psum(matmul(h, w, dims), Axis.ROW)

    def square(self, x: Array, w: Array) -> Array:
        return self._product(x, w)

    def logits(self, x: Array, w: Array) -> Array:
        return self._product(x, w)

    def _col_to_row(self, x: Array, dim: int) -> Array:
        """Reshards `dim` of x from col to row."""
        return collectives.local_block(self.axes.gather(x, dim), Axis.ROW, dim)

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        x_BTD = lax.psum(local_rows(table, tokens_BT, Axis.COL).astype(dtype), Axis.COL)
        x_BTD = collectives.gather_from(x_BTD, Axis.ROW, -1)
        return collectives.local_block(x_BTD, Axis.COL, -1)

    def positions(self, position_T: Array, table: Array, dtype: DTypeLike) -> Array:
        return lax.psum(local_rows(table, position_T, Axis.ROW).astype(dtype), Axis.ROW)
