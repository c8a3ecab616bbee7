"""Attention by products on the grid, for numbers of heads that do not split over it.

Each device holds `q[T/row, H/col]` of every head, and k and v alike. Scores are Q K^T on the grid,
`[T/row, S/col]`; softmax takes its maximum and its sum along col; the output is P V on the grid.
All scores exist at once: a device holds T * S / (row * col) of them per head.

Letters: B batch, T query, S key, N heads, H head size.
Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, section 2.1.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.attention.bias import bias_for, check_distances
from jaxptd.attention.groups import Rows
from jaxptd.attention.kernel import Dropout, Scores, Sites
from jaxptd.attention.ring import Lengths, Tokens, check_lengths
from jaxptd.collectives import local_block
from jaxptd.matmul.grid import Grid
from jaxptd.summa2d import matmul, matmul_nt


def attend(
    q: Array,
    k: Array,
    v: Array,
    tokens: Tokens,
    *,
    grid: Grid,
    dropout: Dropout,
    scores: Scores,
) -> Array:
    """q[B, T/row, N, H/col], k, v[B, S/row, K, H/col] -> o[B, T/row, N, H/col].

    Query heads that share a kv head are rows of the same products.

    Args:
        q: this device's block of the queries.
        k: its block of the keys.
        v: its block of the values.
        tokens: documents of the whole sequences `[B, 1, T]` and `[B, 1, S]`, the seed of dropout,
            and a bias of the scores.
        grid: how the devices multiply.
        dropout: dropout of the probabilities.
        scores: their factor, and which keys a query sees.

    Raises:
        ValueError: causal attention of two lengths, or a bias with too few distances.
    """
    lengths = Lengths(*(x.shape[1] * grid.shape[0] for x in (q, k)))
    check_lengths(lengths, scores)
    check_distances(tokens.bias_NR, max(lengths))
    tokens = tokens._replace(bias_NR=bias_for(q, tokens.bias_NR))
    sites = _sites(tokens, lengths, grid)
    rows = Rows(sites, scores, dropout, groups=q.shape[2] // k.shape[2])
    q_BNTH, k_BNSH, v_BNSH = (x.swapaxes(1, 2) for x in (rows.queries(q), k, v))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    s_BNTS = _each(partial(matmul_nt, dtype=wide), grid)(q_BNTH, k_BNSH)
    p_BNTS = _softmax(rows.add_bias(s_BNTS * scores.scale), rows.seen(), grid.col)
    o_BNTH = _each(matmul, grid)(rows.drop(p_BNTS, v.dtype), v_BNSH)
    return rows.output(o_BNTH.swapaxes(1, 2))


def _each(multiply: Any, grid: Grid) -> Any:
    """Maps a product on the grid over sequences and heads."""
    return jax.vmap(jax.vmap(partial(multiply, grid=grid)))


def _sites(tokens: Tokens, lengths: Lengths, grid: Grid) -> Sites:
    query_T, key_S = (jnp.arange(length, dtype=jnp.int32) for length in lengths)
    whole = Sites(query_T, key_S, seed_BN2=tokens.seed_BN2, bias_NR=tokens.bias_NR)
    if tokens.query_segment_BCT is not None:
        whole = whole._replace(query_segment_BT=tokens.query_segment_BCT[:, 0])
    if tokens.key_segment_BCS is not None:
        whole = whole._replace(key_segment_BS=tokens.key_segment_BCS[:, 0])
    return whole.each(
        lambda x, dim: local_block(x, grid.row, dim), lambda x, dim: local_block(x, grid.col, dim)
    )


def _softmax(s_BNTS: Array, seen: Array, axis: str) -> Array:
    """Softmax over S, which is sharded over `axis`; zeros in rows that see nothing."""
    s_BNTS = jnp.where(seen, s_BNTS, -jnp.inf)
    max_BNT1 = lax.pmax(lax.stop_gradient(s_BNTS).max(-1, keepdims=True), axis)
    p_BNTS = jnp.exp(s_BNTS - jnp.where(jnp.isfinite(max_BNT1), max_BNT1, 0))
    sum_BNT1 = lax.psum(p_BNTS.sum(-1, keepdims=True), axis)
    return p_BNTS / jnp.where(sum_BNT1 == 0, 1, sum_BNT1)
