"""A ring of devices: which block of a sequence each device holds, and how blocks travel around it.

`context_parallel.py` has the orders of tokens; here they become arrays.

With n devices a pass takes n-1 hops; gradients that travel with their blocks take n-1 more, from
the first other device that visits a block to the block's owner. Where causal attention has a window
and blocks are contiguous, a pass ends with the last block that a query sees, and the last hop of
gradients leads straight back to the owner. Every hop, except the first of
`travel_back`, overlaps with the visit of a block, if the device visits its local block before
`travel` and after `travel_back`. `ring_attention.py` has a picture.

Letters: B batch, T local query, S local key, C devices of the ring, N heads, R distances.
Source: Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.attention.kernel import Kernel, Lengths, ScoreCoordinates, Scores
from jaxptd.collectives import Axes, shift
from jaxptd.context_parallel import STRATEGIES, ContextParallel, RingKind


class AttentionInputs(NamedTuple):
    """Documents, dropout seeds and bias; attention knows the tokens' positions itself.

    query_segment_BCT, key_segment_BCS: the document of each token on every device, as in
    `kernel.ScoreCoordinates`, or None. seed_BN2: dropout seeds, or None. bias_NR: of the scores by
    distance, as in `kernel.ScoreCoordinates`, or None.
    """

    query_segment_BCT: Array | None = None
    key_segment_BCS: Array | None = None
    seed_BN2: Array | None = None
    bias_NR: Array | None = None


def check_lengths(lengths: Lengths, scores: Scores) -> None:
    """Raises ValueError for causal attention to the keys of another sequence."""
    if scores.causal and lengths.queries != lengths.keys:
        raise ValueError(
            f"causal attention of {lengths.queries} queries to {lengths.keys} keys of another "
            "sequence: nothing says which keys are before a query; use causal=False"
        )


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along one or several mesh axes, and which block of a sequence each holds.

    Raises:
        ValueError: no strategy has the name `kind`.
    """

    axis: Axes
    kind: RingKind = "zigzag"

    def __post_init__(self) -> None:
        if self.kind not in STRATEGIES:
            raise ValueError(f"a ring of kind {self.kind!r}: use one of {', '.join(STRATEGIES)}")

    @property
    def strategy(self) -> ContextParallel:
        """The order of tokens, and how queries meet the keys of other devices."""
        return STRATEGIES[self.kind]

    def shift(self, x: Array, by: int = 1) -> Array:
        """Receives the x of the device `by` places before."""
        return shift(x, self.axis, by)

    def order(self, length: int, devices: int) -> np.ndarray:
        """Positions `[length]` of a sequence's tokens in the order in which the devices hold them.

        Raises:
            ValueError: a zigzag's block has an odd number of tokens.
        """
        split = self.strategy.order.split
        blocks = [split(length // devices, i, devices) for i in range(devices)]
        return np.concatenate([start + np.arange(n) for chunks in blocks for start, n in chunks])

    def positions(self, length: int, device: Array | None = None) -> Array:
        """Positions of the `length` tokens of a device (default: this one), int32."""
        device = lax.axis_index(self.axis) if device is None else device
        chunks = self.strategy.order.split(length, device, lax.axis_size(self.axis))
        return jnp.concatenate([start + jnp.arange(n, dtype=jnp.int32) for start, n in chunks])

    def position(self, index: Array | int, length: int, device: Array) -> Array:
        """Position of number `index` of the `length` tokens of a device."""
        chunks = self.strategy.order.split(length, device, lax.axis_size(self.axis))
        position, before = chunks[0][0] + index, 0
        for (_, size), (start, _) in itertools.pairwise(chunks):
            before += size
            position = jnp.where(index < before, position, start + index - before)
        return position

    def run(self, length: int) -> int:
        """Tokens that follow one another without a gap, of the `length` of a device."""
        chunks = self.strategy.order.split(length, 0, lax.axis_size(self.axis))
        return chunks[0][1] if lax.axis_size(self.axis) > 1 else length

    def positions_along(self, axis: str, length: int) -> Array:
        """Positions of the `length` tokens of this device's block along `axis` only.

        axis: the ring's first axis; its other axes shard the block further.
        """
        inner = lax.axis_size(self.axis) // lax.axis_size(axis)
        devices = [lax.axis_index(axis) * inner + i for i in range(inner)]
        return jnp.concatenate([self.positions(length // inner, i) for i in devices])

    def by_device(self, x_BCT: Array) -> Array:
        """Splits an array gathered along the first axis into one block per device of the ring."""
        return x_BCT.reshape(x_BCT.shape[0], lax.axis_size(self.axis), -1)

    def coordinates(
        self, inputs: AttentionInputs, lengths: Lengths, source: Array
    ) -> ScoreCoordinates:
        """Sites of this device's queries and the keys of device `source`; lengths: of a device."""
        return ScoreCoordinates(
            self.positions(lengths.queries),
            self.positions(lengths.keys, source),
            _of_device(inputs.query_segment_BCT, lax.axis_index(self.axis)),
            _of_device(inputs.key_segment_BCS, source),
            inputs.seed_BN2,
            inputs.bias_NR,
        )

    def all_coordinates(self, inputs: AttentionInputs, lengths: Lengths) -> ScoreCoordinates:
        """Sites of this device's queries and the keys of all devices, in the devices' order."""
        size = lax.axis_size(self.axis)
        key_S = jnp.asarray(self.order(lengths.keys * size, size), jnp.int32)
        segment = inputs.key_segment_BCS
        every = None if segment is None else segment.reshape(segment.shape[0], -1)
        local = self.coordinates(inputs, lengths, lax.axis_index(self.axis))
        return local._replace(key_S=key_S, key_segment_BS=every)


def _of_device(segment_BCT: Array | None, device: Array) -> Array | None:
    """One device's documents `[B, T]`, if there are any."""
    if segment_BCT is None:
        return None
    return lax.dynamic_index_in_dim(segment_BCT, device, 1, keepdims=False)


def hops_for(ring: Ring, length: int, scores: Scores) -> int:
    """Hops after which every query has met all keys that it sees.

    length: tokens of a device.
    """
    others = lax.axis_size(ring.axis) - 1
    if not scores.causal or scores.window is None or not ring.strategy.order.in_line:
        return others
    return min(others, -(-(scores.window - 1) // length))


def pin_to_backward(residuals: Any) -> Any:
    """Residuals behind a barrier that waits for all of them, at the start of a backward pass.

    Without it XLA starts backward's first hop in forward, or finds that forward has made the same
    hop, and keeps the received block until backward.
    """
    return lax.optimization_barrier(residuals)


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


class AttentionSpec(NamedTuple):
    """The arguments of `attend` that are not arrays; whether scores have a bias."""

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
        return self.ring.strategy.order.chunks > 1 and lax.axis_size(self.ring.axis) > 1

    def hops(self, length: int) -> int:
        """Hops of blocks of `length` tokens."""
        return hops_for(self.ring, length, self.scores)


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
    sides = Lengths(*(spec.kernel.tile(side) for side in parts.sides))
    scores = spec.scores._replace(causal=False)
    counts = [whole // side for whole, side in zip(parts.sides, sides, strict=True)]
    row_I, column_I = np.indices(counts, np.int32).reshape(2, -1)
    query_KI = parts.query_K[:, None] + sides.queries * row_I
    key_KI = parts.key_K[:, None] + sides.keys * column_I

    def step(total: Any, start: tuple[Array, Array]) -> tuple[Any, None]:
        tile = ScoreTile(*start, sides)
        if spec.scores.window is None:
            return visit(total, tile, scores), None
        seen = _in_sight(tile, parts, spec)
        merged = lax.cond(
            seen, lambda total: visit(total, tile, scores), lambda total: total, total
        )
        return merged, None

    return lax.scan(step, total, (query_KI.ravel(), key_KI.ravel()))[0]


def _in_sight(tile: ScoreTile, parts: _Parts, spec: AttentionSpec) -> Array:
    """True if the first query of a tile sees its last key, the nearest one, through the window."""
    ring, lengths = spec.ring, parts.lengths
    query = ring.position(tile.query, lengths.queries, lax.axis_index(ring.axis))
    key = ring.position(tile.key + tile.sides.keys - 1, lengths.keys, parts.source)
    return key > query - (spec.scores.window or 0)
