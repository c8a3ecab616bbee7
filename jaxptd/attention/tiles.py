"""Tiles: the squares of scores that a device of a ring computes with a visited block of keys.

In causal attention a zigzag's device sees half of another device's block, and a contiguous one all
of it or nothing. The parts that it sees are squares; a kernel gets them in tiles, so small that it
does not split them further. Tiles of which a window leaves nothing are skipped.

Letters: B batch, T local query, S local key, K squares, I tiles of a square.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.attention.kernel import Kernel, Scores, Sites
from jaxptd.attention.ring import Ring


class Task(NamedTuple):
    """The arguments of `ring_attention.attend` that are not arrays."""

    ring: Ring
    kernel: Kernel
    scores: Scores

    @property
    def has_gap(self) -> bool:
        """True if positions jump within the local block, which a window would not see otherwise."""
        windowed = self.scores.causal and self.scores.window is not None
        return windowed and self.ring.kind == "zigzag" and lax.axis_size(self.ring.axis) > 1

    def hops(self, length: int) -> int:
        """Hops of blocks of `length` tokens."""
        return self.ring.hops(length, self.scores)


class Tile(NamedTuple):
    """A square of scores: its first query, its first key and its side."""

    query: Array | int
    key: Array | int
    side: int

    def queries(self, x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, self.query, self.side, 1)

    def keys(self, kv: Array) -> Array:
        return lax.dynamic_slice_in_dim(kv, self.key, self.side, 2)

    def sites(self, sites: Sites) -> Sites:
        take = partial(lax.dynamic_slice_in_dim, slice_size=self.side)
        return sites.each(
            lambda x, dim: take(x, self.query, axis=dim), lambda x, dim: take(x, self.key, axis=dim)
        )


Visit = Callable[[Any, Tile, Scores], Any]


def over_tiles(visit: Visit, total: Any, source: Array, length: int, task: Task) -> Any:
    """`total` after `visit(total, tile, scores)` for each visible tile with device `source`.

    length: tokens of a device.
    """
    squares = _visible_squares(source, length, task)
    visit_all = partial(_over_squares, visit, squares=squares, task=task)
    if not task.scores.causal or task.ring.kind == "zigzag":
        return visit_all(total)
    me = lax.axis_index(task.ring.axis)
    return lax.cond(source < me, visit_all, lambda total: total, total)


def over_local_chunks(visit: Visit, total: Any, length: int, task: Task) -> Any:
    """`over_tiles` of a zigzag's local block: each chunk with itself, and the later with the other.

    length: tokens of a device.
    """
    half, me = length // 2, lax.axis_index(task.ring.axis)
    for start in (0, half):
        total = visit(total, Tile(start, start, half), task.scores)
    squares = _Squares(jnp.full(1, half), jnp.zeros(1, int), half, me, length)
    return _over_squares(visit, total, squares=squares, task=task)


class _Squares(NamedTuple):
    """Squares of scores of this device's queries with the keys of device `source`.

    query_K, key_K: the first queries and keys. size: of a side. length: tokens of a device.
    """

    query_K: Array
    key_K: Array
    size: int
    source: Array
    length: int


def _visible_squares(source: Array, length: int, task: Task) -> _Squares:
    if not task.scores.causal or task.ring.kind != "zigzag":
        zero = jnp.zeros(1, jnp.int32)
        return _Squares(zero, zero, length, source, length)
    # The first chunk of `source` is before this device's second chunk. If `source` is a later
    # device, its second chunk is, too; else its first chunk is before this device's first one.
    half = length // 2
    same = jnp.where(source > lax.axis_index(task.ring.axis), half, 0)
    query_2 = jnp.stack([jnp.full_like(same, half), same])
    return _Squares(query_2, jnp.stack([jnp.zeros_like(same), same]), half, source, length)


def _over_squares(visit: Visit, total: Any, *, squares: _Squares, task: Task) -> Any:
    size = squares.size
    side, scores = task.kernel.tile(size), task.scores._replace(causal=False)
    row_I, column_I = side * np.indices((size // side, size // side), np.int32).reshape(2, -1)
    query_KI, key_KI = squares.query_K[:, None] + row_I, squares.key_K[:, None] + column_I

    def step(total: Any, start: tuple[Array, Array]) -> tuple[Any, None]:
        tile = Tile(*start, side)
        if task.scores.window is None:
            return visit(total, tile, scores), None
        seen = _in_sight(tile, squares, task)
        found = lax.cond(seen, lambda total: visit(total, tile, scores), lambda total: total, total)
        return found, None

    return lax.scan(step, total, (query_KI.ravel(), key_KI.ravel()))[0]


def _in_sight(tile: Tile, squares: _Squares, task: Task) -> Array:
    """True if the first query of a tile sees its last key, the nearest one, through the window."""
    ring, length = task.ring, squares.length
    query = ring.position(tile.query, length, lax.axis_index(ring.axis))
    key = ring.position(tile.key + tile.side - 1, length, squares.source)
    return key > query - (task.scores.window or 0)
