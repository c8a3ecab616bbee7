"""Parameters that are sharded over data-parallel devices, as the state holds them.

The block that layers hold on a device is flattened and split into one shard for each device along
the batch's axes; that of an expert, which is split over ep, along the others. All shards have the
same size, the last ones padded with zeros, so any shape splits evenly. With offloading, shards are
in host memory; the second half of this file copies them.

Replicas of a state may split each shard once more between steps (`split`).

Letters: L layers, Z devices along the batch's axes, n elements of a block with its padding.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import compute_on, layout
from jax.typing import ArrayLike, DTypeLike

from jaxptd.params import ParamInfo
from jaxptd.zero.plan import ShardShape


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedInfo(ShardShape):
    """Describes a sharded parameter, and converts its arrays."""

    info: ParamInfo

    def from_stacked(self, x: Array) -> Array:
        """Stacked -> the state's form."""
        return self._flatten_all(self.info.from_stacked(x))

    def from_canonical(self, x: ArrayLike) -> Array:
        """Canonical -> the state's form."""
        return self._flatten_all(self.info.from_canonical(x))

    def to_canonical(self, x: Array) -> Array:
        """The state's form -> canonical."""
        return self.info.to_canonical(self._unflatten_all(x))

    def _flatten_all(self, x: Array) -> Array:
        """The form of layers -> the state's form, both global."""
        lead = self.info.stored_shape[: self.lead]
        pairs = itertools.chain.from_iterable(zip(self._splits, self.block_shape, strict=True))
        blocks = x.reshape(*lead, *pairs).transpose(self._order)
        return self.flatten(blocks.reshape(*lead, -1, *self.block_shape)).reshape(self.stored_shape)

    def _unflatten_all(self, x: Array) -> Array:
        """The state's form -> the form of layers, both global."""
        lead = self.info.stored_shape[: self.lead]
        blocks = self.unflatten(x.reshape(*lead, -1, self.padded_size))
        blocks = blocks.reshape(*lead, *self._splits, *self.block_shape)
        return blocks.transpose(np.argsort(self._order)).reshape(self.info.stored_shape)

    @property
    def _order(self) -> list[int]:
        """[.., split, block, split, block] -> [.., split, split, block, block]."""
        end = self.lead + 2 * len(self.block_shape)
        return [*range(self.lead), *range(self.lead, end, 2), *range(self.lead + 1, end, 2)]

    # ---- on a device ----------------------------------------------------------------------------

    def join(self, part: Array, dtype: DTypeLike) -> Array:
        """part[.., n/(Z R)] -> the shard, all-gathered over R replicas. Partner: `part_of_sum`."""
        if not self.split:
            return part
        last = part.ndim - 1
        return lax.all_gather(part.astype(dtype), self.split, axis=last, tiled=True)

    def part_of_sum(self, gradient: Array) -> Array:
        """A shard's gradient -> this replica's part of its sum over replicas. Partner: `join`."""
        if not self.split:
            return gradient
        last = gradient.ndim - 1
        return lax.psum_scatter(gradient, self.split, scatter_dimension=last, tiled=True)

    def gather(self, shard: Array, dtype: DTypeLike) -> Array:
        """shard[.., n/Z] -> the block, all-gathered in `dtype`. Partner: `reduce_scatter`."""
        flat = lax.all_gather(shard.astype(dtype), self.along, axis=shard.ndim - 1, tiled=True)
        return self.unflatten(flat)

    def reduce_scatter(self, gradient: Array) -> Array:
        """The block's gradient -> this shard of its sum over Z. Partner: `gather`."""
        flat = self.flatten(gradient)
        return lax.psum_scatter(flat, self.along, scatter_dimension=flat.ndim - 1, tiled=True)

    def local_shape(self, shard: Array) -> tuple[int, ...]:
        """The shape of the block, or of all layers' blocks, that a shard is of."""
        return (*shard.shape[:-1], *self.block_shape)

    def unflatten(self, flat: Array) -> Array:
        """[.., n] -> the block, without the padding."""
        size = math.prod(self.block_shape)
        return flat[..., :size].reshape(*flat.shape[:-1], *self.block_shape)

    def flatten(self, block: Array) -> Array:
        """The block -> [.., n], padded."""
        lead = block.shape[: block.ndim - len(self.block_shape)]
        rows = block.reshape(*lead, -1)
        return jnp.pad(rows, [(0, 0)] * len(lead) + [(0, self.padded_size - rows.shape[-1])])


# ---- shards in the host's memory -----------------------------------------------------------------
# Copies between host and device memory, and functions that the host's CPUs compute.
#
# The memory of an array is in its JAX type.


def is_on_host(x: Array) -> bool:
    """True for an array in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def on_device(tree: Any) -> Any:
    """Copies arrays in host memory to the device; others are as they were."""

    def copied(x: Array) -> Array:
        return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x

    return jax.tree.map(copied, tree)


def on_host(tree: Any) -> Any:
    """Copies arrays on the device to host memory; others are as they were."""

    def copied(x: Array) -> Array:
        return x if is_on_host(x) else jax.device_put(x, jax.memory.Space.Host)

    return jax.tree.map(copied, tree)


def computed_on_host(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, computed by the host's CPUs; its results are in host memory."""
    run: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)  # 0.10.2 has the first
    computed = run(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return computed(*on_host(jax.tree.map(_by_rows, arguments)))


def _by_rows(x: Array) -> Array:
    """x with its last dim the fastest; XLA for GPUs refuses to give the host another layout."""
    if is_on_host(x):
        return x
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))
