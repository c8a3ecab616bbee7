"""How a weight matrix is held, and what its products move: the interface behind the layers.

A layer asks its `form` for specs, for the two products of a pair of matrices, and for what its own
block of tokens, hidden units and vocabulary is. It never names an axis. `Megatron1D` cuts matrices
one way, over tp; sequence parallelism is the same form with another pair of collectives at the two
ends of a pair of products. A 2D grid is another implementation of `TensorParallel`.

Letters: B batch, T query position, D model, F hidden, V vocabulary.
Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxptd import collectives
from jaxptd.mesh import Axis, Layout
from jaxptd.ring import Ring


class TensorParallel(Protocol):
    """One way to hold matrices and the activations between them.

    `x` is an activation as the residual stream has it; `h` one as it is between the two products of
    a pair (heads, or the MLP's hidden units, are cut); `w` and `table` are this device's blocks.
    """

    @property
    def token_axes(self) -> tuple[Axis, ...]:
        """Axes that cut the residual stream's sequence, beyond cp."""

    @property
    def ring(self) -> Ring:
        """The devices that hold the sequence of q, k and v."""

    def column_spec(self, out_dims: int, cut: int) -> P:
        """Of `w[D, *out]`, cut along dim `cut` of `out`."""

    def row_spec(self, in_dims: int, cut: int) -> P:
        """Of `w[*in, D]`, cut along dim `cut` of `in`."""

    def cut_spec(self, dims: int, cut: int) -> P:
        """Of a bias of the first product of a pair, `b[*out]`."""

    def hidden_spec(self) -> P:
        """Of a vector as wide as the residual stream, `b[D]`."""

    def table_spec(self) -> P:
        """Of an embedding table, `table[V, D]`."""

    def position_spec(self) -> P:
        """Of a table of positions, `table[T, D]`, which each device reads at its own tokens."""

    def padded(self, vocab_size: int) -> int:
        """Rows of a table that holds `vocab_size` of them in equal blocks."""

    def column(self, x: Array, w: Array) -> Array:
        """First product of a pair: x -> h."""

    def row(self, h: Array, w: Array) -> Array:
        """Second product of a pair: h -> x."""

    def gather(self, h: Array, dim: int) -> Array:
        """h -> whole along `dim` on every device."""

    def scatter(self, h: Array, dim: int) -> Array:
        """Whole along `dim` -> h."""

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        """Rows of the table, in `dtype`: -> x."""

    def logits(self, x: Array, table: Array) -> Array:
        """x -> `[B, T, V]`, cut over V."""

    def vocab_ids(self, size: int) -> Array:
        """Token ids of this device's `size` logits."""

    def vocab_max(self, m: Array) -> Array:
        """Maximum over the parts of V."""

    def vocab_sum(self, s: Array) -> Array:
        """Sum over the parts of V."""

    def sum_over_hidden(self, s: Array) -> Array:
        """Sum over the parts of D."""

    def own_tokens(self, position_T: Array) -> Array:
        """Positions of the residual stream's tokens, out of those of a cp block."""

    def own_hidden(self, size: int) -> Array:
        """Which of the D hidden units this device's `size` are."""

    def own_heads(self, size: int) -> Array:
        """Which of the N heads this device's `size` are."""


@partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def product(x: Array, w: Array, contract: int) -> Array:
    """Contracts the last `contract` dims of `x` with the first of `w`, in the precision of `x`.

    Backward casts `w` again, so that a scan over layers does not keep a second copy of all weights.
    Without a barrier: with one, XLA would copy a layer's slice out of the stack before the cast.
    """
    dims = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    return lax.dot_general(x, w.astype(x.dtype), (dims, ((), ())))


@dataclasses.dataclass(frozen=True)
class Megatron1D:
    """Matrices cut one way over tp.

    Args:
        size: devices along tp.
        token_axes: axes that cut the residual stream's sequence: none, or tp.
        enter: x as the residual stream has it -> x whole, as the first product needs it.
        leave: owed sums of the second product -> x as the residual stream has it.
        ring: the devices that hold the sequence of q, k and v.
    """

    size: int
    token_axes: tuple[Axis, ...]
    enter: Callable[[Array, str], Array]
    leave: Callable[[Array, str], Array]
    ring: Ring

    def column_spec(self, out_dims: int, cut: int) -> P:
        return P(None, *self.cut_spec(out_dims, cut))

    def row_spec(self, in_dims: int, cut: int) -> P:
        return P(*self.cut_spec(in_dims, cut), None)

    def cut_spec(self, dims: int, cut: int) -> P:
        return P(*(Axis.TP if dim == cut else None for dim in range(dims)))

    def hidden_spec(self) -> P:
        return P(None)

    def table_spec(self) -> P:
        return P(Axis.TP, None)

    def position_spec(self) -> P:
        return P(None, None)

    def padded(self, vocab_size: int) -> int:
        return -(-vocab_size // self.size) * self.size

    def column(self, x: Array, w: Array) -> Array:
        """x[B, T, D], w[D, F/tp] -> h[B, T, F/tp]."""
        return product(self.enter(x, Axis.TP), w, 1)

    def row(self, h: Array, w: Array) -> Array:
        """h[B, T, F/tp], w[F/tp, D] -> x[B, T, D]: partial sums of D, added over tp."""
        return self.leave(product(h, w, w.ndim - 1), Axis.TP)

    def gather(self, h: Array, dim: int) -> Array:
        return collectives.gather_from(h, Axis.TP, dim)

    def scatter(self, h: Array, dim: int) -> Array:
        return collectives.scatter_to(h, Axis.TP, dim)

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        """tokens[B, T], table[V/tp, D] -> x: each device adds the rows it has."""
        local_BT = tokens_BT - self.vocab_ids(table.shape[0])[0]
        mine_BT = (local_BT >= 0) & (local_BT < table.shape[0])
        x_BTD = jnp.where(mine_BT[..., None], table[jnp.where(mine_BT, local_BT, 0)], 0)
        return self.leave(x_BTD.astype(dtype), Axis.TP)

    def logits(self, x: Array, table: Array) -> Array:
        """x, table[V/tp, D] -> [B, T, V/tp]."""
        x_BTD = self.enter(x, Axis.TP)
        return product(x_BTD, table.T, 1)

    def vocab_ids(self, size: int) -> Array:
        return _own_numbers(size)

    def vocab_max(self, m: Array) -> Array:
        return lax.pmax(m, Axis.TP)

    def vocab_sum(self, s: Array) -> Array:
        return lax.psum(s, Axis.TP)

    def sum_over_hidden(self, s: Array) -> Array:
        return s

    def own_tokens(self, position_T: Array) -> Array:
        for axis in self.token_axes:
            position_T = collectives.own_block(position_T, axis, 0)
        return position_T

    def own_hidden(self, size: int) -> Array:
        return jnp.arange(size, dtype=jnp.int32)

    def own_heads(self, size: int) -> Array:
        return _own_numbers(size)


def _own_numbers(size: int) -> Array:
    """The numbers of this device's block of `size`, of blocks numbered through over tp."""
    return lax.axis_index(Axis.TP) * size + jnp.arange(size, dtype=jnp.int32)


def make_form(layout: Layout) -> TensorParallel:
    """The form in which a layout holds matrices."""
    make = partial(Megatron1D, layout.tp, ring=Ring(Axis.CP, layout.ring))
    if layout.sequence_parallel:
        return make((Axis.TP,), collectives.all_gather, collectives.reduce_scatter)
    return make((), collectives.copy_to, collectives.reduce_from)
