"""Attention over a sequence that is sharded over the devices of a ring, see `attention/ring.py`.

Keys and values travel, both in one permute, while each device attends from its queries to the block
that it has (blockwise; contiguous or zigzag). Online softmax merges the results, so no score matrix
is larger than a block. One pass over a ring of 4 devices, as device i sees it:

    forward    compute   local   i-1     i-2     i-3            blocks of keys and values
               receive   i-1     i-2     i-3

    backward   compute           i-1     i-2     i-3     local
               receive   i-1     i-2     i-3
               receive                   d(i-2)  d(i-3)  d(i)   float32 gradients of blocks so far

Columns are steps; a receive overlaps with the compute above it. Saved for backward are q, k, v, the
output, and the logsumexp of entire rows: with them backward computes any block's scores again.
In RSA, the ring as first published, each device makes all its scores at once: `attention/rsa.py`.

Letters: B batch, T local query, S local key, N heads, H head size.
Source: Liu et al., arXiv 2310.01889.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import CORE, Kernel, Saved, Scores, Sites, add_at, merge_at
from jaxptd.attention.ring import Ring, Tokens, pin_to_backward, travel, travel_back
from jaxptd.attention.rsa import attend_rsa
from jaxptd.attention.tiles import Task, Tile, over_local_chunks, over_tiles
from jaxptd.collectives import alike


def attend(
    q: Array, k: Array, v: Array, tokens: Tokens, *, ring: Ring, kernel: Kernel, scores: Scores
) -> Array:
    """Attention of this device's queries with every device's keys: -> o[B, T, N, H].

    Args:
        q: local queries, `[B, T, N, H]`.
        k: local keys, `[B, T, K, H]`; K divides N, see `attention/kernel.py`.
        v: local values, shaped as the keys.
        tokens: their documents, and dropout seeds.
        ring: the devices that share the sequence; possibly a single one.
        kernel: attention of a block. RSA computes scores itself and uses the kernel's dropout only.
        scores: their factor, and which keys a query sees.
    """
    q, k, v, *_ = alike(q, k, v, lax.axis_index(ring.axis), *jax.tree.leaves(tokens))
    if ring.kind == "rsa" and lax.axis_size(ring.axis) > 1:
        sites = ring.all_sites(tokens, q.shape[1])
        return attend_rsa(q, k, v, sites, ring=ring, dropout=kernel.dropout, scores=scores)
    return _blockwise(q, k, v, tokens, Task(ring, kernel, scores))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(q: Array, k: Array, v: Array, tokens: Tokens, task: Task) -> Array:
    return _forward(q, k, v, tokens, task)[0]


# ---- forward --------------------------------------------------------------------------------


def _forward(
    q: Array, k: Array, v: Array, tokens: Tokens, task: Task
) -> tuple[Array, tuple[Saved, Tokens]]:
    ring = task.ring
    total = _local(q, k, v, ring.sites(tokens, q.shape[1], lax.axis_index(ring.axis)), task)
    visit = partial(_visit, q=q, tokens=tokens, task=task)
    o, lse = travel(jnp.stack((k, v)), ring, total, visit, hops=task.hops(q.shape[1]))
    o, lse = checkpoint_name((o.astype(q.dtype), lse), CORE)
    return o, (Saved(q, k, v, o, lse), tokens)


def _local(q: Array, k: Array, v: Array, sites: Sites, task: Task) -> tuple[Array, Array]:
    """Attention to the local block: (o, lse)."""
    if task.has_gap:
        o = jnp.zeros_like(q, jnp.promote_types(q.dtype, jnp.float32))
        merge_tile = partial(_merge_tile, q=q, kv=jnp.stack((k, v)), sites=sites, task=task)
        return over_local_chunks(merge_tile, (o, o[..., 0] - jnp.inf), q.shape[1], task)
    o, lse = task.kernel.fwd(q, k, v, sites, scores=task.scores)
    return o.astype(lse.dtype), lse


def _visit(total: Any, kv: Array, source: Array, *, q: Array, tokens: Tokens, task: Task) -> Any:
    """Merges attention to the block of device `source` into `total`, (o, lse)."""
    sites = task.ring.sites(tokens, q.shape[1], source)
    merge_tile = partial(_merge_tile, q=q, kv=kv, sites=sites, task=task)
    return over_tiles(merge_tile, total, source, q.shape[1], task)


def _merge_tile(
    total: Any, tile: Tile, scores: Scores, *, q: Array, kv: Array, sites: Sites, task: Task
) -> Any:
    qs, (ks, vs) = tile.queries(q), tile.keys(kv)
    found = task.kernel.fwd(qs, ks, vs, tile.sites(sites), scores=scores)
    return merge_at(total, found, tile.query, dim=1)


# ---- backward -------------------------------------------------------------------------------


def _backward(
    task: Task, residuals: tuple[Saved, Tokens], do: Array
) -> tuple[Array, Array, Array, None]:
    ring, (saved, tokens) = task.ring, residuals
    saved = pin_to_backward(saved)
    length, wide = saved.q.shape[1], saved.lse.dtype
    dq = jnp.zeros_like(saved.q, wide)
    visit = partial(_visit_back, saved=saved, do=do, tokens=tokens, task=task)
    kv = jnp.stack((saved.k, saved.v))
    dq, dkv = travel_back(kv, ring, dq, visit, hops=task.hops(length))
    if lax.axis_size(ring.axis) > 1:
        # The local block is last, during the last hop: earlier, its gradients would take up memory
        # all along.
        saved, do, dq = lax.optimization_barrier((saved, do, dq))
    local = ring.sites(tokens, length, lax.axis_index(ring.axis))
    local_dq, local_dkv = _local_back(saved, do, local, task)
    dq += local_dq
    dk, dv = local_dkv + dkv
    return dq.astype(saved.q.dtype), dk.astype(saved.k.dtype), dv.astype(saved.v.dtype), None


def _local_back(saved: Saved, do: Array, sites: Sites, task: Task) -> tuple[Array, Array]:
    """Gradients by attention to the local block: dq, d(kv)."""
    if task.has_gap:
        kv = jnp.stack((saved.k, saved.v))
        zeros = tuple(jnp.zeros_like(x, saved.lse.dtype) for x in (saved.q, kv))
        add_tile = partial(_add_tile, saved=saved, do=do, kv=kv, sites=sites, task=task)
        return over_local_chunks(add_tile, zeros, do.shape[1], task)
    dq, *dkv = task.kernel.bwd(saved, do, sites, scores=task.scores)
    return dq, jnp.stack(dkv)


def _visit_back(
    dq: Array,
    kv: Array,
    source: Array,
    *,
    saved: Saved,
    do: Array,
    tokens: Tokens,
    task: Task,
) -> tuple[Array, Array]:
    """Adds to dq, and returns d(kv), the gradients by attention to the block of `source`."""
    length = saved.q.shape[1]
    sites = task.ring.sites(tokens, length, source)
    add_tile = partial(_add_tile, saved=saved, do=do, kv=kv, sites=sites, task=task)
    dkv = jnp.zeros_like(kv, saved.lse.dtype)
    return over_tiles(add_tile, (dq, dkv), source, length, task)


def _add_tile(
    total: tuple[Array, Array],
    tile: Tile,
    scores: Scores,
    *,
    saved: Saved,
    do: Array,
    kv: Array,
    sites: Sites,
    task: Task,
) -> tuple[Array, Array]:
    dq, dkv = total
    qs, os, lses, dos = (tile.queries(x) for x in (saved.q, saved.o, saved.lse, do))
    ks, vs = tile.keys(kv)
    of_tile = Saved(qs, ks, vs, os, lses)
    tile_dq, *tile_dkv = task.kernel.bwd(of_tile, dos, tile.sites(sites), scores=scores)
    for number, x in enumerate(tile_dkv):
        dkv = add_at(dkv, x[None], (number, 0, tile.key, 0, 0))
    return add_at(dq, tile_dq, (0, tile.query, 0, 0)), dkv


_blockwise.defvjp(_forward, _backward)
