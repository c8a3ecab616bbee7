"""Tiles: the parts of the scores that a device of a ring computes with a visited block of keys.

In causal attention a zigzag's device sees half of another device's block, and a contiguous one all
of it or nothing. The parts that it sees are rectangles, squares if causal; a kernel gets them in
tiles, so small that it does not split them further. Tiles of which a window leaves nothing are
skipped. A bias by distance needs rectangles whose positions have no gap, chunk by chunk.

Letters: B batch, T local query, S local key, K rectangles, I tiles of a rectangle.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.attention.kernel import Kernel, Lengths, Scores, Sites
from jaxptd.attention.ring import Ring


class Task(NamedTuple):
    """The arguments of `ring_attention.attend` that are not arrays; whether scores have a bias."""

    ring: Ring
    kernel: Kernel
    scores: Scores
    has_bias: bool = False

    @property
    def has_gap(self) -> bool:
        """True if positions jump within the local block where a window or a bias depends on it."""
        windowed = self.scores.causal and self.scores.window is not None
        return (windowed or self.has_bias) and self.in_chunks

    @property
    def in_chunks(self) -> bool:
        """True if a device's block is two chunks of the sequence."""
        return self.ring.kind == "zigzag" and lax.axis_size(self.ring.axis) > 1

    def hops(self, length: int) -> int:
        """Hops of blocks of `length` tokens."""
        return self.ring.hops(length, self.scores)


class Tile(NamedTuple):
    """A rectangle of scores: its first query, its first key, and how many of each."""

    query: Array | int
    key: Array | int
    sides: Lengths

    def queries(self, x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, self.query, self.sides.queries, 1)

    def keys(self, kv: Array) -> Array:
        return lax.dynamic_slice_in_dim(kv, self.key, self.sides.keys, 2)

    def sites(self, sites: Sites) -> Sites:
        take = lax.dynamic_slice_in_dim
        return sites.each(
            lambda x, dim: take(x, self.query, self.sides.queries, dim),
            lambda x, dim: take(x, self.key, self.sides.keys, dim),
        )


Visit = Callable[[Any, Tile, Scores], Any]


def over_tiles(visit: Visit, total: Any, source: Array, lengths: Lengths, task: Task) -> Any:
    """`total` after `visit(total, tile, scores)` for each visible tile with device `source`.

    lengths: tokens of a device.
    """
    parts = _visible_parts(source, lengths, task)
    visit_all = partial(_over_parts, visit, parts=parts, task=task)
    if not task.scores.causal or task.ring.kind == "zigzag":
        return visit_all(total)
    me = lax.axis_index(task.ring.axis)
    return lax.cond(source < me, visit_all, lambda total: total, total)


def over_local_chunks(visit: Visit, total: Any, lengths: Lengths, task: Task) -> Any:
    """`over_tiles` of a zigzag's local block: each chunk with itself, and the later with the other.

    Where attention is not causal, also the earlier with the later. lengths: tokens of a device.
    """
    me = lax.axis_index(task.ring.axis)
    if not task.scores.causal:
        return over_tiles(visit, total, me, lengths, task)
    half = lengths.queries // 2
    for start in (0, half):
        total = visit(total, Tile(start, start, Lengths(half, half)), task.scores)
    later = _Parts(jnp.full(1, half), jnp.zeros(1, int), Lengths(half, half), me, lengths)
    return _over_parts(visit, total, parts=later, task=task)


class _Parts(NamedTuple):
    """Rectangles of scores of this device's queries with the keys of device `source`.

    query_K, key_K: the first queries and keys. sides: queries and keys of a rectangle. lengths: of
    a device.
    """

    query_K: Array
    key_K: Array
    sides: Lengths
    source: Array
    lengths: Lengths


def _visible_parts(source: Array, lengths: Lengths, task: Task) -> _Parts:
    half = Lengths(*(length // 2 for length in lengths))
    if task.scores.causal and task.ring.kind == "zigzag":
        # The first chunk of `source` is before this device's second chunk. If `source` is a later
        # device, its second chunk is, too; else its first chunk is before this device's first one.
        same = jnp.where(source > lax.axis_index(task.ring.axis), half.keys, 0)
        query_2 = jnp.stack([jnp.full_like(same, half.keys), same])
        return _Parts(query_2, jnp.stack([jnp.zeros_like(same), same]), half, source, lengths)
    if task.has_gap:
        query_4, key_4 = np.indices((2, 2)).reshape(2, 4) * np.array(half)[:, None]
        return _Parts(jnp.asarray(query_4), jnp.asarray(key_4), half, source, lengths)
    zero = jnp.zeros(1, jnp.int32)
    return _Parts(zero, zero, lengths, source, lengths)


def _over_parts(visit: Visit, total: Any, *, parts: _Parts, task: Task) -> Any:
    sides = Lengths(*(task.kernel.tile(side) for side in parts.sides))
    scores = task.scores._replace(causal=False)
    counts = [whole // side for whole, side in zip(parts.sides, sides, strict=True)]
    row_I, column_I = np.indices(counts, np.int32).reshape(2, -1)
    query_KI = parts.query_K[:, None] + sides.queries * row_I
    key_KI = parts.key_K[:, None] + sides.keys * column_I

    def step(total: Any, start: tuple[Array, Array]) -> tuple[Any, None]:
        tile = Tile(*start, sides)
        if task.scores.window is None:
            return visit(total, tile, scores), None
        seen = _in_sight(tile, parts, task)
        found = lax.cond(seen, lambda total: visit(total, tile, scores), lambda total: total, total)
        return found, None

    return lax.scan(step, total, (query_KI.ravel(), key_KI.ravel()))[0]


def _in_sight(tile: Tile, parts: _Parts, task: Task) -> Array:
    """True if the first query of a tile sees its last key, the nearest one, through the window."""
    ring, lengths = task.ring, parts.lengths
    query = ring.position(tile.query, lengths.queries, lax.axis_index(ring.axis))
    key = ring.position(tile.key + tile.sides.keys - 1, lengths.keys, parts.source)
    return key > query - (task.scores.window or 0)
