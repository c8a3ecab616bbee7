"""RSA, ring self-attention as first published: all scores of a device's queries at once.

One ring of keys (`ring_qk`) makes the scores, complete rows `[T, C * S]`, and one of values
(`ring_av`) the output. Gradients of keys and values travel with them: nothing is all-reduced.

Query heads that share a kv head are rows of the same scores: N here is heads of keys and values, T
the queries of all heads of a group.
Letters: B batch, T local query, S local key, N heads, H head size, C devices of the ring.
Source: Li et al., arXiv 2105.13120.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.attention.attend import AttentionInputs, AttentionSpec, Ring, pin_to_backward
from jaxptd.attention.kernel import Lengths, Rows, Scores
from jaxptd.attention.ring import hops_for, travel, travel_back
from jaxptd.collectives import alike


def attend_rsa(q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec) -> Array:
    """Attention in whole rows of scores, as `attend` has it; only the kernel's dropout is used."""
    ring, kernel, scores, _ = spec
    k, v = inputs.expansion.expand(k, v)
    furthest = inputs.furthest(scores)
    lengths = Lengths(q.shape[1], k.shape[1])
    in_line = ring.strategy.order.in_line  # so all keys follow one another
    run = None if in_line else Lengths(*(ring.run(length) for length in lengths))
    coordinates, groups = ring.all_coordinates(inputs, lengths), q.shape[2] // k.shape[2]
    rows = Rows(coordinates, scores, kernel.dropout, groups, run)
    s_BNTS = rows.add_bias(ring_qk(rows.queries(q), k, ring, furthest))
    seen = rows.seen()
    lowest = jnp.finfo(s_BNTS.dtype).min  # not minus infinity: a row may see nothing
    p_BNTS = jax.nn.softmax(jnp.where(seen, s_BNTS, lowest))
    o_BTNH = ring_av(rows.drop(p_BNTS, v.dtype), v, ring, furthest)
    seen_BTN = jnp.broadcast_to(seen, s_BNTS.shape).any(-1).swapaxes(1, 2)
    return rows.output(jnp.where(seen_BTN[..., None], o_BTNH, 0))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def ring_qk(q_BTNH: Array, k_BSNH: Array, ring: Ring, scores: Scores) -> Array:
    """RingQK: local queries, local keys -> scaled scores `[B, N, T, C * S]`, float32 at least.

    Scores out of sight of a window, in blocks that do not come here, are 0.
    """
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)

    def visit(s: Array, k: Array, source: Array) -> Array:
        block = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k, preferred_element_type=wide)
        start = source * k.shape[1]
        return lax.dynamic_update_slice_in_dim(s, block * scores.scale, start, 3)

    batch, length, heads, _ = q_BTNH.shape
    shape = (batch, heads, length, k_BSNH.shape[1] * lax.axis_size(ring.axis))
    s, _ = alike(jnp.zeros(shape, wide), q_BTNH)
    s = visit(s, k_BSNH, lax.axis_index(ring.axis))
    return travel(k_BSNH, ring, s, visit, hops=hops_for(ring, k_BSNH.shape[1], scores))


def _qk_fwd(q: Array, k: Array, ring: Ring, scores: Scores) -> tuple[Array, tuple[Array, Array]]:
    return ring_qk(q, k, ring, scores), (q, k)


def _qk_bwd(
    ring: Ring, scores: Scores, residuals: tuple[Array, Array], ds_BNTS: Array
) -> tuple[Array, Array]:
    """Keys travel again, each block with its gradient."""
    q, k = pin_to_backward(residuals)
    product = partial(jnp.einsum, preferred_element_type=ds_BNTS.dtype)

    def visit(dq: Array, k: Array, source: Array) -> tuple[Array, Array]:
        ds = lax.dynamic_slice_in_dim(ds_BNTS, source * k.shape[1], k.shape[1], 3)
        ds = (ds * scores.scale).astype(q.dtype)
        return dq + product("BNTS,BSNH->BTNH", ds, k), product("BNTS,BTNH->BSNH", ds, q)

    start = jnp.zeros_like(q, ds_BNTS.dtype)
    dq, dk = visit(start, k, lax.axis_index(ring.axis))
    dq, others = travel_back(k, ring, dq, visit, hops=hops_for(ring, k.shape[1], scores))
    return dq.astype(q.dtype), (dk + others).astype(k.dtype)


ring_qk.defvjp(_qk_fwd, _qk_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def ring_av(p_BNTS: Array, v_BSNH: Array, ring: Ring, scores: Scores) -> Array:
    """RingAV: complete rows of probabilities `[B, N, T, C * S]`, local values -> o[B, T, N, H]."""
    wide = jnp.promote_types(v_BSNH.dtype, jnp.float32)

    def visit(o: Array | int, v: Array, source: Array) -> Array:
        p = lax.dynamic_slice_in_dim(p_BNTS, source * v.shape[1], v.shape[1], 3)
        return o + jnp.einsum("BNTS,BSNH->BTNH", p, v, preferred_element_type=wide)

    o = visit(0, v_BSNH, lax.axis_index(ring.axis))
    o = travel(v_BSNH, ring, o, visit, hops=hops_for(ring, v_BSNH.shape[1], scores))
    return o.astype(v_BSNH.dtype)


def _av_fwd(p: Array, v: Array, ring: Ring, scores: Scores) -> tuple[Array, tuple[Array, Array]]:
    return ring_av(p, v, ring, scores), (p, v)


def _av_bwd(
    ring: Ring, scores: Scores, residuals: tuple[Array, Array], do_BTNH: Array
) -> tuple[Array, Array]:
    """Values travel again, each block with its gradient."""
    p_BNTS, v = pin_to_backward(residuals)
    wide = jnp.promote_types(v.dtype, jnp.float32)

    def visit(dp: Array, v: Array, source: Array) -> tuple[Array, Array]:
        block = jnp.einsum("BTNH,BSNH->BNTS", do_BTNH, v).astype(p_BNTS.dtype)
        start = source * v.shape[1]
        p = lax.dynamic_slice_in_dim(p_BNTS, start, v.shape[1], 3)
        dv = jnp.einsum("BNTS,BTNH->BSNH", p, do_BTNH, preferred_element_type=wide)
        return lax.dynamic_update_slice_in_dim(dp, block, start, 3), dv

    dp, dv = visit(jnp.zeros_like(p_BNTS), v, lax.axis_index(ring.axis))
    dp, others = travel_back(v, ring, dp, visit, hops=hops_for(ring, v.shape[1], scores))
    return dp, (dv + others).astype(v.dtype)


ring_av.defvjp(_av_fwd, _av_bwd)
