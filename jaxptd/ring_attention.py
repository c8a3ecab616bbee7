"""Attention of a sequence that is cut over the devices of a ring: `ring.py`.

Blockwise, contiguous or zigzag: keys and values travel, both in one permute, while each device
joins what its queries find in them (online softmax); no score matrix is larger than a block. What
is kept for backward is the output and the logsumexp of whole rows; backward is a ring of its own,
in which keys and values travel again and the float32 sums of their gradients travel with them.

RSA is the published form: all scores of a device's queries in rows `[T, C * S]`, by one ring of
keys (`ring_qk`) and one of values (`ring_av`). Their gradients travel, too: nothing is all-reduced.

Letters: B batch, T own query, S own key, N heads, H head size, C devices of the ring.
Source: Liu et al., arXiv 2310.01889 (blockwise); Li et al., arXiv 2105.13120 (RSA).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import (
    CORE,
    KEPT,
    Dropout,
    Kernel,
    Saved,
    Sites,
    add_at,
    drop,
    merge_at,
    visible,
)
from jaxptd.attention.ring import Ring, Tokens, travel, travel_back
from jaxptd.collectives import alike


def attend(
    q: Array, k: Array, v: Array, tokens: Tokens, *, ring: Ring, kernel: Kernel, causal: bool
) -> Array:
    """Attention of this device's queries with every device's keys: -> o[B, T, N, H].

    Args:
        q: this device's part, `[B, T, N, H]`; so are k and v.
        k: keys.
        v: values.
        tokens: their documents, and the seed of dropout.
        ring: the devices that hold the sequence; one device is a ring, too.
        kernel: for the blocks. RSA makes its own scores and takes the kernel's dropout only.
        causal: a token sees itself and those before it; else it sees all.
    """
    q, k, v, *_ = alike(q, k, v, lax.axis_index(ring.axis), *jax.tree.leaves(tokens))
    if ring.kind == "rsa" and lax.axis_size(ring.axis) > 1:
        return _rsa(q, k, v, ring.all_sites(tokens, q.shape[1]), ring, kernel.dropout, causal)
    return _blockwise(q, k, v, tokens, _Task(ring, kernel, causal))


# ---- blockwise ------------------------------------------------------------------------------


class _Task(NamedTuple):
    """Everything about an attention that is known before it runs."""

    ring: Ring
    kernel: Kernel
    causal: bool


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(q: Array, k: Array, v: Array, tokens: Tokens, task: _Task) -> Array:
    return _blockwise_fwd(q, k, v, tokens, task)[0]


def _blockwise_fwd(
    q: Array, k: Array, v: Array, tokens: Tokens, task: _Task
) -> tuple[Array, tuple[Saved, Tokens]]:
    me = lax.axis_index(task.ring.axis)
    own = task.ring.sites(tokens, q.shape[1], me)
    o, lse = task.kernel.fwd(q, k, v, own, causal=task.causal)

    def visit(total: Any, kv: Array, source: Array) -> Any:
        sites = task.ring.sites(tokens, q.shape[1], source)

        def look(total: Any, block: _Block) -> Any:
            qs, (ks, vs) = block.queries(q), block.keys(kv)
            part = task.kernel.fwd(qs, ks, vs, block.sites(sites), causal=False)
            return merge_at(total, part, block.query, dim=1)

        return _look(task, source, q.shape[1], total, look)

    total = (o.astype(lse.dtype), lse)
    o, lse = travel(jnp.stack((k, v)), task.ring, total, visit)
    o, lse = checkpoint_name((o.astype(q.dtype), lse), CORE)
    return o, (Saved(q, k, v, o, lse), tokens)


def _blockwise_bwd(
    task: _Task, residuals: tuple[Saved, Tokens], do: Array
) -> tuple[Array, Array, Array, None]:
    saved, tokens = residuals
    saved = _pin_order(saved)
    length, wide = saved.q.shape[1], saved.lse.dtype
    dq = jnp.zeros_like(saved.q, wide)

    def visit(dq: Array, kv: Array, source: Array) -> tuple[Array, Array]:
        sites = task.ring.sites(tokens, length, source)

        def look(total: tuple[Array, Array], block: _Block) -> tuple[Array, Array]:
            dq, dkv = total
            qs, os, lses, dos = (block.queries(x) for x in (saved.q, saved.o, saved.lse, do))
            ks, vs = block.keys(kv)
            seen = Saved(qs, ks, vs, os, lses)
            part, *parts = task.kernel.bwd(seen, dos, block.sites(sites), causal=False)
            for number, part_kv in enumerate(parts):
                dkv = add_at(dkv, part_kv[None], (number, 0, block.key, 0, 0))
            return add_at(dq, part, (0, block.query, 0, 0)), dkv

        none = jnp.zeros_like(kv, wide)
        return _look(task, source, length, (dq, none), look)

    dq, others = travel_back(jnp.stack((saved.k, saved.v)), task.ring, dq, visit)
    if lax.axis_size(task.ring.axis) > 1:
        # The own block comes last, over the last hop; else its gradients would lie there all along.
        saved, do, dq = lax.optimization_barrier((saved, do, dq))
    own = task.ring.sites(tokens, length, lax.axis_index(task.ring.axis))
    part, *parts = task.kernel.bwd(saved, do, own, causal=task.causal)
    dq += part
    dk, dv = jnp.stack(parts) + others
    return dq.astype(saved.q.dtype), dk.astype(saved.k.dtype), dv.astype(saved.v.dtype), None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


class _Block(NamedTuple):
    """A block of scores that is seen whole: where its queries and keys begin, and how many."""

    query: Array | int
    key: Array | int
    size: int

    def queries(self, x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, self.query, self.size, 1)

    def keys(self, kv: Array) -> Array:
        return lax.dynamic_slice_in_dim(kv, self.key, self.size, 2)

    def sites(self, sites: Sites) -> Sites:
        cut = partial(lax.dynamic_slice_in_dim, slice_size=self.size)
        return sites.each(
            lambda x, dim: cut(x, self.query, axis=dim), lambda x, dim: cut(x, self.key, axis=dim)
        )


def _look(
    task: _Task, source: Array, length: int, total: Any, look: Callable[[Any, _Block], Any]
) -> Any:
    """`look(total, block)` at every block that this device's queries see of `source`, another.

    One after the other, in a loop, in blocks that the kernel does not cut further.
    """
    query_K, key_K, size = _squares(task, source, length)
    side = task.kernel.tile(size)
    row_I, column_I = side * np.indices((size // side, size // side), np.int32).reshape(2, -1)
    starts = (query_K[:, None] + row_I).ravel(), (key_K[:, None] + column_I).ravel()

    def step(total: Any, start: tuple[Array, Array]) -> tuple[Any, None]:
        return look(total, _Block(*start, side)), None

    def look_at_all(total: Any) -> Any:
        return lax.scan(step, total, starts)[0]

    if not task.causal or task.ring.kind == "zigzag":
        return look_at_all(total)
    me = lax.axis_index(task.ring.axis)
    return lax.cond(source < me, look_at_all, lambda total: total, total)


def _squares(task: _Task, source: Array, length: int) -> tuple[Array, Array, int]:
    """First queries and first keys of the squares of scores that are seen, and their side."""
    if not task.causal or task.ring.kind != "zigzag":
        zero = jnp.zeros(1, jnp.int32)
        return zero, zero, length
    # The first chunk of `source` lies before our second one. If it comes after us, its second chunk
    # does too; else its first chunk lies before our first one.
    half = length // 2
    same = jnp.where(source > lax.axis_index(task.ring.axis), half, 0)
    query_2 = jnp.stack([jnp.full_like(same, half), same])
    return query_2, jnp.stack([jnp.zeros_like(same), same]), half


def _pin_order(saved: Any) -> Any:
    """What is kept for backward, none of it before all of it is there.

    Else XLA would make backward's first hop in forward, or find that forward made it too, and keep
    what came of it until backward.
    """
    return lax.optimization_barrier(saved)


# ---- RSA ------------------------------------------------------------------------------------


def _rsa(
    q: Array, k: Array, v: Array, sites: Sites, ring: Ring, dropout: Dropout, causal: bool
) -> Array:
    s_BNTS, seen = ring_qk(q, k, ring), visible(sites, causal=causal)
    lowest = jnp.finfo(s_BNTS.dtype).min  # not infinity: a row may see nothing
    p_BNTS = jax.nn.softmax(jnp.where(seen, s_BNTS, lowest))
    drop_again = jax.checkpoint(partial(drop, dropout=dropout))  # keeps no mask
    o_BTNH = ring_av(drop_again(p_BNTS, sites).astype(v.dtype), v, ring)
    seen_BTN = jnp.broadcast_to(seen, s_BNTS.shape).any(-1).swapaxes(1, 2)
    return checkpoint_name(jnp.where(seen_BTN[..., None], o_BTNH, 0), KEPT)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def ring_qk(q_BTNH: Array, k_BSNH: Array, ring: Ring) -> Array:
    """RingQK: own queries, own keys -> scaled scores `[B, N, T, C * S]`, float32 at least."""
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    scale = q_BTNH.shape[-1] ** -0.5

    def visit(s: Array, k: Array, source: Array) -> Array:
        part = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k, preferred_element_type=wide) * scale
        return lax.dynamic_update_slice_in_dim(s, part, source * k.shape[1], 3)

    batch, length, heads, _ = q_BTNH.shape
    shape = (batch, heads, length, k_BSNH.shape[1] * lax.axis_size(ring.axis))
    s, _ = alike(jnp.zeros(shape, wide), q_BTNH)
    return travel(k_BSNH, ring, visit(s, k_BSNH, lax.axis_index(ring.axis)), visit)


def _qk_fwd(q: Array, k: Array, ring: Ring) -> tuple[Array, tuple[Array, Array]]:
    return ring_qk(q, k, ring), (q, k)


def _qk_bwd(ring: Ring, saved: tuple[Array, Array], ds_BNTS: Array) -> tuple[Array, Array]:
    """Keys travel again; the gradient of each part of them travels with it."""
    q, k = _pin_order(saved)
    product = partial(jnp.einsum, preferred_element_type=ds_BNTS.dtype)

    def visit(dq: Array, k: Array, source: Array) -> tuple[Array, Array]:
        ds = lax.dynamic_slice_in_dim(ds_BNTS, source * k.shape[1], k.shape[1], 3)
        ds = (ds * q.shape[-1] ** -0.5).astype(q.dtype)
        return dq + product("BNTS,BSNH->BTNH", ds, k), product("BNTS,BTNH->BSNH", ds, q)

    start = jnp.zeros_like(q, ds_BNTS.dtype)
    dq, dk = visit(start, k, lax.axis_index(ring.axis))
    dq, others = travel_back(k, ring, dq, visit)
    return dq.astype(q.dtype), (dk + others).astype(k.dtype)


ring_qk.defvjp(_qk_fwd, _qk_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def ring_av(p_BNTS: Array, v_BSNH: Array, ring: Ring) -> Array:
    """RingAV: whole rows of probabilities `[B, N, T, C * S]`, own values -> o[B, T, N, H]."""
    wide = jnp.promote_types(v_BSNH.dtype, jnp.float32)

    def visit(o: Array | int, v: Array, source: Array) -> Array:
        p = lax.dynamic_slice_in_dim(p_BNTS, source * v.shape[1], v.shape[1], 3)
        return o + jnp.einsum("BNTS,BSNH->BTNH", p, v, preferred_element_type=wide)

    o = travel(v_BSNH, ring, visit(0, v_BSNH, lax.axis_index(ring.axis)), visit)
    return o.astype(v_BSNH.dtype)


def _av_fwd(p: Array, v: Array, ring: Ring) -> tuple[Array, tuple[Array, Array]]:
    return ring_av(p, v, ring), (p, v)


def _av_bwd(ring: Ring, saved: tuple[Array, Array], do_BTNH: Array) -> tuple[Array, Array]:
    """Values travel again; the gradient of each part of them travels with it."""
    p_BNTS, v = _pin_order(saved)
    wide = jnp.promote_types(v.dtype, jnp.float32)

    def visit(dp: Array, v: Array, source: Array) -> tuple[Array, Array]:
        part = jnp.einsum("BTNH,BSNH->BNTS", do_BTNH, v).astype(p_BNTS.dtype)
        start = source * v.shape[1]
        p = lax.dynamic_slice_in_dim(p_BNTS, start, v.shape[1], 3)
        dv = jnp.einsum("BNTS,BTNH->BSNH", p, do_BTNH, preferred_element_type=wide)
        return lax.dynamic_update_slice_in_dim(dp, part, start, 3), dv

    dp, dv = visit(jnp.zeros_like(p_BNTS), v, lax.axis_index(ring.axis))
    dp, others = travel_back(v, ring, dp, visit)
    return dp, (dv + others).astype(v.dtype)


ring_av.defvjp(_av_fwd, _av_bwd)
