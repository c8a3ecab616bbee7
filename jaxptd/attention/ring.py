"""The way of blocks around a ring of devices, and the parts of the scores that a visit computes.

With n devices a pass takes n-1 hops; gradients that travel with their blocks take n-1 more, from
the first other device that visits a block to the block's owner. Where causal attention has a window
and blocks are contiguous, a pass ends with the last block that a query sees, and the last hop of
gradients leads straight back to the owner. Every hop, except the first of
`travel_back`, overlaps with the visit of a block, if the device visits its local block before
`travel` and after `travel_back`. `ring_attention.py` has a picture.

Letters: B batch, T local query, S local key, C devices of the ring, N heads, R distances.
Source: Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.attention.attend import UNCHANGED, AttentionInputs, AttentionSpec, Expansion, Ring
from jaxptd.attention.kernel import (
    Lengths,
    Saved,
    ScoreCoordinates,
    Scores,
    add_at,
    add_gradients,
    by_window,
    document_ends,
    documents_meet,
    merge_at,
)


def hops_for(ring: Ring, length: int, scores: Scores) -> int:
    """Hops after which every query has met all keys that it sees.

    length: tokens of a device.
    """
    others = lax.axis_size(ring.axis) - 1
    if not scores.causal or scores.window is None or not ring.strategy.order.in_line:
        return others
    return min(others, -(-(scores.window - 1) // length))


def of_layer(run: Callable[..., Any], inputs: AttentionInputs, spec: AttentionSpec) -> Any:
    """`run(.., inputs=, spec=)` with the scores of this layer, which has a window or has none.

    Collectives stay outside of it: devices of other stages may run a layer of the other kind.
    """
    plain = inputs._replace(windowed=None)

    def either(*arguments: Any) -> Any:
        def with_scores(scores: Scores) -> Any:
            return run(*arguments, inputs=plain, spec=spec._replace(scores=scores))

        return by_window(inputs.windowed, spec.scores, with_scores)

    return either


def travel(
    x: Array,
    ring: Ring,
    total: Any,
    visit: Callable[[Any, Array, Array], Any],
    *,
    hops: int | None = None,
) -> Any:
    """`total` after `visit(total, x of another device, its number)` for each of the others.

    Each hop overlaps with the visit of the block before it. A loop, so that one visit ends before
    the next begins and its memory is used again.

    hops: of the nearest devices before this one only; None: of all others.
    """
    me, size = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    hops = size - 1 if hops is None else hops
    if hops == 0:
        return total

    def step(carry: tuple[Array, Any], hop: Array) -> tuple[tuple[Array, Any], None]:
        x, total = carry
        return (ring.shift(x), visit(total, x, (me - hop) % size)), None

    (x, total), _ = lax.scan(step, (ring.shift(x), total), jnp.arange(1, hops))
    return visit(total, x, (me - hops) % size)


def travel_back(
    x: Array,
    ring: Ring,
    total: Any,
    visit: Callable[[Any, Array, Array], tuple[Any, Array]],
    *,
    hops: int | None = None,
) -> tuple[Any, Array | int]:
    """Like `travel`, with a `visit` that also returns a gradient of x: -> (total, dx of local x).

    Barriers: no hop starts before the visit that the previous hop overlapped is done. Otherwise XLA
    for GPUs overlaps two visits with one hop, and none with another.
    """
    me, size = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    hops = size - 1 if hops is None else hops
    if hops == 0:
        return total, 0
    x, total = lax.optimization_barrier((ring.shift(x), total))
    ahead = ring.shift(x) if hops > 1 else x
    total, dx = visit(total, x, (me - 1) % size)

    def step(carry: tuple[Array, Array, Any], hop: Array) -> tuple[tuple[Array, Array, Any], None]:
        x, dx, total = lax.optimization_barrier(carry)
        ahead, dx = ring.shift(x), ring.shift(dx)
        total, local_dx = visit(total, x, (me - hop) % size)
        return (ahead, dx + local_dx, total), None

    carry, _ = lax.scan(step, (ahead, dx, total), jnp.arange(2, hops))
    x, dx, total = lax.optimization_barrier(carry)
    if hops > 1:
        dx = ring.shift(dx)
        total, local_dx = visit(total, x, (me - hops) % size)
        dx += local_dx
    return total, ring.shift(dx, -hops)


# ---- tiles of a visit ----------------------------------------------------------------------------
# Tiles: the parts of the scores that a device of a ring computes with a visited block of keys.
#
# In causal attention a device with two chunks, a zigzag's, sees half of another device's block, and
# one with a single chunk all of it or nothing. The parts that it sees are rectangles, squares if
# causal; a kernel gets them in tiles, so small that it does not split them further. Tiles of which
# a window leaves nothing are skipped. A bias by distance needs rectangles whose positions have no
# gap, chunk by chunk.
#
# Letters: B batch, T local query, S local key, K rectangles, I tiles of a rectangle.


class ScoreTile(NamedTuple):
    """A rectangle of scores: its first query, its first key, and how many of each."""

    query: Array | int
    key: Array | int
    sides: Lengths

    def queries(self, x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, self.query, self.sides.queries, 1)

    def keys(self, kv: Array) -> Array:
        return lax.dynamic_slice_in_dim(kv, self.key, self.sides.keys, 2)

    def coordinates(self, coordinates: ScoreCoordinates) -> ScoreCoordinates:
        take = lax.dynamic_slice_in_dim
        return coordinates.each(
            lambda x, dim: take(x, self.query, self.sides.queries, dim),
            lambda x, dim: take(x, self.key, self.sides.keys, dim),
        )


Visit = Callable[[Any, ScoreTile, Scores], Any]


def visit_tiles(
    visit: Visit, total: Any, source: Array, lengths: Lengths, spec: AttentionSpec
) -> Any:
    """`total` after `visit(total, tile, scores)` for each visible tile with device `source`.

    lengths: tokens of a device.
    """
    parts = _visible_parts(source, lengths, spec)
    visit_all = partial(_over_parts, visit, parts=parts, spec=spec)
    order, axis = spec.ring.strategy.order, spec.ring.axis
    if not spec.scores.causal or order.chunks > 1:
        return visit_all(total)
    (number,), me, size = order.numbers, lax.axis_index(axis), lax.axis_size(axis)
    earlier = number(source, size) < number(me, size)
    return lax.cond(earlier, visit_all, lambda total: total, total)


def visit_local_chunks(visit: Visit, total: Any, lengths: Lengths, spec: AttentionSpec) -> Any:
    """`visit_tiles` of a zigzag's local block: chunks with themselves, the later with the other.

    Where attention is not causal, also the earlier with the later. lengths: tokens of a device.
    """
    me = lax.axis_index(spec.ring.axis)
    if not spec.scores.causal:
        return visit_tiles(visit, total, me, lengths, spec)
    half = lengths.queries // 2
    for start in (0, half):
        total = visit(total, ScoreTile(start, start, Lengths(half, half)), spec.scores)
    later = _Parts(jnp.full(1, half), jnp.zeros(1, int), Lengths(half, half), me, lengths)
    return _over_parts(visit, total, parts=later, spec=spec)


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


def _visible_parts(source: Array, lengths: Lengths, spec: AttentionSpec) -> _Parts:
    half = Lengths(*(length // 2 for length in lengths))
    if spec.scores.causal and spec.ring.strategy.order.chunks > 1:
        # The first chunk of `source` always precedes this device's second chunk. If `source` is a
        # later device, so does its second chunk; if an earlier one, its first chunk also precedes
        # this device's first chunk.
        same = jnp.where(source > lax.axis_index(spec.ring.axis), half.keys, 0)
        query_2 = jnp.stack([jnp.full_like(same, half.keys), same])
        return _Parts(query_2, jnp.stack([jnp.zeros_like(same), same]), half, source, lengths)
    if spec.has_gap:
        query_4, key_4 = np.indices((2, 2)).reshape(2, 4) * np.array(half)[:, None]
        return _Parts(jnp.asarray(query_4), jnp.asarray(key_4), half, source, lengths)
    zero = jnp.zeros(1, jnp.int32)
    return _Parts(zero, zero, lengths, source, lengths)


def _over_parts(visit: Visit, total: Any, *, parts: _Parts, spec: AttentionSpec) -> Any:
    seen = None if spec.scores.window is None else partial(_in_sight, parts=parts, spec=spec)
    starts = parts.query_K, parts.key_K
    return visit_rectangles(visit, total, starts, parts.sides, spec=spec, seen=seen)


def visit_rectangles(
    visit: Visit,
    total: Any,
    starts: tuple[Array, Array],
    sides: Lengths,
    *,
    spec: AttentionSpec,
    seen: Callable[[ScoreTile], Array] | None = None,
) -> Any:
    """`total` after `visit(total, tile, scores)` for each tile of rectangles below the diagonal.

    Args:
        visit: computes a tile, whose scores are not causal.
        total: the first one.
        starts: first query and first key of each rectangle, `[K]`.
        sides: of every rectangle.
        spec: of the attention.
        seen: whether a query of a tile sees a key of it; None: all do.
    """
    tile = Lengths(*(spec.kernel.tile(side) for side in sides))
    scores = spec.scores._replace(causal=False)
    counts = [whole // side for whole, side in zip(sides, tile, strict=True)]
    row_I, column_I = np.indices(counts, np.int32).reshape(2, -1)
    query_KI = starts[0][:, None] + tile.queries * row_I
    key_KI = starts[1][:, None] + tile.keys * column_I

    def step(total: Any, start: tuple[Array, Array]) -> tuple[Any, None]:
        each = ScoreTile(*start, tile)
        if seen is None:
            return visit(total, each, scores), None
        merged = lax.cond(
            seen(each), lambda total: visit(total, each, scores), lambda total: total, total
        )
        return merged, None

    return lax.scan(step, total, (query_KI.ravel(), key_KI.ravel()))[0]


def _in_sight(tile: ScoreTile, parts: _Parts, spec: AttentionSpec) -> Array:
    """True if the first query of a tile sees its last key, the nearest one, through the window."""
    ring, lengths = spec.ring, parts.lengths
    query = ring.position(tile.query, lengths.queries, lax.axis_index(ring.axis))
    key = ring.position(tile.key + tile.sides.keys - 1, lengths.keys, parts.source)
    return key > query - (spec.scores.window or 0)


# ---- what a visit computes of a tile -------------------------------------------------------------


class Sums(NamedTuple):
    """Gradients that stay on the device, in the precision of sums; bias: None without one."""

    q: Array
    bias: Array | None
    expansion: Expansion = UNCHANGED

    def with_expansion(self, gradient: Any) -> "Sums":
        """Adds a gradient of the expansion."""
        return self._replace(expansion=jax.tree.map(jnp.add, self.expansion, gradient))


def zero_sums(like: Any, saved: Saved) -> Any:
    """Zeros of these shapes, in the precision of gradient sums."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, saved.lse.dtype), like)


