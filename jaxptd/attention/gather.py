"""All keys and values gathered on every device, once per layer and pass.

The gathered chunks are put into the order of the sequence, so that the keys before a chunk of
queries are one rectangle of scores. In a zigzag of n devices, causal attention on device i computes

    chunk of queries    keys: on the diagonal    first chunks of all devices    others before it
    i                   chunk i                                                 0 .. i - 1
    2n - 1 - i          chunk 2n - 1 - i         0 .. n - 1                     n .. 2n - 2 - i

Every device has n - 1 others: as many scores as in a ring, in n + 2 kernel calls instead of 2n - 1.
If attention is not causal, one call covers all keys. Nothing that was gathered is saved. Backward
gathers again, and reduce-scatters the gradients of k and v in float32.

Where positions come with the batch (`layout.balance`), a device holds any blocks of the sequence.
Gathered chunks then stay in the devices' order, and one call covers all keys: the kernel skips the
pairs of chunks in which no query sees a key.

Letters: B batch, T local query, S local key, N heads, K heads of keys and values, H head size, C
devices.
Source: Llama Team, arXiv 2407.21783, section 3.3.2.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.attention.attend import (
    AttentionInputs,
    AttentionSpec,
    Expansion,
    Ring,
    recomputing,
)
from jaxptd.attention.kernel import Gradients, Kernel, Lengths, Saved, ScoreCoordinates
from jaxptd.attention.ring import (
    ScoreTile,
    Sums,
    Visit,
    add_tile,
    blind_rows,
    merge_tile,
    of_layer,
    visit_rectangles,
    zero_sums,
)
from jaxptd.collectives import all_gather, reduce_scatter
from jaxptd.context_parallel import placed_blocks


def _forward(
    q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, Array]:
    expansion, placed = inputs.expansion, inputs.position_BCT is not None
    kv = expansion.heads(_gather(expansion.join(k, v), spec.ring, placed=placed))
    rows: tuple[Array, Array] = of_layer(_attend, inputs, spec)(q, kv)
    return rows


def _attend(
    q: Array, kv: Array, *, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, Array]:
    """(o, lse) of local queries and gathered keys and values."""
    lengths = _lengths(q, kv, spec.ring)
    coordinates = _coordinates(inputs, lengths, spec.ring)
    if inputs.position_BCT is not None:
        k, v, kernel = *kv, _placed_kernel(spec, lengths)
        o, lse = kernel.fwd(q, k, v, coordinates, scores=spec.scores)
        return o.astype(lse.dtype), lse
    merge = partial(merge_tile, q=q, kv=kv, coordinates=coordinates, spec=spec)
    rows: tuple[Array, Array] = _visit_all(merge, blind_rows(q), lengths, spec)
    return rows


def _backward(
    saved: Saved, do: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Gradients, Expansion]:
    ring, placed, expansion = spec.ring, inputs.position_BCT is not None, inputs.expansion
    x = _gather(expansion.join(saved.k, saved.v), ring, placed=placed)
    sums, dkv = of_layer(_attend_back, inputs, spec)(saved, expansion.heads(x), do)
    dx, of_expansion = expansion.gradients(x, dkv)
    dx = dx if placed else _in_order(dx, ring, dim=2, order=_held(ring))
    dk, dv = expansion.split(reduce_scatter(dx, ring.axis, 2))
    return Gradients(sums.q, dk, dv, sums.bias), of_expansion


def _attend_back(
    saved: Saved, kv: Array, do: Array, *, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Sums, Array]:
    """Gradients of `_attend`: sums of this device, and those of gathered keys and values."""
    lengths = _lengths(saved.q, kv, spec.ring)
    coordinates = _coordinates(inputs, lengths, spec.ring)
    if inputs.position_BCT is not None:
        whole, kernel = saved._replace(k=kv[0], v=kv[1]), _placed_kernel(spec, lengths)
        gradients = kernel.bwd(whole, do, coordinates, scores=spec.scores)
        return Sums(gradients.q, None), jnp.stack((gradients.k, gradients.v))
    add = partial(add_tile, saved=saved, do=do, kv=kv, coordinates=coordinates, spec=spec)
    total = zero_sums((Sums(saved.q, inputs.bias_NR), kv), saved)
    sums, dkv = _visit_all(add, total, lengths, spec)
    return sums, dkv


attend_gathered = recomputing(_forward, _backward)

# ---- gathered chunks in the order of the sequence ------------------------------------------------


def _held(ring: Ring) -> np.ndarray:
    """Numbers of all chunks of a sequence, in the order in which the devices hold them."""
    devices = lax.axis_size(ring.axis)
    return ring.order(ring.strategy.order.chunks * devices, devices)


def _in_order(x: Array, ring: Ring, *, dim: int, order: np.ndarray) -> Array:
    """`x` with the chunks of these numbers along `dim`."""
    if ring.strategy.order.in_line:
        return x
    split = x.reshape(*x.shape[:dim], len(order), -1, *x.shape[dim + 1 :])
    return jnp.take(split, order, dim, mode="clip").reshape(x.shape)


def _gather(x: Array, ring: Ring, *, placed: bool) -> Array:
    """Joins what devices exchange: `[P, B, S, K, H]` of each -> `[P, B, C * S, K, H]`.

    placed: leaves the tokens as the devices hold them.
    """
    every = all_gather(x, ring.axis, 2)
    return every if placed else _in_order(every, ring, dim=2, order=np.argsort(_held(ring)))


def _lengths(q: Array, kv: Array, ring: Ring) -> Lengths:
    """Tokens of a device, given its queries and all keys."""
    return Lengths(q.shape[1], kv.shape[2] // lax.axis_size(ring.axis))


def _coordinates(inputs: AttentionInputs, lengths: Lengths, ring: Ring) -> ScoreCoordinates:
    """Coordinates of this device's queries and of the keys of all devices."""
    local = ring.all_coordinates(inputs, lengths)
    if inputs.position_BCT is not None:
        return local
    order = np.argsort(_held(ring))
    return local.each(lambda x, dim: x, lambda x, dim: _in_order(x, ring, dim=dim, order=order))


