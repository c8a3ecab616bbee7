"""Attention over a sequence that is sharded over a ring of devices; see `attention/ring.py`.

Keys and values travel, both in one permute, while each device attends from its queries to the block
that it holds (blockwise; contiguous or zigzag). Online softmax merges the results, so no score
matrix is larger than a block. One pass around a ring of 4 devices, seen from device i:

    forward    compute   local   i-1     i-2     i-3            blocks of keys and values
               receive   i-1     i-2     i-3

    backward   compute           i-1     i-2     i-3     local
               receive   i-1     i-2     i-3
               receive                   d(i-2)  d(i-3)  d(i)   float32 gradients of blocks so far

Columns are steps; a receive overlaps the compute above it. Saved for backward are q, k, v, the
output, and the logsumexp of entire rows, from which backward recomputes any block's scores.
`attention/attend.py`, the entry point of all attention, calls this where devices exchange blocks.
In RSA, the ring as first published, each device computes all its scores at once:
`attention/rsa.py`.

Letters: B batch, T local query, S local key, N heads, H head size, R distances.
Source: Liu et al., arXiv 2310.01889.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.attend import AttentionInputs, AttentionSpec, Ring, attend, pin_to_backward
from jaxptd.attention.kernel import (
    Kernel,
    Lengths,
    Saved,
    ScoreCoordinates,
    Scores,
    add_at,
    add_gradients,
    by_window,
    merge_at,
    sink_gradient,
    with_sinks,
)
from jaxptd.attention.ring import (
    ScoreTile,
    hops_for,
    travel,
    travel_back,
    visit_local_chunks,
    visit_tiles,
)
from jaxptd.attention.rsa import ring_av, ring_qk
from jaxptd.remat import SAVED_ATTENTION_OUT

__all__ = [
    "AttentionInputs",
    "Kernel",
    "Ring",
    "Scores",
    "attend",
    "attend_blocks",
    "ring_av",
    "ring_qk",
]


def attend_blocks(
    q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Ring attention block by block; arguments and result as in `attend`."""
    at_once = _at_once(max(q.shape[1], k.shape[1]), spec.scores)
    return _blockwise(q, k, v, inputs, spec._replace(kernel=spec.kernel.within(at_once)))


def _at_once(length: int, scores: Scores) -> int:
    """The most tokens in one matmul of scores, out of a device's `length`.

    For causal attention this is half a block: half of the local block's scores are masked, and a
    whole block's scores would be most of a ring's memory. Where every query sees every key, halves
    would only cost a second accumulation.
    """
    return -(-length // 2) if scores.causal else length


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec) -> Array:
    return _forward(q, k, v, inputs, spec)[0]


# ---- forward --------------------------------------------------------------------------------


def _forward(
    q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, tuple[Saved, AttentionInputs]]:
    total = _by_window(_local, inputs, spec)(q, k, v)
    visit = _by_window(partial(_visit, q=q), inputs, spec)
    hops = hops_for(spec.ring, k.shape[1], inputs.furthest(spec.scores))
    o, lse = travel(jnp.stack((k, v)), spec.ring, total, visit, hops=hops)
    if inputs.sink_N is not None:
        o, lse = with_sinks(o, lse, inputs.sink_N)
    o, lse = checkpoint_name((o.astype(q.dtype), lse), SAVED_ATTENTION_OUT)
    return o, (Saved(q, k, v, o, lse), inputs)


def _by_window(run: Any, inputs: AttentionInputs, spec: AttentionSpec) -> Any:
    """`run(.., inputs=, spec=)` with the scores of this layer, which has a window or has none.

    Hops are outside of it: devices of other stages may run a layer of the other kind.
    """
    plain = inputs._replace(windowed=None)

    def either(*arguments: Any) -> Any:
        def of_layer(scores: Scores) -> Any:
            return run(*arguments, inputs=plain, spec=spec._replace(scores=scores))

        return by_window(inputs.windowed, spec.scores, of_layer)

    return either


def _local(
    q: Array, k: Array, v: Array, *, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, Array]:
    """Attends to the local block; returns (o, lse)."""
    coordinates = _local_coordinates(q, k, inputs, spec)
    if spec.has_gap:
        o = jnp.zeros_like(q, jnp.promote_types(q.dtype, jnp.float32))
        merge_tile = partial(
            _merge_tile, q=q, kv=jnp.stack((k, v)), coordinates=coordinates, spec=spec
        )
        lengths = Lengths(q.shape[1], k.shape[1])
        return visit_local_chunks(merge_tile, (o, o[..., 0] - jnp.inf), lengths, spec)
    o, lse = spec.kernel.fwd(q, k, v, coordinates, scores=spec.scores)
    return o.astype(lse.dtype), lse


