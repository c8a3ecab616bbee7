"""Blocks of arrays: those that this process's devices hold, and what two blocks have in common.

Checkpoints in a store (`pieces.py`) and states in memory (`shards.py`) consist of blocks, each with
its extent in the whole array. So any layout can put its own blocks together from those of another.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

Extent = tuple[tuple[int, int], ...]  # first element and end of a block along each dim


class Block(NamedTuple):
    """A block of an array, its extent, and the name of the array."""

    name: str
    extent: Extent
    data: np.ndarray


def own_blocks(tensors: Mapping[str, jax.Array]) -> Iterator[Block]:
    """Copies this process's blocks of arrays to host memory; replicas of a block count once.

    On the CPU these are views, and a step that donates the buffer writes into another one.
    """
    shards = [
        (name, x.shape, shard)
        for name, x in tensors.items()
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]
    for *_, shard in shards:  # all copies at the same time
        shard.data.copy_to_host_async()
    for name, shape, shard in shards:
        yield Block(name, extent_of(shard.index, shape), np.asarray(shard.data))


def extent_of(index: Sequence[slice], shape: Sequence[int]) -> Extent:
    """The extent of a shard, from its index in an array of this shape."""
    return tuple(each.indices(n)[:2] for each, n in zip(index, shape, strict=True))


def shape_of(extent: Extent) -> tuple[int, ...]:
    """The shape of a block."""
    return tuple(stop - start for start, stop in extent)


def overlap(a: Extent, b: Extent) -> Extent | None:
    """The common block of two; None if there is none.

    >>> overlap(((0, 4), (2, 6)), ((2, 8), (0, 4))), overlap(((0, 4),), ((4, 8),))
    (((2, 4), (2, 4)), None)
    """
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def meet(a: Extent, b: Extent) -> bool:
    """True if two blocks have an element in common, as any two of a scalar have."""
    return overlap(a, b) is not None


def copy_common(target: np.ndarray, extent: Extent, source: np.ndarray, other: Extent) -> int:
    """Copies what two blocks have in common from one to the other; the number of elements.

    Args:
        target: the block to write.
        extent: its extent.
        source: the block to read.
        other: the extent of that.
    """
    common = overlap(extent, other)
    if common is None:
        return 0
    target[_within(common, extent)] = found = source[_within(common, other)]
    return found.size


def _within(block: Extent, whole: Extent) -> tuple[slice, ...]:
    """The slices of a block in a larger one."""
    pairs = zip(block, whole, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)