def _placed_kernel(spec: AttentionSpec, lengths: Lengths) -> Kernel:
    """The kernel whose chunks are the blocks of tokens that devices hold in any order."""
    devices = lax.axis_size(spec.ring.axis)
    length = lengths.keys * devices
    return spec.kernel.within(length // placed_blocks(length, devices))


# ---- the rectangles of scores that this device computes ------------------------------------------


def _visit_all(visit: Visit, total: Any, lengths: Lengths, spec: AttentionSpec) -> Any:
    """`total` after `visit(total, tile, scores)` for all scores that a query may see.

    lengths: tokens of a device.
    """
    ring, order = spec.ring, spec.ring.strategy.order
    me, devices = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    if not spec.scores.causal:
        parts = order.chunks if spec.has_gap else 1
        sides = Lengths(lengths.queries // parts, lengths.keys * devices)
        for part in range(parts):
            total = visit(total, ScoreTile(part * sides.queries, 0, sides), spec.scores)
        return total
    side = lengths.queries // order.chunks
    for part, number in enumerate(order.numbers):
        diagonal = ScoreTile(part * side, number(me, devices) * side, Lengths(side, side))
        total = visit(total, diagonal, spec.scores)
    balanced = order.balanced and spec.scores.window is None
    seen = None if balanced else partial(_in_sight, lengths=lengths, spec=spec)
    for query_K, key_K, keys in _before(ring):
        starts, sides = (query_K * side, key_K * side), Lengths(side, keys * side)
        total = visit_rectangles(visit, total, starts, sides, spec=spec, seen=seen)
    return total


def _before(ring: Ring) -> Iterator[tuple[Array, Array, int]]:
    """Rectangles of chunks that are seen entirely: first of queries and of keys, number of keys.

    First those that all devices have, one for each of their chunks of queries; then all others,
    with one chunk of keys each.
    """
    numbers = ring.strategy.order.numbers
    me, devices = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    every = np.array([[number(i, devices) for i in range(devices)] for number in numbers])
    common = every.min(1).tolist()
    for part, keys in enumerate(common):
        if keys:
            yield jnp.full(1, part), jnp.zeros(1, int), keys
    step_K = jnp.arange((every.sum(0) - sum(common)).max())
    query_K, key_K, end = jnp.zeros_like(step_K), step_K + common[0], 0
    for part, keys in enumerate(common[1:], 1):
        end += numbers[part - 1](me, devices) - common[part - 1]
        query_K = jnp.where(step_K < end, query_K, part)
        key_K = jnp.where(step_K < end, key_K, step_K - end + keys)
    yield query_K, key_K, 1


def _in_sight(tile: ScoreTile, *, lengths: Lengths, spec: AttentionSpec) -> Array:
    """True if a tile's keys are before its chunk of queries, and not all before its window."""
    ring, side = spec.ring, lengths.queries // spec.ring.strategy.order.chunks
    query = ring.position(tile.query, lengths.queries, lax.axis_index(ring.axis))
    earlier = tile.key < query - tile.query % side
    if spec.scores.window is None:
        return earlier
    return earlier & (tile.key + tile.sides.keys - 1 > query - spec.scores.window)
