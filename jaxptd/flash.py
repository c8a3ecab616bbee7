"""Attention of one block of queries with one block of keys, without keeping the scores.

`flash_fwd` gives the output and the logsumexp of each row; `flash_bwd` makes the scores again from
them. Between forward and backward only q, k, v, o and the logsumexp are held: no `[T, S]` array.

Letters: B batch, T query position, S key position, N heads, H head size.
Source: Dao et al., arXiv 2205.14135.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxptd.collectives import alike


class Sites(NamedTuple):
    """Global numbers of the rows and columns of the scores, all int32, and the seed of dropout.

    query_T and key_S are positions: a query sees the keys at or before its own. seed_BN2: two
    words for each sequence and head, or None to drop nothing.
    """

    query_T: Array
    key_S: Array
    seed_BN2: Array | None


class Dropout(NamedTuple):
    """Share of the probabilities dropped; mask: `kept(seed, query, key, rate)`, True stays."""

    rate: float
    kept: Callable[[Array, Array, Array, float], Array]


def _scores(q_BTNH: Array, k_BSNH: Array, sites: Sites) -> Array:
    """Scaled scores `[B, N, T, S]`, float32 at least, minus infinity where a query may not look."""
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    s_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, preferred_element_type=wide)
    visible_TS = sites.query_T[:, None] >= sites.key_S
    return jnp.where(visible_TS, s_BNTS * q_BTNH.shape[-1] ** -0.5, -jnp.inf)


def _drop(p_BNTS: Array, sites: Sites, dropout: Dropout) -> Array:
    if sites.seed_BN2 is None or dropout.rate == 0:
        return p_BNTS
    seed_BN112 = sites.seed_BN2[:, :, None, None]
    keep_BNTS = dropout.kept(seed_BN112, sites.query_T[:, None], sites.key_S, dropout.rate)
    return jnp.where(keep_BNTS, p_BNTS / (1 - dropout.rate), 0)


def flash_fwd(
    q_BTNH: Array, k_BSNH: Array, v_BSNH: Array, sites: Sites, dropout: Dropout
) -> tuple[Array, Array]:
    """-> o[B, T, N, H] and the logsumexp of the scores, [B, N, T], float32 at least."""
    s_BNTS = _scores(q_BTNH, k_BSNH, sites)
    max_BNT = s_BNTS.max(axis=-1)
    p_BNTS = jnp.exp(s_BNTS - max_BNT[..., None])
    sum_BNT = p_BNTS.sum(axis=-1)
    p_BNTS = _drop(p_BNTS, sites, dropout).astype(v_BSNH.dtype)
    o_BTNH = jnp.einsum("BNTS,BSNH->BTNH", p_BNTS, v_BSNH, preferred_element_type=sum_BNT.dtype)
    o_BTNH = o_BTNH / sum_BNT.swapaxes(1, 2)[..., None]
    return o_BTNH.astype(q_BTNH.dtype), max_BNT + jnp.log(sum_BNT)


def flash_bwd(
    kept: tuple[Array, Array, Array, Array, Array], do_BTNH: Array, sites: Sites, dropout: Dropout
) -> tuple[Array, Array, Array]:
    """(q, k, v, o, logsumexp), do -> dq, dk, dv."""
    q_BTNH, k_BSNH, v_BSNH, o_BTNH, lse_BNT = kept
    dtype, wide = q_BTNH.dtype, lse_BNT.dtype
    p_BNTS = jnp.exp(_scores(q_BTNH, k_BSNH, sites) - lse_BNT[..., None])
    dropped_BNTS = _drop(p_BNTS, sites, dropout).astype(dtype)
    dv_BSNH = jnp.einsum("BNTS,BTNH->BSNH", dropped_BNTS, do_BTNH)
    dp_BNTS = jnp.einsum("BTNH,BSNH->BNTS", do_BTNH, v_BSNH, preferred_element_type=wide)
    # sum_S p * dp, also with dropout: o is the dropped p times v (Dao et al., appendix B.4)
    delta_BNT = jnp.einsum("BTNH,BTNH->BNT", do_BTNH, o_BTNH, preferred_element_type=wide)
    ds_BNTS = p_BNTS * (_drop(dp_BNTS, sites, dropout) - delta_BNT[..., None])
    ds_BNTS = (ds_BNTS * q_BTNH.shape[-1] ** -0.5).astype(dtype)
    dq_BTNH = jnp.einsum("BNTS,BSNH->BTNH", ds_BNTS, k_BSNH)
    dk_BSNH = jnp.einsum("BNTS,BTNH->BSNH", ds_BNTS, q_BTNH)
    return dq_BTNH, dk_BSNH, dv_BSNH


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _xla(q: Array, k: Array, v: Array, sites: Sites, dropout: Dropout) -> Array:
    return flash_fwd(q, k, v, sites, dropout)[0]


def _xla_fwd(q: Array, k: Array, v: Array, sites: Sites, dropout: Dropout) -> tuple[Array, tuple]:
    o, lse = flash_fwd(q, k, v, sites, dropout)
    return o, ((q, k, v, o, lse), sites)


def _xla_bwd(dropout: Dropout, saved: tuple, do: Array) -> tuple[Array, Array, Array, None]:
    kept, sites = saved
    return *flash_bwd(kept, do, sites, dropout), None


_xla.defvjp(_xla_fwd, _xla_bwd)


def attend_xla(
    q_BTNH: Array, k_BSNH: Array, v_BSNH: Array, sites: Sites, dropout: Dropout
) -> Array:
    """Causal attention, any positions, with dropout: -> o[B, T, N, H]."""
    return _xla(*alike(q_BTNH, k_BSNH, v_BSNH), sites, dropout)


def attend_cudnn(q_BTNH: Array, k_BTNH: Array, v_BTNH: Array) -> Array:
    """Causal attention of a whole sequence by cuDNN: bfloat16, no dropout; -> o[B, T, N, H]."""
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTNH, v_BTNH, is_causal=True, implementation="cudnn"
    )


def cudnn_obstacle(
    platform: str, dtype: DTypeLike, *, head_size: int, dropout: float
) -> str | None:
    """Why cuDNN's kernel cannot be used, in words; None if it can. Limits: cuDNN 9 on Hopper."""
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, not {platform}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"it needs model.dtype=bfloat16, not {jnp.dtype(dtype).name}"
    if head_size % 8 or head_size > 256:
        return f"it needs a head size that is a multiple of 8, at most 256, not {head_size}"
    return f"it has no dropout (model.dropout={dropout})" if dropout > 0 else None
