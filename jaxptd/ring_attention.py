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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import CORE, Kernel, Saved, Sites, add_at, merge_at
from jaxptd.attention.ring import Ring, Tokens, pin_to_backward, travel, travel_back
from jaxptd.attention.rsa import attend_rsa
from jaxptd.collectives import alike


def attend(
    q: Array, k: Array, v: Array, tokens: Tokens, *, ring: Ring, kernel: Kernel, causal: bool
) -> Array:
    """Attention of this device's queries with every device's keys: -> o[B, T, N, H].

    Args:
        q: local queries, `[B, T, N, H]`.
        k: local keys, `[B, T, K, H]`; K divides N, see `attention/kernel.py`.
        v: local values, shaped as the keys.
        tokens: their documents, and dropout seeds.
        ring: the devices that share the sequence; possibly a single one.
        kernel: attention of a block. RSA computes scores itself and uses the kernel's dropout only.
        causal: whether a token attends to itself and earlier tokens only; else to all.
    """
    q, k, v, *_ = alike(q, k, v, lax.axis_index(ring.axis), *jax.tree.leaves(tokens))
    if ring.kind == "rsa" and lax.axis_size(ring.axis) > 1:
        return attend_rsa(q, k, v, ring.all_sites(tokens, q.shape[1]), ring, kernel.dropout, causal)
    return _blockwise(q, k, v, tokens, _Static(ring, kernel, causal))


class _Static(NamedTuple):
    """The arguments of `attend` that are not arrays."""

    ring: Ring
    kernel: Kernel
    causal: bool


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(q: Array, k: Array, v: Array, tokens: Tokens, static: _Static) -> Array:
    return _forward(q, k, v, tokens, static)[0]


# ---- forward --------------------------------------------------------------------------------


def _forward(
    q: Array, k: Array, v: Array, tokens: Tokens, static: _Static
) -> tuple[Array, tuple[Saved, Tokens]]:
    ring, kernel, causal = static
    local = ring.sites(tokens, q.shape[1], lax.axis_index(ring.axis))
    o, lse = kernel.fwd(q, k, v, local, causal=causal)
    visit = partial(_visit, q=q, tokens=tokens, static=static)
    o, lse = travel(jnp.stack((k, v)), ring, (o.astype(lse.dtype), lse), visit)
    o, lse = checkpoint_name((o.astype(q.dtype), lse), CORE)
    return o, (Saved(q, k, v, o, lse), tokens)


def _visit(
    total: Any, kv: Array, source: Array, *, q: Array, tokens: Tokens, static: _Static
) -> Any:
    """Merges attention to the block of device `source` into `total`, (o, lse)."""
    sites = static.ring.sites(tokens, q.shape[1], source)
    merge_tile = partial(_merge_tile, q=q, kv=kv, sites=sites, kernel=static.kernel)
    return _over_tiles(merge_tile, total, source, q.shape[1], static)


def _merge_tile(
    total: Any, tile: "_Tile", *, q: Array, kv: Array, sites: Sites, kernel: Kernel
) -> Any:
    qs, (ks, vs) = tile.queries(q), tile.keys(kv)
    found = kernel.fwd(qs, ks, vs, tile.sites(sites), causal=False)
    return merge_at(total, found, tile.query, dim=1)


# ---- backward -------------------------------------------------------------------------------


def _backward(
    static: _Static, residuals: tuple[Saved, Tokens], do: Array
) -> tuple[Array, Array, Array, None]:
    (ring, kernel, causal), (saved, tokens) = static, residuals
    saved = pin_to_backward(saved)
    length, wide = saved.q.shape[1], saved.lse.dtype
    dq = jnp.zeros_like(saved.q, wide)
    visit = partial(_visit_back, saved=saved, do=do, tokens=tokens, static=static)
    dq, dkv = travel_back(jnp.stack((saved.k, saved.v)), ring, dq, visit)
    if lax.axis_size(ring.axis) > 1:
        # The local block is last, during the last hop: earlier, its gradients would take up memory
        # all along.
        saved, do, dq = lax.optimization_barrier((saved, do, dq))
    local = ring.sites(tokens, length, lax.axis_index(ring.axis))
    local_dq, *local_dkv = kernel.bwd(saved, do, local, causal=causal)
    dq += local_dq
    dk, dv = jnp.stack(local_dkv) + dkv
    return dq.astype(saved.q.dtype), dk.astype(saved.k.dtype), dv.astype(saved.v.dtype), None


