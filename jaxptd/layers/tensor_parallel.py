"""The forms in which a layout holds matrices: one way over tp, or in blocks on a row x col grid.

`Megatron1D` cuts matrices one way, over tp; sequence parallelism is the same form with another pair
of collectives at the two ends of a pair of products, or (`RingSteps1D`) in steps inside them.
`Grid2D` cuts everything both ways. What each method is for, and the letters: `form.py`.

Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198; Zhu and Dong, CAAI
Trans. Intelligent Systems 20(5), 2025 (2D).
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxptd import collectives, ring_attention
from jaxptd.attention.kernel import TAKEN, Kernel
from jaxptd.attention.ring import Ring, Tokens
from jaxptd.layers import grid_attention as block_attention
from jaxptd.layers.form import Product, TensorParallel, local_numbers, local_rows, product
from jaxptd.layers.grid_products import column, row
from jaxptd.matmul.grid import Grid, padded
from jaxptd.matmul.ring import gather_product, product_scatter
from jaxptd.mesh import Axis, Layout


@dataclasses.dataclass(frozen=True)
class Megatron1D:
    """Matrices cut one way over tp.

    Args:
        size: devices along tp.
        token_axes: axes that cut the residual stream's sequence: none, or tp.
        enter: x as the residual stream has it -> x whole, as the first product needs it.
        leave: owed sums of the second product -> x as the residual stream has it.
        ring: the devices that hold the sequence of q, k and v.
        dot: the product of a layer's matrix.
    """

    size: int
    token_axes: tuple[Axis, ...]
    enter: Callable[[Array, str], Array]
    leave: Callable[[Array, str], Array]
    ring: Ring
    dot: Product = product
    logit_axes: tuple[Axis, ...] = ()
    head_dim: int = 0

    def column_spec(self, out_dims: int, cut: int) -> P:
        return P(None, *self.cut_spec(out_dims, cut))

    def row_spec(self, in_dims: int, cut: int) -> P:
        return P(*self.cut_spec(in_dims, cut), None)

    def cut_spec(self, dims: int, cut: int) -> P:
        return _cut(Axis.TP, dims, cut)

    def hidden_spec(self) -> P:
        return P(None)

    def table_spec(self) -> P:
        return P(Axis.TP, None)

    def position_spec(self) -> P:
        return P(None, None)

    def padded(self, size: int, each: int = 1) -> int:
        return -(-size // self.size) * self.size

    def padded_hidden(self, size: int) -> int:
        return size

    def column(self, x: Array, w: Array) -> Array:
        return self.dot(checkpoint_name(self.enter(x, Axis.TP), TAKEN), w, 1)

    def logits(self, x: Array, w: Array) -> Array:
        return product(self.enter(x, Axis.TP), w, 1)

    def row(self, h: Array, w: Array, cut: int) -> Array:
        """h[B, T, F/tp], w[F/tp, D] -> x[B, T, D]: partial sums of D, added over tp."""
        return self.leave(self.dot(h, w, w.ndim - 1), Axis.TP)

    def gather(self, h: Array, dim: int) -> Array:
        return collectives.gather_from(h, Axis.TP, dim)

    def scatter(self, h: Array, dim: int) -> Array:
        return collectives.scatter_to(h, Axis.TP, dim)

    def attend(
        self, q: Array, k: Array, v: Array, tokens: Tokens, *, kernel: Kernel, head_size: int
    ) -> Array:
        return ring_attention.attend(q, k, v, tokens, ring=self.ring, kernel=kernel, causal=True)

    def join_heads(self, h: Array, head_size: int) -> Array:
        return h

    def part_heads(self, h: Array) -> Array:
        return h

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        """tokens[B, T], table[V/tp, D] -> x: each device adds the rows it has."""
        return self.leave(local_rows(table, tokens_BT, Axis.TP).astype(dtype), Axis.TP)

    def positions(self, position_T: Array, table: Array, dtype: DTypeLike) -> Array:
        return table[self.local_tokens(position_T)].astype(dtype)

    def vocab_ids(self, size: int) -> Array:
        return local_numbers(Axis.TP, size)

    def vocab_max(self, m: Array) -> Array:
        return lax.pmax(m, Axis.TP)

    def vocab_sum(self, s: Array) -> Array:
        return lax.psum(s, Axis.TP)

    def sum_over_hidden(self, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        return sums

    def only_hidden(self, x: Array, size: int) -> Array:
        return x

    def local_tokens(self, position_T: Array) -> Array:
        for axis in self.token_axes:
            position_T = collectives.local_block(position_T, axis, 0)
        return position_T

    def local_logits(self, x_BT: Array) -> Array:
        return x_BT

    def local_hidden(self, size: int) -> Array:
        return jnp.arange(size, dtype=jnp.int32)

    def local_heads(self, size: int) -> Array:
        return local_numbers(Axis.TP, size)


@dataclasses.dataclass(frozen=True)
class RingSteps1D(Megatron1D):
    """Sequence parallelism, gathers and scatters in steps round a ring; `dot` is not used."""

    def column(self, x: Array, w: Array) -> Array:
        return gather_product(x, w, dataclasses.replace(self.ring, axis=Axis.TP))

    def row(self, h: Array, w: Array, cut: int) -> Array:
        return product_scatter(h, w, dataclasses.replace(self.ring, axis=Axis.TP))


@dataclasses.dataclass(frozen=True)
class Grid2D:
    """Everything in blocks: `x[B, T/row, D/col]`, `w[D/row, F/col]`, `h[B, T/row, F/col]`.

    No activation and no matrix is ever whole along either axis. Sizes that the grid does not divide
    are padded with zeros at their end, which stay zero: their weights and gradients are.

    Args:
        rows, cols: devices along row and along col.
        grid: how they multiply.
        ring: the devices that hold the sequence of q, k and v: along cp and row, or, where parts of
            every head lie over col, along cp alone.
        head_dim: 0: heads lie over col and attention is a ring over row; 1: parts of every head do,
            and attention is made of products on the grid, too.
    """

    rows: int
    cols: int
    grid: Grid
    ring: Ring
    head_dim: int = 0
    token_axes: tuple[Axis, ...] = (Axis.ROW,)
    logit_axes: tuple[Axis, ...] = (Axis.ROW,)

    def column_spec(self, out_dims: int, cut: int) -> P:
        return P(Axis.ROW, *self.cut_spec(out_dims, cut))

    def row_spec(self, in_dims: int, cut: int) -> P:
        return P(*_cut(Axis.ROW, in_dims, cut), Axis.COL)

    def cut_spec(self, dims: int, cut: int) -> P:
        return _cut(Axis.COL, dims, cut)

    def hidden_spec(self) -> P:
        return P(Axis.COL)

    def table_spec(self) -> P:
        """The other way round: the transpose lies as a matrix does, for the logits."""
        return P(Axis.COL, Axis.ROW)

    def position_spec(self) -> P:
        return P(Axis.ROW, Axis.COL)

    def padded(self, size: int, each: int = 1) -> int:
        return padded(size, (self.rows, self.cols, self.grid.slices), each)

    def padded_hidden(self, size: int) -> int:
        return self.padded(size)

    def column(self, x: Array, w: Array) -> Array:
        """x[B, T/row, D/col], w[D/row, *out] -> h[B, T/row, *out], both `out` cut over col."""
        return column(x, w, self.grid)

    def logits(self, x: Array, w: Array) -> Array:
        return self.column(x, w)

    def row(self, h: Array, w: Array, cut: int) -> Array:
        """h[B, T/row, *in], in cut over col, w[*in, D/col], in cut over row -> x."""
        return row(h, w, cut, self.grid)

    def gather(self, h: Array, dim: int) -> Array:
        return collectives.gather_from(h, Axis.COL, dim)

    def scatter(self, h: Array, dim: int) -> Array:
        return collectives.scatter_to(h, Axis.COL, dim)

    def attend(
        self, q: Array, k: Array, v: Array, tokens: Tokens, *, kernel: Kernel, head_size: int
    ) -> Array:
        if self.head_dim == 0:
            ring = self.ring
            return ring_attention.attend(q, k, v, tokens, ring=ring, kernel=kernel, causal=True)
        return block_attention.attend(
            q, k, v, tokens, grid=self.grid, dropout=kernel.dropout, scale=head_size**-0.5
        )

    def join_heads(self, h: Array, head_size: int) -> Array:
        return self.gather(h, -1)[..., :head_size] if self.head_dim else h

    def part_heads(self, h: Array) -> Array:
        if not self.head_dim:
            return h
        more = self.padded(h.shape[-1]) - h.shape[-1]
        return self.scatter(jnp.pad(h, [(0, 0)] * (h.ndim - 1) + [(0, more)]), -1)

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        """tokens[B, T], table[V/col, D/row] -> x: parts of rows for parts of T, then added."""
        x_BTD = local_rows(table, tokens_BT, Axis.COL).astype(dtype)
        x_BTD = lax.all_to_all(x_BTD, Axis.ROW, split_axis=1, concat_axis=2, tiled=True)
        return collectives.reduce_scatter(x_BTD, Axis.COL, 2)

    def positions(self, position_T: Array, table: Array, dtype: DTypeLike) -> Array:
        """positions[T], table[S/row, D/col] -> [T/row, D/col]: rows of the table, added."""
        x_TD = local_rows(table, position_T, Axis.ROW).astype(dtype)
        return collectives.reduce_scatter(x_TD, Axis.ROW, 0)

    def vocab_ids(self, size: int) -> Array:
        return local_numbers(Axis.COL, size)

    def vocab_max(self, m: Array) -> Array:
        return lax.pmax(m, Axis.COL)

    def vocab_sum(self, s: Array) -> Array:
        return lax.psum(s, Axis.COL)

    def sum_over_hidden(self, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(lax.psum(jnp.stack(sums), Axis.COL))

    def only_hidden(self, x: Array, size: int) -> Array:
        if x.shape[-1] * self.cols == size:
            return x
        return jnp.where(self.local_hidden(x.shape[-1]) < size, x, 0)

    def local_tokens(self, position_T: Array) -> Array:
        return collectives.local_block(position_T, Axis.ROW, 0)

    def local_logits(self, x_BT: Array) -> Array:
        return collectives.local_block(x_BT, Axis.ROW, 1)

    def local_hidden(self, size: int) -> Array:
        return local_numbers(Axis.COL, size)

    def local_heads(self, size: int) -> Array:
        if self.head_dim == 0:
            return local_numbers(Axis.COL, size)
        return jnp.arange(size, dtype=jnp.int32)


def _cut(axis: Axis, dims: int, cut: int) -> P:
    return P(*(axis if dim == cut else None for dim in range(dims)))


def make_form(layout: Layout, *, native: bool = False, dot: Product = product) -> TensorParallel:
    """The form in which a layout holds matrices.

    native: the devices have a broadcast, see `Grid`, and permute in any loop, see `permute`.
    dot: the product of a layer's matrix; a grid and ring steps have their own.
    """
    ring = partial(Ring, kind=layout.ring, native=native or layout.pp == 1)
    if layout.has_grid:
        heads = layout.attention2d == "heads"
        around = ring((Axis.CP, Axis.ROW) if heads else (Axis.CP,))
        grid = Grid(layout.matmul2d, layout.matmul2d_slices, native, permutes=around.native)
        return Grid2D(layout.row, layout.col, grid, around, head_dim=0 if heads else 1)
    kind = RingSteps1D if layout.collective_matmul else Megatron1D
    make = partial(kind, layout.tp, ring=ring((Axis.CP,)), dot=dot)
    if layout.sequence_parallel:
        return make((Axis.TP,), collectives.all_gather, collectives.reduce_scatter)
    return make((), collectives.copy_to, collectives.reduce_from)
