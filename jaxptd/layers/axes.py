"""The part of weights and activations that a device has, by the mesh axes that shard them.

`specs.py` says which they are. Letters: B batch, T position, D model, F hidden, N heads, H head
size, V vocabulary.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from jaxptd import collectives
from jaxptd.mesh import Axis
from jaxptd.parts.specs import Specs


@dataclasses.dataclass(frozen=True)
class ShardingAxes(Specs):
    """The axes, and the blocks and sums that a device computes with them."""

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

    def sum_over_head(self, s: Array) -> Array:
        """Sum over the shards of H, where each device has a slice of every head."""
        return lax.psum(s, self.head_slices) if self.head_slices else s

    def sum_over_hidden(self, s: Array) -> Array:
        """Sum over the shards of D."""
        return lax.psum(s, self.hidden) if self.hidden else s

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
        gathered = collectives.all_gather(kv, self.inner, kv.ndim - 1)[..., :head_size]
        first = lax.axis_index(self.inner) * heads // devices
        return lax.dynamic_slice_in_dim(gathered, first, max(1, heads // devices), kv.ndim - 2)

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

    def local_images(self, x_B: Array) -> Array:
        """This device's block of a value per image `[B, ..]`.

        `axes.tokens` shard a residual stream `[1, B T, D]` of images, so each device has whole
        ones.
        """
        return _local_block(x_B, self.tokens, 0)

    def gather_images(self, x_b: Array) -> Array:
        """Gathers a value per image from all devices. Undoes `local_images`."""
        for axis in reversed(self.tokens):
            x_b = collectives.all_gather(x_b, axis, 0)
        return x_b

    def logit_images(self, x_B: Array) -> Array:
        """`local_images` of the images between the products of a pair."""
        return _local_block(x_B, self.logit_tokens, 0)

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


def _numbers(axis: Axis | None, size: int) -> Array:
    return local_numbers(axis, size) if axis else jnp.arange(size, dtype=jnp.int32)


def _local_block(x: Array, axes: tuple[Axis, ...], dim: int) -> Array:
    for axis in axes:
        x = collectives.local_block(x, axis, dim)
    return x
