"""How matrices are held, and what their products move: the interface behind the layers.

A layer asks its `form` for specs, for the two products of a pair of matrices, and for what its own
block of tokens, hidden units, heads and vocabulary is. It never names an axis. The forms are in
`tensor_parallel.py`.

`x` is an activation as the residual stream has it; `h` one as it is between the two products of a
pair (heads, or the MLP's hidden units, are cut); `w` and `table` are this device's blocks.
Letters: B batch, T query position, D model, F hidden, N heads, H head size, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxptd.attention.kernel import Kernel
from jaxptd.attention.ring import Ring, Tokens
from jaxptd.collectives import alike
from jaxptd.matmul.ring import as_matrix
from jaxptd.mesh import Axis

Product = Callable[[Array, Array, int], Array]  # as `product`


class TensorParallel(Protocol):
    """One way to hold matrices and the activations between them."""

    # ---- what is cut ----

    @property
    def token_axes(self) -> tuple[Axis, ...]:
        """Axes that cut the residual stream's sequence, beyond cp."""

    @property
    def logit_axes(self) -> tuple[Axis, ...]:
        """Those that also cut the sequence of the logits."""

    @property
    def head_dim(self) -> int:
        """Which of (N, H) is cut: each device has whole heads, or a part of every head."""

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
        """Of an embedding table, `table[V, D]`, whose transpose makes logits by `column`."""

    def position_spec(self) -> P:
        """Of a table of positions, `table[T, D]`."""

    def padded(self, size: int, each: int = 1) -> int:
        """Of V, or a dim that is cut between a pair of products: its size in equal blocks.

        each: hidden units that belong to one of it, as to a head.
        """

    def padded_hidden(self, size: int) -> int:
        """Of D: its size in equal blocks."""

    # ---- products ----

    def column(self, x: Array, w: Array) -> Array:
        """First product of a pair, `w[D, *out]`: x -> h, cut over T along `logit_axes` only."""

    def logits(self, x: Array, w: Array) -> Array:
        """As `column`, of the output layer: never in less than the precision of `x`."""

    def row(self, h: Array, w: Array, cut: int) -> Array:
        """Second product of a pair, `w[*in, D]`, cut along dim `cut` of `in`: h -> x."""

    def gather(self, h: Array, dim: int) -> Array:
        """h -> whole along `dim` on every device."""

    def scatter(self, h: Array, dim: int) -> Array:
        """Whole along `dim` -> h."""

    def attend(
        self, q: Array, k: Array, v: Array, tokens: Tokens, *, kernel: Kernel, head_size: int
    ) -> Array:
        """Causal attention of q, k, v `[B, T, N, H]`, cut along `head_dim` -> o, the same."""

    def join_heads(self, h: Array, head_size: int) -> Array:
        """h[B, T, N, H] -> with all of H, for a device that attends alone."""

    def part_heads(self, h: Array) -> Array:
        """As `join_heads` gave it -> h."""

    # ---- tables and vocabulary ----

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        """Rows of the table, in `dtype`: -> x."""

    def positions(self, position_T: Array, table: Array, dtype: DTypeLike) -> Array:
        """Rows of the table of positions, of a cp block's tokens, in `dtype`: -> x without B."""

    def vocab_ids(self, size: int) -> Array:
        """Token ids of this device's `size` logits."""

    def vocab_max(self, m: Array) -> Array:
        """Maximum over the parts of V."""

    def vocab_sum(self, s: Array) -> Array:
        """Sum over the parts of V."""

    # ---- what this device's block is ----

    def sum_over_hidden(self, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Sums over the parts of D, in one message."""

    def only_hidden(self, x: Array, size: int) -> Array:
        """x, zero at and beyond hidden unit `size`."""

    def local_tokens(self, position_T: Array) -> Array:
        """Positions of the residual stream's tokens, out of those of a cp block."""

    def local_logits(self, x_BT: Array) -> Array:
        """What belongs to the tokens of the logits, out of those of a cp block."""

    def local_hidden(self, size: int) -> Array:
        """Which of the D hidden units this device's `size` are."""

    def local_heads(self, size: int) -> Array:
        """Which of the N heads this device's `size` are."""


def product(x: Array, w: Array, contract: int) -> Array:
    """Contracts the last `contract` dims of `x` with the first of `w`, in the precision of `x`.

    Backward casts `w` again, so that a scan over layers does not keep a second copy of all weights.
    """
    return _product(*alike(x, w), contract)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, w: Array, contract: int) -> Array:
    lead = x.shape[: x.ndim - contract]
    y = jnp.matmul(x.reshape(*lead, -1), as_matrix(w, contract).astype(x.dtype))
    return y.reshape(*lead, *w.shape[contract:])


def _product_fwd(x: Array, w: Array, contract: int) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, w, contract), (x, w)


def _product_bwd(contract: int, kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = kept
    w_DF = as_matrix(w, contract)
    # As matrices: of more dims, XLA transposes dy in memory.
    dy = dy.reshape(*dy.shape[: x.ndim - contract], -1)
    dw = jnp.matmul(x.reshape(-1, w_DF.shape[0]).T, dy.reshape(-1, w_DF.shape[1]))
    # Or XLA may leave the rounding out where w is wider, and layouts would round differently.
    precision = jnp.finfo(x.dtype)
    dw = lax.reduce_precision(dw.astype(w.dtype), precision.nexp, precision.nmant)
    dx = jnp.matmul(dy, w_DF.astype(x.dtype).T)
    return dx.reshape(x.shape), dw.reshape(w.shape)


_product.defvjp(_product_fwd, _product_bwd)


def local_numbers(axis: Axis, size: int) -> Array:
    """The numbers of this device's block of `size`, of blocks numbered through over `axis`."""
    return lax.axis_index(axis) * size + jnp.arange(size, dtype=jnp.int32)


def local_rows(table: Array, ids: Array, axis: Axis) -> Array:
    """Those of a table cut over `axis` that this device has, zeros for the others."""
    local = ids - local_numbers(axis, table.shape[0])[0]
    mine = (local >= 0) & (local < table.shape[0])
    return jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)
