"""The mesh axes that shard matrices and activations, and everything that follows from them alone.

Letters: B batch, T position, D model, F hidden, N heads, H head size, V vocabulary.

| field          | dims that it shards                    | 1D         | grid  |
|----------------|----------------------------------------|------------|-------|
| `inner`        | F, N (or H), V: the output of a        | tp         | col   |
|                | column-parallel product                |            |       |
| `hidden`       | D of activations                       | none       | col   |
| `contraction`  | the dim of a weight that is summed     | as of the  | row   |
|                | over                                   | activation |       |
| `tokens`       | T of the residual stream, beyond cp    | none or tp | row   |
| `logit_tokens` | T of the logits, beyond cp             | none       | row   |
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxptd import collectives
from jaxptd.mesh import Axis


@dataclasses.dataclass(frozen=True)
class ShardingAxes:
    """Which mesh axis shards which dim of weights and activations.

    Args:
        inner: axis of the dim between the two products of a pair, and of V.
        hidden: axis of D in activations; None: every device has all of D.
        contraction: axis of a weight's contracted dim; None: the axis of the same dim of the
            activation that the weight is multiplied with.
        tokens: axes of T in the residual stream, beyond cp.
        logit_tokens: axes of T in the logits, beyond cp.
        head_dim: which of (N, H) is sharded: 0, each device has whole heads; 1, a slice of every
            head.
    """

    inner: Axis
    hidden: Axis | None = None
    contraction: Axis | None = None
    tokens: tuple[Axis, ...] = ()
    logit_tokens: tuple[Axis, ...] = ()
    head_dim: int = 0

    # ---- partition specs ----

    def column_spec(self, out_dims: int, shard_dim: int) -> P:
        """Spec of `w[D, *out]` with dim `shard_dim` of `out` sharded."""
        return P(self.contraction or self.hidden, *self.inner_spec(out_dims, shard_dim))

    def row_spec(self, in_dims: int, shard_dim: int) -> P:
        """Spec of `w[*in, D]` with dim `shard_dim` of `in` sharded."""
        axis = self.contraction or self.inner
        return P(*_one_axis(axis, in_dims, shard_dim), self.hidden)

    def square_spec(self) -> P:
        """Spec of `w[D, D']` whose result lies as its argument does."""
        return P(self.contraction, self.hidden)

    def inner_spec(self, dims: int, shard_dim: int) -> P:
        """Spec of the bias of a column-parallel product, `b[*out]`."""
        return _one_axis(self.inner, dims, shard_dim)

    def hidden_spec(self) -> P:
        """Spec of a vector as wide as the residual stream, `b[D]`."""
        return P(self.hidden)

    def table_spec(self) -> P:
        """Spec of `table[V, D]`: its transpose is the weight of the column-parallel logits."""
        return P(self.inner, self.contraction or self.hidden)

    def head_spec(self) -> P:
        """Spec of a vector as wide as a head, `w[H]`."""
        return P(self.head_slices)

    def by_head_spec(self) -> P:
        """Spec of a vector with a number for each head, `b[N]`."""
        return P(None if self.head_dim else self.inner)

    def position_spec(self) -> P:
        """Spec of a table of positions, `table[T, D]`."""
        return P(self.contraction, self.hidden)

    # ---- dims between the products of a pair ----

    def gather(self, h: Array, dim: int) -> Array:
        """Gathers `dim` of h from all devices along `inner`. Partner: `scatter`."""
        return collectives.gather_from(h, self.inner, dim)

    def scatter(self, h: Array, dim: int) -> Array:
        """Takes this device's block of `dim`, of an h that every device has. Partner: `gather`."""
        return collectives.scatter_to(h, self.inner, dim)

    def local_heads(self, size: int) -> Array:
        """Numbers of the `size` heads of which this device holds all or a slice, int32."""
        return _numbers(self.inner if self.head_dim == 0 else None, size)

    @property
    def head_axes(self) -> tuple[Axis, ...]:
        """The axes that shard the heads."""
        return () if self.head_dim else (self.inner,)

    @property
    def score_axes(self) -> tuple[Axis, ...]:
        """The axes that shard scores, but neither the heads nor the queries: keys of blocks."""
        return (self.inner,) if self.head_dim else ()

    @property
    def head_slices(self) -> Axis | None:
        """The axis that shards H, if each device has a slice of every head."""
        return self.inner if self.head_dim else None

    def local_head_numbers(self, size: int) -> Array:
        """Numbers of this device's `size` numbers of a head among the H, int32."""
        return _numbers(self.head_slices, size)

    def own_kv_heads(self, kv: Array, head_size: int) -> Array:
        """kv[.., K, H/inner] -> [.., K/inner or 1, H]: the kv heads of this device's query heads.

        For kv heads that do not split over the devices: each makes a slice of all of them, and all
        gather the slices.

        Args:
            kv: keys or values.
            head_size: H without padding.
        """
        heads, devices = kv.shape[-2], lax.axis_size(self.inner)
        whole = collectives.all_gather(kv, self.inner, kv.ndim - 1)[..., :head_size]
        first = lax.axis_index(self.inner) * heads // devices
        return lax.dynamic_slice_in_dim(whole, first, max(1, heads // devices), kv.ndim - 2)

    # ---- vocabulary ----

    def vocab_ids(self, size: int) -> Array:
        """Token ids of this device's `size` logits, int32."""
        return local_numbers(self.inner, size)

    def vocab_max(self, m: Array) -> Array:
        """Maximum over the shards of V."""
        return lax.pmax(m, self.inner)

    def vocab_sum(self, s: Array) -> Array:
        """Sum over the shards of V."""
        return lax.psum(s, self.inner)

    # ---- hidden units of the residual stream ----

    def local_hidden(self, size: int) -> Array:
        """Numbers of this device's `size` hidden units among the D, int32."""
        return _numbers(self.hidden, size)

    # ---- tokens ----

    def local_tokens(self, position_T: Array) -> Array:
        """This device's block of a value per token `[T/cp]`, as the residual stream is sharded."""
        return _local_block(position_T, self.tokens, 0)

    def local_residual_tokens(self, x_BT: Array) -> Array:
        """`local_tokens` of a value per token `[B, T/cp]`."""
        return _local_block(x_BT, self.tokens, 1)

    def local_logit_tokens(self, x_BT: Array) -> Array:
        """This device's block of a value per token `[B, T/cp]`, as the logits are sharded."""
        return _local_block(x_BT, self.logit_tokens, 1)


def local_numbers(axis: Axis, size: int) -> Array:
    """Global numbers of this device's block of `size`, with equal blocks along `axis`, int32."""
    return lax.axis_index(axis) * size + jnp.arange(size, dtype=jnp.int32)


def local_rows(table: Array, ids: Array, axis: Axis) -> Array:
    """Rows `ids` of a table sharded over `axis`; zeros for the rows of other devices."""
    local = ids - local_numbers(axis, table.shape[0])[0]
    mine = (local >= 0) & (local < table.shape[0])
    return jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)


def sum_shards(sums: tuple[Array, ...], axis: Axis | None) -> tuple[Array, ...]:
    """Sums over the shards along `axis`, all in one message."""
    return tuple(lax.psum(jnp.stack(sums), axis)) if axis else sums


def zero_padding(x: Array, axis: Axis | None, size: int) -> Array:
    """x with zeros in number `size` of its last dim, sharded over `axis`, and the ones after it."""
    if axis is None or x.shape[-1] * lax.axis_size(axis) == size:
        return x
    return jnp.where(_numbers(axis, x.shape[-1]) < size, x, 0)


def _numbers(axis: Axis | None, size: int) -> Array:
    return local_numbers(axis, size) if axis else jnp.arange(size, dtype=jnp.int32)


def _local_block(x: Array, axes: tuple[Axis, ...], dim: int) -> Array:
    for axis in axes:
        x = collectives.local_block(x, axis, dim)
    return x


def _one_axis(axis: Axis, dims: int, shard_dim: int) -> P:
    return P(*(axis if dim == shard_dim else None for dim in range(dims)))