def blind_rows(q: Array) -> tuple[Array, Array]:
    """The output and logsumexp of queries that have seen no key yet, for `merge_tile`."""
    o = jnp.zeros_like(q, jnp.promote_types(q.dtype, jnp.float32))
    return o, o[..., 0] - jnp.inf


def merge_tile(
    total: Any,
    tile: ScoreTile,
    scores: Scores,
    *,
    q: Array,
    kv: Array,
    coordinates: ScoreCoordinates,
    spec: AttentionSpec,
) -> Any:
    """`total`, (o, lse), with attention of a tile merged into its rows."""
    of_tile = tile.coordinates(coordinates)

    def merged(total: Any) -> Any:
        qs, (ks, vs) = tile.queries(q), tile.keys(kv)
        part = spec.kernel.fwd(qs, ks, vs, of_tile, scores=scores)
        return merge_at(total, part, tile.query, dim=1)

    return _where_documents_meet(merged, total, of_tile)


def add_tile(
    total: tuple[Sums, Array],
    tile: ScoreTile,
    scores: Scores,
    *,
    saved: Saved,
    do: Array,
    kv: Array,
    coordinates: ScoreCoordinates,
    spec: AttentionSpec,
) -> tuple[Sums, Array]:
    """`total`, (sums, d(kv)), with the gradients of a tile."""
    of_tile = tile.coordinates(coordinates)

    def added(total: tuple[Sums, Array]) -> tuple[Sums, Array]:
        sums, dkv = total
        qs, os, lses, dos = (tile.queries(x) for x in (saved.q, saved.o, saved.lse, do))
        ks, vs = tile.keys(kv)
        gradients = spec.kernel.bwd(Saved(qs, ks, vs, os, lses), dos, of_tile, scores=scores)
        for number, x in enumerate((gradients.k, gradients.v)):
            dkv = add_at(dkv, x[None], (number, 0, tile.key, 0, 0))
        bias = add_gradients(sums.bias, gradients.bias)
        dq = add_at(sums.q, gradients.q, (0, tile.query, 0, 0))
        return sums._replace(q=dq, bias=bias), dkv

    return _where_documents_meet(added, total, of_tile)


def _where_documents_meet(
    update: Callable[[Any], Any], total: Any, coordinates: ScoreCoordinates
) -> Any:
    """`update(total)`, or `total` if queries and keys have no document in common."""
    query_BT, key_BS = coordinates.query_segment_BT, coordinates.key_segment_BS
    if query_BT is None or key_BS is None:
        return update(total)
    meet = documents_meet(document_ends(query_BT), document_ends(key_BS))
    return lax.cond(meet, update, lambda total: total, total)
