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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.attention.attend import AttentionInputs, AttentionSpec, Ring, attend, recomputing
from jaxptd.attention.kernel import Gradients, Kernel, Lengths, Saved, ScoreCoordinates, Scores
from jaxptd.attention.ring import (
    Sums,
    add_tile,
    blind_rows,
    hops_for,
    merge_tile,
    of_layer,
    travel,
    travel_back,
    visit_local_chunks,
    visit_tiles,
    zero_sums,
)
from jaxptd.attention.rsa import ring_av, ring_qk

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


# ---- forward --------------------------------------------------------------------------------


def _forward(
    q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, Array]:
    total = of_layer(_local, inputs, spec)(q, k, v)
    visit = of_layer(partial(_visit, q=q), inputs, spec)
    hops = hops_for(spec.ring, k.shape[1], inputs.furthest(spec.scores))
    rows: tuple[Array, Array] = travel(jnp.stack((k, v)), spec.ring, total, visit, hops=hops)
    return rows


def _local(
    q: Array, k: Array, v: Array, *, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, Array]:
    """Attends to the local block; returns (o, lse)."""
    coordinates = _local_coordinates(q, k, inputs, spec)
    if spec.has_gap:
        kv = jnp.stack((k, v))
        merge = partial(merge_tile, q=q, kv=kv, coordinates=coordinates, spec=spec)
        lengths = Lengths(q.shape[1], k.shape[1])
        return visit_local_chunks(merge, blind_rows(q), lengths, spec)
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
    merge = partial(merge_tile, q=q, kv=kv, coordinates=coordinates, spec=spec)
    return visit_tiles(merge, total, source, lengths, spec)


# ---- backward -------------------------------------------------------------------------------


def _backward(saved: Saved, do: Array, inputs: AttentionInputs, spec: AttentionSpec) -> Gradients:
    sums = Sums(*zero_sums((saved.q, inputs.bias_NR), saved))
    visit = of_layer(partial(_visit_back, saved=saved, do=do), inputs, spec)
    kv = jnp.stack((saved.k, saved.v))
    hops = hops_for(spec.ring, saved.k.shape[1], inputs.furthest(spec.scores))
    sums, dkv = travel_back(kv, spec.ring, sums, visit, hops=hops)
    # The local block comes last, during the last hop: otherwise its gradients would occupy memory
    # throughout.
    saved, do, sums = lax.optimization_barrier((saved, do, sums))
    local_sums, local_dkv = of_layer(_local_back, inputs, spec)(saved, do)
    sums = jax.tree.map(jnp.add, sums, local_sums)
    dk, dv = local_dkv + dkv
    return Gradients(sums.q, dk, dv, sums.bias)


def _local_back(
    saved: Saved, do: Array, *, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Sums, Array]:
    """Gradients from attention to the local block: sums, d(kv)."""
    coordinates = _local_coordinates(saved.q, saved.k, inputs, spec)
    if spec.has_gap:
        kv = jnp.stack((saved.k, saved.v))
        total = zero_sums((Sums(saved.q, coordinates.bias_NR), kv), saved)
        add = partial(add_tile, saved=saved, do=do, kv=kv, coordinates=coordinates, spec=spec)
        return visit_local_chunks(add, total, Lengths(do.shape[1], kv.shape[2]), spec)
    gradients = spec.kernel.bwd(saved, do, coordinates, scores=spec.scores)
    return Sums(gradients.q, gradients.bias), jnp.stack((gradients.k, gradients.v))


def _visit_back(
    sums: Sums,
    kv: Array,
    source: Array,
    *,
    saved: Saved,
    do: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
) -> tuple[Sums, Array]:
    """Adds gradients from attention to the block of `source` to the sums; returns its d(kv)."""
    lengths = Lengths(saved.q.shape[1], kv.shape[2])
    coordinates = spec.ring.coordinates(inputs, lengths, source)
    add = partial(add_tile, saved=saved, do=do, kv=kv, coordinates=coordinates, spec=spec)
    return visit_tiles(add, (sums, zero_sums(kv, saved)), source, lengths, spec)


attend_blocks = recomputing(_forward, _backward)
