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

from jaxptd.attention.attend import (
    AttentionInputs,
    AttentionSpec,
    Expansion,
    Ring,
    attend,
    recomputing,
)
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
    x = inputs.expansion.join(k, v)
    rows: tuple[Array, Array] = travel(x, spec.ring, total, visit, hops=hops)
    return rows


def _local(
    q: Array, k: Array, v: Array, *, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, Array]:
    """Attends to the local block; returns (o, lse)."""
    k, v = inputs.expansion.expand(k, v)
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
    total: Any, x: Array, source: Array, *, q: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Any:
    """Merges attention to the block x of device `source` into `total`, (o, lse)."""
    kv = inputs.expansion.heads(x)
    lengths = Lengths(q.shape[1], kv.shape[2])
    coordinates = spec.ring.coordinates(inputs, lengths, source)
    merge = partial(merge_tile, q=q, kv=kv, coordinates=coordinates, spec=spec)
    return visit_tiles(merge, total, source, lengths, spec)


# ---- backward -------------------------------------------------------------------------------


def _backward(
    saved: Saved, do: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Gradients, Expansion]:
    expansion = inputs.expansion
    sums = zero_sums(Sums(saved.q, inputs.bias_NR, expansion), saved)
    visit = of_layer(partial(_visit_back, saved=saved, do=do), inputs, spec)
    x = expansion.join(saved.k, saved.v)
    hops = hops_for(spec.ring, saved.k.shape[1], inputs.furthest(spec.scores))
    sums, dx = travel_back(x, spec.ring, sums, visit, hops=hops)
    # The local block comes last, during the last hop: otherwise its gradients would occupy memory
    # throughout.
    saved, do, sums = lax.optimization_barrier((saved, do, sums))
    local_sums, local_dx = of_layer(_local_back, inputs, spec)(saved, do)
    sums = jax.tree.map(jnp.add, sums, local_sums)
    dk, dv = expansion.split(local_dx + dx)
    return Gradients(sums.q, dk, dv, sums.bias), sums.expansion


def _local_back(
    saved: Saved, do: Array, *, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Sums, Array]:
    """Gradients from attention to the local block: sums, and of what moves."""
    expansion = inputs.expansion
    coordinates = _local_coordinates(saved.q, saved.k, inputs, spec)
    k, v = expansion.expand(saved.k, saved.v)
    if spec.has_gap:
        kv = jnp.stack((k, v))
        total = zero_sums((Sums(saved.q, coordinates.bias_NR), kv), saved)
        add = partial(add_tile, saved=saved, do=do, kv=kv, coordinates=coordinates, spec=spec)
        sums, dkv = visit_local_chunks(add, total, Lengths(do.shape[1], kv.shape[2]), spec)
    else:
        gradients = spec.kernel.bwd(saved._replace(k=k, v=v), do, coordinates, scores=spec.scores)
        sums, dkv = Sums(gradients.q, gradients.bias), jnp.stack((gradients.k, gradients.v))
    dx, of_expansion = expansion.gradients(expansion.join(saved.k, saved.v), dkv)
    return sums._replace(expansion=of_expansion), dx


def _visit_back(
    sums: Sums,
    x: Array,
    source: Array,
    *,
    saved: Saved,
    do: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
) -> tuple[Sums, Array]:
    """Adds gradients from attention to the block x of `source` to the sums; returns that of x."""
    kv = inputs.expansion.heads(x)
    lengths = Lengths(saved.q.shape[1], kv.shape[2])
    coordinates = spec.ring.coordinates(inputs, lengths, source)
    add = partial(add_tile, saved=saved, do=do, kv=kv, coordinates=coordinates, spec=spec)
    sums, dkv = visit_tiles(add, (sums, zero_sums(kv, saved)), source, lengths, spec)
    dx, of_expansion = inputs.expansion.gradients(x, dkv)
    return sums.with_expansion(of_expansion), dx


attend_blocks = recomputing(_forward, _backward)
