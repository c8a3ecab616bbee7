"""The state's form of a parameter that is sharded over data parallel devices.

The block that layers hold on a device is flattened and split into one shard for each device along
dp x cp, all of the same size, the last ones padded with zeros: any shape splits evenly.

Letters: L layers, Z devices along dp x cp, n elements of a block with its padding.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxptd.mesh import BATCH_AXES, Axis
from jaxptd.params import ParamInfo
from jaxptd.shapes import Spec


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedInfo:
    """Shapes of a sharded parameter: `[L, ..]` if layers are sharded one by one, else flat.

    Args:
        info: of the parameter as layers hold it.
        sizes: devices along each axis.
        lead: leading dims that are not flattened: 1 if layers are sharded one by one, else 0.
    """

    info: ParamInfo
    sizes: Mapping[Axis, int]
    lead: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The canonical shape."""
        return self.info.shape

    @property
    def is_canonical(self) -> bool:
        return False

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that the parameter is sharded over."""
        return self.info.axes | {*BATCH_AXES}

    @cached_property
    def _splits(self) -> list[int]:
        """The number of blocks along each dim that is flattened."""
        dims = self.info.axes_of_dims[self.lead :]
        return [math.prod(self.sizes[Axis(axis)] for axis in axes) for axes in dims]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape that layers hold on one device, without the leading dim."""
        sizes = self.info.stored_shape[self.lead :]
        return tuple(n // split for n, split in zip(sizes, self._splits, strict=True))

    @property
    def shard_size(self) -> int:
        """Elements of one shard."""
        return -(-math.prod(self.block_shape) // math.prod(self.sizes[axis] for axis in BATCH_AXES))

    @property
    def padded_size(self) -> int:
        """Elements of all shards of a block."""
        return self.shard_size * math.prod(self.sizes[axis] for axis in BATCH_AXES)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The global shape that the state holds."""
        return (*self.info.stored_shape[: self.lead], math.prod(self._splits) * self.padded_size)

    @property
    def spec(self) -> Spec:
        """The axes that shard each dim of the state's form."""
        axes = [axis for axes in self.info.axes_of_dims[self.lead :] for axis in axes]
        return (*self.info.spec[: self.lead], (*axes, *BATCH_AXES))

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

    def gather(self, shard: Array, dtype: DTypeLike) -> Array:
        """shard[.., n/Z] -> the block, all-gathered in `dtype`. Partner: `reduce_scatter`."""
        flat = lax.all_gather(shard.astype(dtype), BATCH_AXES, axis=shard.ndim - 1, tiled=True)
        return self.unflatten(flat)

    def reduce_scatter(self, gradient: Array) -> Array:
        """The block's gradient -> this shard of its sum over Z. Partner: `gather`."""
        flat = self.flatten(gradient)
        return lax.psum_scatter(flat, BATCH_AXES, scatter_dimension=flat.ndim - 1, tiled=True)

    def unflatten(self, flat: Array) -> Array:
        """[.., n] -> the block, without the padding."""
        size = math.prod(self.block_shape)
        return flat[..., :size].reshape(*flat.shape[:-1], *self.block_shape)

    def flatten(self, block: Array) -> Array:
        """The block -> [.., n], padded."""
        lead = block.shape[: block.ndim - len(self.block_shape)]
        rows = block.reshape(*lead, -1)
        return jnp.pad(rows, [(0, 0)] * len(lead) + [(0, self.padded_size - rows.shape[-1])])
