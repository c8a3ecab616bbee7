"""Attention by matmuls on the grid, for numbers of heads that do not split over it.

Each device holds `q[T/row, H/col]` of every head; k and v likewise. Scores are Q K^T on the grid,
`[T/row, S/col]`. Softmax reduces its maximum and its sum along col. The output is P V on the grid.
All scores exist at once: T * S / (row * col) per head and device.

Where cp also shards the sequence, each of its grids holds the scores of its own queries with all
keys: keys and values are gathered along cp. They are far smaller than the scores, so a ring would
save little memory. It would also move more, as they would travel again in backward.

Letters: B batch, T query, S key, N heads, H head size.
Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, section 2.1.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.attention.attend import AttentionInputs, Ring, check_lengths
from jaxptd.attention.kernel import (
    Dropout,
    Lengths,
    Rows,
    ScoreCoordinates,
    Scores,
    check_distances,
    varying_with,
)
from jaxptd.collectives import all_gather, local_block
from jaxptd.matmul.grid import Grid
from jaxptd.summa2d import matmul, matmul_nt


def attend(
    q: Array,
    k: Array,
    v: Array,
    inputs: AttentionInputs,
    *,
    grid: Grid,
    ring: Ring,
    dropout: Dropout,
    scores: Scores,
) -> Array:
    """q[B, T/row, N, H/col], k, v[B, S/row, K, H/col] -> o[B, T/row, N, H/col].

    Query heads that share a kv head are rows of the same matmuls. T and S are the lengths of a
    grid's part of the sequences.

    Args:
        q: this device's block of the queries.
        k: its block of the keys.
        v: its block of the values.
        inputs: documents of the whole sequences `[B, cp, T]` and `[B, cp, S]`, the dropout seed and
            a score bias.
        grid: how the devices multiply.
        ring: the devices along cp, and which part of a sequence each holds.
        dropout: dropout of the probabilities.
        scores: their scale, and which keys a query sees.

    Raises:
        ValueError: attention is causal with T != S, or the bias covers too few distances.
    """
    lengths = Lengths(*(x.shape[1] * grid.shape[0] for x in (q, k)))
    check_lengths(lengths, scores)
    if inputs.bias_NR is not None:
        check_distances(inputs.bias_NR, max(lengths) * lax.axis_size(ring.axis))
        inputs = inputs._replace(bias_NR=varying_with(q, inputs.bias_NR))
    coordinates = _sites(inputs, lengths, grid, ring)
    run = _run(lengths, grid, ring)
    rows = Rows(coordinates, scores, dropout, groups=q.shape[2] // k.shape[2], run=run)
    q_BNTH, k_BNSH, v_BNSH = (x.swapaxes(1, 2) for x in (rows.queries(q), *_gathered(k, v, ring)))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    s_BNTS = _each(partial(matmul_nt, dtype=wide), grid)(q_BNTH, k_BNSH)
    p_BNTS = _softmax(rows.add_bias(s_BNTS * scores.scale), rows.seen(), grid.col)
    o_BNTH = _each(matmul, grid)(rows.drop(p_BNTS, v.dtype), v_BNSH)
    return rows.output(o_BNTH.swapaxes(1, 2))


def _each(multiply: Any, grid: Grid) -> Any:
    """Maps a matmul on the grid over sequences and heads."""
    return jax.vmap(jax.vmap(partial(multiply, grid=grid)))


def _gathered(k: Array, v: Array, ring: Ring) -> Iterable[Array]:
    """Gathers k and v of all grids, `[B, cp * S/row, K, H/col]`, in one collective."""
    alone = lax.axis_size(ring.axis) == 1
    return (k, v) if alone else all_gather(jnp.stack((k, v)), ring.axis, 2)


def _sites(inputs: AttentionInputs, lengths: Lengths, grid: Grid, ring: Ring) -> ScoreCoordinates:
    """Coordinates of this device's scores: a row holds the keys of its own rows of every grid."""
    rows = lax.axis_size(grid.row)

    def keys(x: Array, dim: int) -> Array:
        """Reorders from grid by grid to row by row."""
        parts = (lax.axis_size(ring.axis), rows, -1)
        x = x.reshape(*x.shape[:dim], *parts).swapaxes(dim, dim + 1)
        return local_block(x.reshape(*x.shape[:dim], -1), grid.col, dim)

    return ring.all_coordinates(inputs, lengths).each(
        lambda x, dim: local_block(x, grid.row, dim), keys
    )


def _run(lengths: Lengths, grid: Grid, ring: Ring) -> Lengths:
    """Lengths of a device's contiguous runs of queries and keys."""
    (rows, cols), parts = grid.shape, lax.axis_size(ring.axis)
    queries, keys = (ring.run(length) for length in lengths)
    keys = math.gcd(keys, lengths.keys // rows) if parts > 1 else keys
    return Lengths(
        math.gcd(queries, lengths.queries // rows), math.gcd(keys, parts * lengths.keys // cols)
    )


def _softmax(s_BNTS: Array, seen: Array, axis: str) -> Array:
    """Softmax over S, which is sharded over `axis`; rows that see nothing are zero."""
    s_BNTS = jnp.where(seen, s_BNTS, -jnp.inf)
    max_BNT1 = lax.pmax(lax.stop_gradient(s_BNTS).max(-1, keepdims=True), axis)
    p_BNTS = jnp.exp(s_BNTS - jnp.where(jnp.isfinite(max_BNT1), max_BNT1, 0))
    sum_BNT1 = lax.psum(p_BNTS.sum(-1, keepdims=True), axis)
    return p_BNTS / jnp.where(sum_BNT1 == 0, 1, sum_BNT1)