def _local_coordinates(
    q: Array, k: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> ScoreCoordinates:
    lengths = Lengths(q.shape[1], k.shape[1])
    return spec.ring.coordinates(inputs, lengths, lax.axis_index(spec.ring.axis))


def _visit(
    total: Any, kv: Array, source: Array, *, q: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Any:
    """Merges attention to the block of device `source` into `total`, (o, lse)."""
    lengths = Lengths(q.shape[1], kv.shape[2])
    coordinates = spec.ring.coordinates(inputs, lengths, source)
    merge_tile = partial(_merge_tile, q=q, kv=kv, coordinates=coordinates, spec=spec)
    return visit_tiles(merge_tile, total, source, lengths, spec)


def _merge_tile(
    total: Any,
    tile: ScoreTile,
    scores: Scores,
    *,
    q: Array,
    kv: Array,
    coordinates: ScoreCoordinates,
    spec: AttentionSpec,
) -> Any:
    qs, (ks, vs) = tile.queries(q), tile.keys(kv)
    part = spec.kernel.fwd(qs, ks, vs, tile.coordinates(coordinates), scores=scores)
    return merge_at(total, part, tile.query, dim=1)


# ---- backward -------------------------------------------------------------------------------


class _Sums(NamedTuple):
    """Gradients that stay on the device while keys and values travel; bias: None without one."""

    q: Array
    bias: Array | None


def _backward(
    spec: AttentionSpec, residuals: tuple[Saved, AttentionInputs], do: Array
) -> tuple[Array, Array, Array, AttentionInputs]:
    ring, (saved, inputs) = spec.ring, residuals
    saved = pin_to_backward(saved)
    # Scores wait for do, or XLA would compute them in forward; keys and values may travel earlier.
    q, do = lax.optimization_barrier((saved.q, do))
    saved = saved._replace(q=q)
    sums = _Sums(*_zeros((saved.q, inputs.bias_NR), saved))
    visit = _by_window(partial(_visit_back, saved=saved, do=do), inputs, spec)
    kv = jnp.stack((saved.k, saved.v))
    hops = hops_for(ring, saved.k.shape[1], inputs.furthest(spec.scores))
    sums, dkv = travel_back(kv, ring, sums, visit, hops=hops)
    # The local block comes last, during the last hop: otherwise its gradients would occupy memory
    # throughout.
    saved, do, sums = lax.optimization_barrier((saved, do, sums))
    local_sums, local_dkv = _by_window(_local_back, inputs, spec)(saved, do)
    sums = jax.tree.map(jnp.add, sums, local_sums)
    dk, dv = local_dkv + dkv
    primals, gradients = (saved.q, saved.k, saved.v, inputs.bias_NR), (sums.q, dk, dv, sums.bias)
    dq, dk, dv, bias = jax.tree.map(lambda x, dx: dx.astype(x.dtype), primals, gradients)
    sink = None if inputs.sink_N is None else sink_gradient(saved, do, inputs.sink_N)
    return dq, dk, dv, AttentionInputs(bias_NR=bias, sink_N=sink)


def _zeros(like: Any, saved: Saved) -> Any:
    """Zeros of these shapes, in the precision of gradient sums."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, saved.lse.dtype), like)


def _local_back(
    saved: Saved, do: Array, *, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[_Sums, Array]:
    """Gradients from attention to the local block: sums, d(kv)."""
    coordinates = _local_coordinates(saved.q, saved.k, inputs, spec)
    if spec.has_gap:
        kv = jnp.stack((saved.k, saved.v))
        zeros = _zeros((_Sums(saved.q, coordinates.bias_NR), kv), saved)
        add_tile = partial(_add_tile, saved=saved, do=do, kv=kv, coordinates=coordinates, spec=spec)
        return visit_local_chunks(add_tile, zeros, Lengths(do.shape[1], kv.shape[2]), spec)
    gradients = spec.kernel.bwd(saved, do, coordinates, scores=spec.scores)
    return _Sums(gradients.q, gradients.bias), jnp.stack((gradients.k, gradients.v))


def _visit_back(
    sums: _Sums,
    kv: Array,
    source: Array,
    *,
    saved: Saved,
    do: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
) -> tuple[_Sums, Array]:
    """Adds gradients from attention to the block of `source` to the sums; returns its d(kv)."""
    lengths = Lengths(saved.q.shape[1], kv.shape[2])
    coordinates = spec.ring.coordinates(inputs, lengths, source)
    add_tile = partial(_add_tile, saved=saved, do=do, kv=kv, coordinates=coordinates, spec=spec)
    return visit_tiles(add_tile, (sums, _zeros(kv, saved)), source, lengths, spec)


def _add_tile(
    total: tuple[_Sums, Array],
    tile: ScoreTile,
    scores: Scores,
    *,
    saved: Saved,
    do: Array,
    kv: Array,
    coordinates: ScoreCoordinates,
    spec: AttentionSpec,
) -> tuple[_Sums, Array]:
    sums, dkv = total
    qs, os, lses, dos = (tile.queries(x) for x in (saved.q, saved.o, saved.lse, do))
    ks, vs = tile.keys(kv)
    of_tile = Saved(qs, ks, vs, os, lses)
    gradients = spec.kernel.bwd(of_tile, dos, tile.coordinates(coordinates), scores=scores)
    for number, x in enumerate((gradients.k, gradients.v)):
        dkv = add_at(dkv, x[None], (number, 0, tile.key, 0, 0))
    bias = add_gradients(sums.bias, gradients.bias)
    return _Sums(add_at(sums.q, gradients.q, (0, tile.query, 0, 0)), bias), dkv


_blockwise.defvjp(_forward, _backward)
