"""Whole matrices of parameters that are cut into blocks, rows of stages, and shards.

A parameter is a stack of matrices `[S, R, C]`: its layers, and in each layer q, k and v, or a gate
and up. `ParamInfo.matrix` says which of its dims are the stack, rows and columns. A device holds

    a block    [S, R/r, C/c]   of every matrix of its stage, with padding
    a shard    n/Z elements    of those blocks, flattened (ZeRO)

There are two ways to look at a whole matrix, without a device that ever has all of them:

    on_whole   deals the matrices out, like cards: the devices that share them get some whole
               matrices each, by one all-to-all for each dim that is cut; another brings them back.
    `Sums`     sums over rows or columns: each device adds up its own part, and a sum over the
               devices follows. A shard is put in its place in a block of zeros for that.

Letters: S matrices of a stack, R rows, C columns, r and c the devices that share those, L layers, Z
devices along the batch's axes, n elements of a block.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.params import ParamInfo, Stored
from jaxptd.zero.shards import ShardedInfo

OnStack = Callable[[Array], Array]  # of a stack, and gives one of the same shape

# ---- whole matrices on a device ------------------------------------------------------------------


def apply_to_whole(fn: OnStack, x: Array, stored: Stored) -> Array:
    """`fn` of the matrices of x, each of them whole and without its padding.

    Args:
        fn: of `[S', R, C]`, this device's share of the stack.
        x: this device's block, or its shard `[L, n/Z]`.
        stored: how the parameter is held; shards are of one layer each (`ShardedInfo.lead`).
    """
    if not isinstance(stored, ShardedInfo):
        return _on_blocks(fn, x, stored.info)

    def on_flat(flat: Array) -> Array:
        return stored.flatten(_on_blocks(fn, stored.unflatten(flat), stored.info))

    return _dealt(on_flat, x, stored.holders, 1)


def _on_blocks(fn: OnStack, x: Array, info: ParamInfo) -> Array:
    """`fn` of the matrices of a block: gathers the dims that are cut, and leaves out padding."""
    stack = [dim for dim, kind in enumerate(info.matrix) if kind == "s"]
    order = stack + [dim for dim, kind in enumerate(info.matrix) if kind != "s"]
    lead = [x.shape[dim] for dim in stack]
    blocks = x.transpose(order).reshape(-1, *(x.shape[dim] for dim in order[len(stack) :]))
    on_stack = partial(_on_matrices, fn, info=info)
    for place, dim in enumerate(order[len(stack) :], 1):
        if axes := info.axes_of_dims[dim]:
            on_stack = partial(_dealt, on_stack, axes=axes, dim=place)
    y = on_stack(blocks)
    return y.reshape(*lead, *y.shape[1:]).transpose(np.argsort(order))


def _on_matrices(fn: OnStack, x: Array, info: ParamInfo) -> Array:
    """`fn` of a stack `[S, ..]` of whole matrices, without their padding."""
    kinds = list(zip(info.matrix, info.shape, strict=True))
    sizes = [size for kind, size in kinds if kind != "s"]
    rows = math.prod(size for kind, size in kinds if kind == "r")
    cropped = x[(slice(None), *map(slice, sizes))]
    y = fn(cropped.reshape(x.shape[0], rows, -1)).reshape(cropped.shape)
    padding = [(0, padded - n) for padded, n in zip(x.shape, y.shape, strict=True)]
    return jnp.pad(y, padding)


def _dealt(fn: OnStack, x: Array, axes: tuple[str, ...], dim: int) -> Array:
    """`fn` of some of a stack with all of `dim`, of which a device has a block of every one."""
    count, devices = x.shape[0], lax.axis_size(axes)
    padding = [(0, -count % devices)] + [(0, 0)] * (x.ndim - 1)
    mine = lax.all_to_all(jnp.pad(x, padding), axes, 0, dim, tiled=True)
    return lax.all_to_all(fn(mine), axes, dim, 0, tiled=True)[:count]


# ---- sums over rows and columns ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the dims of a parameter that are rows, columns, or of any given kinds.

    Args:
        stored: how the parameter is held.
    """

    stored: Stored

    @property
    def info(self) -> ParamInfo:
        return self.stored.info

    @property
    def kinds(self) -> str:
        """A letter for each dim; a vector is a row of columns."""
        info = self.info
        stack = "s" * (info.stack is not None)
        return info.matrix or stack + "c" * (len(info.shape) - len(stack))

    def dims(self, kinds: str) -> tuple[int, ...]:
        return tuple(dim for dim, kind in enumerate(self.kinds) if kind in kinds)

    def axes(self, kinds: str) -> tuple[str, ...]:
        """The mesh axes that share these dims, without those of ZeRO."""
        return tuple(axis for dim in self.dims(kinds) for axis in self.info.axes_of_dims[dim])

    def size(self, kinds: str) -> int:
        """Elements of these dims together, without padding."""
        return math.prod(self.info.shape[dim] for dim in self.dims(kinds))

    def mean(self, block: Array, kinds: str) -> Array:
        """The mean over these dims of a block that is zero in its padding; keeps them, as 1.

        Every shard's part of it is in the block of one device, and zero in all others'.
        """
        return self.mean_of_blocks(block, kinds, (*self.axes(kinds), *self.stored.holders))

    def mean_of_blocks(self, block: Array, kinds: str, axes: tuple[str, ...]) -> Array:
        total = block.sum(self.dims(kinds), keepdims=True)
        return (lax.psum(total, axes) if axes else total) / self.size(kinds)

    def without_padding(self, x: Array, kinds: str) -> Array:
        """x with zeros in the padding of these dims."""
        for dim in self.dims(kinds):
            size, axes = self.info.shape[dim], self.info.axes_of_dims[dim]
            if size < self.info.stored_shape[dim]:
                first = lax.axis_index(axes) * x.shape[dim] if axes else 0
                numbers = first + lax.broadcasted_iota(jnp.int32, x.shape, dim)
                x = jnp.where(numbers < size, x, 0)
        return x

    def block(self, x: Array) -> Array:
        """This device's block or shard -> a block, zero where other devices have a shard of it."""
        if not isinstance(self.stored, ShardedInfo):
            return x
        flat = jnp.zeros((*x.shape[:-1], self.stored.padded_size), x.dtype)
        first = lax.axis_index(self.stored.holders) * self.stored.part_size
        placed = lax.dynamic_update_slice_in_dim(flat, x, first, x.ndim - 1)
        return self.stored.unflatten(placed)

    def held(self, block: Array) -> Array:
        """Undoes `block`."""
        if not isinstance(self.stored, ShardedInfo):
            return block
        flat, size = self.stored.flatten(block), self.stored.part_size
        first = lax.axis_index(self.stored.holders) * size
        return lax.dynamic_slice_in_dim(flat, first, size, flat.ndim - 1)