def _visit_back(
    dq: Array,
    kv: Array,
    source: Array,
    *,
    saved: Saved,
    do: Array,
    tokens: Tokens,
    static: _Static,
) -> tuple[Array, Array]:
    """Adds to dq, and returns d(kv), the gradients by attention to the block of `source`."""
    length = saved.q.shape[1]
    sites = static.ring.sites(tokens, length, source)
    add_tile = partial(_add_tile, saved=saved, do=do, kv=kv, sites=sites, kernel=static.kernel)
    dkv = jnp.zeros_like(kv, saved.lse.dtype)
    return _over_tiles(add_tile, (dq, dkv), source, length, static)


def _add_tile(
    total: tuple[Array, Array],
    tile: "_Tile",
    *,
    saved: Saved,
    do: Array,
    kv: Array,
    sites: Sites,
    kernel: Kernel,
) -> tuple[Array, Array]:
    dq, dkv = total
    qs, os, lses, dos = (tile.queries(x) for x in (saved.q, saved.o, saved.lse, do))
    ks, vs = tile.keys(kv)
    of_tile = Saved(qs, ks, vs, os, lses)
    tile_dq, *tile_dkv = kernel.bwd(of_tile, dos, tile.sites(sites), causal=False)
    for number, x in enumerate(tile_dkv):
        dkv = add_at(dkv, x[None], (number, 0, tile.key, 0, 0))
    return add_at(dq, tile_dq, (0, tile.query, 0, 0)), dkv


_blockwise.defvjp(_forward, _backward)


# ---- which scores of a visited block are visible ----------------------------------------------


class _Tile(NamedTuple):
    """A square of scores, all visible: its first query, its first key and its side."""

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


def _over_tiles(
    visit: Callable[[Any, _Tile], Any], total: Any, source: Array, length: int, static: _Static
) -> Any:
    """`total` after `visit(total, tile)` for each visible tile of scores with `source`.

    Tiles are so small that the kernel does not split them further.
    """
    query_K, key_K, size = _visible_squares(source, length, static)
    side = static.kernel.tile(size)
    row_I, column_I = side * np.indices((size // side, size // side), np.int32).reshape(2, -1)
    starts = (query_K[:, None] + row_I).ravel(), (key_K[:, None] + column_I).ravel()

    def step(total: Any, start: tuple[Array, Array]) -> tuple[Any, None]:
        return visit(total, _Tile(*start, side)), None

    def visit_all(total: Any) -> Any:
        return lax.scan(step, total, starts)[0]

    if not static.causal or static.ring.kind == "zigzag":
        return visit_all(total)
    me = lax.axis_index(static.ring.axis)
    return lax.cond(source < me, visit_all, lambda total: total, total)


def _visible_squares(source: Array, length: int, static: _Static) -> tuple[Array, Array, int]:
    """First queries, first keys and side of the visible squares of scores with another device."""
    if not static.causal or static.ring.kind != "zigzag":
        zero = jnp.zeros(1, jnp.int32)
        return zero, zero, length
    # The first chunk of `source` is before this device's second chunk. If `source` is a later
    # device, its second chunk is, too; else its first chunk is before this device's first one.
    half = length // 2
    same = jnp.where(source > lax.axis_index(static.ring.axis), half, 0)
    query_2 = jnp.stack([jnp.full_like(same, half), same])
    return query_2, jnp.stack([jnp.zeros_like(same), same]), half
