"""Attention of one block by matrix products in chunks: memory grows with T, not with T * S.

The query heads that share a kv head are rows of the same product: `_flat`.
Letters: B batch, T query position, S key position, N heads, K heads of keys and values, H head
size, G batch and kv heads.
Only scores `[B, N, CHUNK, CHUNK]` exist at a time.
Source: Dao et al., arXiv 2205.14135.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.attention.kernel import (
    NOWHERE,
    Dropout,
    Gradients,
    Saved,
    ScoreCoordinates,
    Scores,
    add_at,
    add_bias,
    add_gradients,
    bias_gradient,
    document_ends,
    documents_meet,
    drop_groups,
    finite,
    group_mask,
    join_groups,
    merge_at,
    part_groups,
    visible,
)
from jaxptd.collectives import as_varying, varying_axes
from jaxptd.context_parallel import CHUNK

AT_MOST = "at_most_{}_trips"  # scope of a loop whose trips depend on data


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """A dim of `length` split into equal chunks of at most `limit`; the last may need padding."""

    length: int
    limit: int

    @property
    def count(self) -> int:
        return -(-self.length // self.limit)

    @property
    def size(self) -> int:
        return -(-self.length // self.count)

    def pad(self, x: Array, dim: int, value: int = 0) -> Array:
        end = self.count * self.size - self.length
        if not end:
            return x
        widths = [(0, end if i == dim % x.ndim else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=value)

    def take(self, x: Array, number: Array, dim: int) -> Array:
        return lax.dynamic_slice_in_dim(x, number * self.size, self.size, dim)

    def unpad(self, x: Array) -> Array:
        """`x` without its padding."""
        return lax.slice_in_dim(x, 0, self.length, axis=1)


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The chunks of queries and of keys, and the pairs of them that are computed."""

    queries: _Chunks
    keys: _Chunks
    scores: Scores

    @property
    def pairs(self) -> tuple[Array, Array]:
        """Numbers of query and key chunks; if causal, without pairs in which no query sees a key.

        Positions ascend, so they are at least as far apart as the numbers of their tokens.
        """
        query, key = np.indices((self.queries.count, self.keys.count), np.int32).reshape(2, -1)
        seen = np.ones(query.shape, bool)
        if self.scores.causal and self.queries.length == self.keys.length:
            distance = (query - key - 1) * self.keys.size + 1  # of the nearest tokens of a pair
            window = self.scores.window or self.keys.length
            seen = (key <= query) & (distance < window)
        return jnp.asarray(query[seen]), jnp.asarray(key[seen])

    def over_pairs(
        self, visit: Callable[[Any, Array, Array], Any], total: Any, coordinates: ScoreCoordinates
    ) -> Any:
        """`total` after `visit(total, i, j)` for each pair of chunks that may see each other.

        A loop over all pairs. With documents it has only as many trips as there are pairs with a
        document in common.

        coordinates: of the padded chunks.
        """
        query_P, key_P = self.pairs
        query_BT, key_BS = coordinates.query_segment_BT, coordinates.key_segment_BS
        if query_BT is None or key_BS is None:

            def step(total: Any, pair: tuple[Array, Array]) -> tuple[Any, None]:
                return visit(total, *pair), None

            return lax.scan(step, total, (query_P, key_P))[0]
        chunks = (query_BT, self.queries.count, query_P), (key_BS, self.keys.count, key_P)
        query, key = (
            (first_BX[:, pair_P], last_BX[:, pair_P])
            for x, count, pair_P in chunks
            for first_BX, last_BX in [document_ends(x.reshape(x.shape[0], count, -1))]
        )
        met_P = documents_meet(query, key, self._earlier(coordinates, query_P, key_P))
        order_P = jnp.argsort(~met_P, stable=True)
        query_P, key_P = query_P[order_P], key_P[order_P]
        with jax.named_scope(AT_MOST.format(len(query_P))):
            return lax.fori_loop(
                0, met_P.sum(), lambda n, total: visit(total, query_P[n], key_P[n]), total
            )

    def _earlier(self, coordinates: ScoreCoordinates, query_P: Array, key_P: Array) -> Array | None:
        """True where a query of a pair sees the position of a key, `[B, P]`; None: all pairs may.

        Where each sample has positions of its own, these are in any order.
        """
        if coordinates.query_T.ndim == 1:
            return None
        query_BIT, key_BJS = (
            x.reshape(x.shape[0], each.count, -1)
            for x, each in zip(coordinates[:2], (self.queries, self.keys), strict=True)
        )
        first_BI, last_BI, first_BJ, last_BJ = (
            end for x in (query_BIT, key_BJS) for end in (x.min(-1), x.max(-1))
        )
        seen_BP = first_BJ[:, key_P] <= last_BI[:, query_P]
        if self.scores.window is None:
            return seen_BP
        return seen_BP & (last_BJ[:, key_P] > first_BI[:, query_P] - self.scores.window)

    def pad_sites(self, coordinates: ScoreCoordinates) -> ScoreCoordinates:
        return coordinates.each(self.queries.pad, lambda x, dim: self.keys.pad(x, dim, NOWHERE))

    def sites_at(self, coordinates: ScoreCoordinates, i: Array, j: Array) -> ScoreCoordinates:
        return coordinates.each(
            lambda x, dim: self.queries.take(x, i, dim), lambda x, dim: self.keys.take(x, j, dim)
        )


@dataclasses.dataclass(frozen=True)
class Xla:
    """Matrix products in chunks, with dropout, documents and any positions.

    Args:
        dropout: dropout of the probabilities.
        chunk: maximum number of queries, and of keys, in one product.
    """

    dropout: Dropout
    chunk: int = CHUNK

    def within(self, limit: int) -> "Xla":
        """Implements `Kernel.within`."""
        return dataclasses.replace(self, chunk=min(self.chunk, limit))

    def tile(self, side: int) -> int:
        """Implements `Kernel.tile`."""
        chunks = _Chunks(side, self.chunk)
        return side if side % chunks.count else chunks.size

    def fwd(
        self, q: Array, k: Array, v: Array, coordinates: ScoreCoordinates, *, scores: Scores
    ) -> tuple[Array, Array]:
        """Implements `Kernel.fwd`; o is float32 at least: `merge` adds unrounded outputs."""
        if max(q.shape[1], k.shape[1]) <= self.chunk:
            return _block_fwd(q, k, v, coordinates, self.dropout, scores=scores)
        grid = self._grid(q, k, scores)
        coordinates = grid.pad_sites(coordinates)
        q, k, v = grid.queries.pad(q, 1), grid.keys.pad(k, 1), grid.keys.pad(v, 1)
        zero = jnp.zeros(q.shape, jnp.promote_types(q.dtype, jnp.float32))
        total = _as_varying_as((zero, zero[..., 0] - jnp.inf), (q, k, v, coordinates))

        def visit(total: tuple, i: Array, j: Array) -> tuple:
            chunk = _block_fwd(
                grid.queries.take(q, i, 1),
                grid.keys.take(k, j, 1),
                grid.keys.take(v, j, 1),
                grid.sites_at(coordinates, i, j),
                self.dropout,
                scores=scores,
            )
            return merge_at(total, chunk, i * grid.queries.size, dim=1)

        o, lse = grid.over_pairs(visit, total, coordinates)
        return grid.queries.unpad(o), grid.queries.unpad(lse)

    def bwd(
        self, saved: Saved, do: Array, coordinates: ScoreCoordinates, *, scores: Scores
    ) -> Gradients:
        """Implements `Kernel.bwd`; the gradients are float32 at least."""
        of_queries = (saved.q, do, saved.o, finite(saved.lse))
        if max(do.shape[1], saved.k.shape[1]) <= self.chunk:
            block = partial(
                _block_bwd, coordinates=coordinates, dropout=self.dropout, scores=scores
            )
            return block(*of_queries, saved.k, saved.v)
        grid = self._grid(saved.q, saved.k, scores)
        coordinates = grid.pad_sites(coordinates)
        q, do, o, lse = (grid.queries.pad(x, 1) for x in of_queries)
        k, v = grid.keys.pad(saved.k, 1), grid.keys.pad(saved.v, 1)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        inputs = Gradients(q, k, v, coordinates.bias_NR)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, wide), inputs)
        total = _as_varying_as(zeros, (q, k, v, do, o, lse, coordinates))

        def visit(total: Gradients, i: Array, j: Array) -> Gradients:
            gradients = _block_bwd(
                *(grid.queries.take(x, i, 1) for x in (q, do, o, lse)),
                *(grid.keys.take(x, j, 1) for x in (k, v)),
                coordinates=grid.sites_at(coordinates, i, j),
                dropout=self.dropout,
                scores=scores,
            )
            return _add_chunk(total, gradients, i * grid.queries.size, j * grid.keys.size)

        dq, dk, dv, bias = grid.over_pairs(visit, total, coordinates)
        return Gradients(grid.queries.unpad(dq), grid.keys.unpad(dk), grid.keys.unpad(dv), bias)

    def _grid(self, q: Array, k: Array, scores: Scores) -> _Grid:
        return _Grid(_Chunks(q.shape[1], self.chunk), _Chunks(k.shape[1], self.chunk), scores)


def _add_chunk(total: Gradients, gradients: Gradients, query: Array, key: Array) -> Gradients:
    """`total` with the gradients of the chunks that begin at these queries and keys."""
    q, k, v = (
        add_at(x, dx, (0, start, 0, 0))
        for x, dx, start in zip(total[:3], gradients[:3], (query, key, key), strict=True)
    )
    return Gradients(q, k, v, add_gradients(total.bias, gradients.bias))


def _as_varying_as(tree: Any, others: Any) -> Any:
    """`tree`, typed as varying over every axis that an array of `others` varies over."""
    axes = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(others)))
    return jax.tree.map(lambda x: as_varying(x, sorted(axes)), tree)


def _flat(x: Array, heads: int) -> Array:
    """`[B, T, N, ..]` -> `[G, N/K * T, ..]`, G = B * K: the rank of the scores that XLA computes.

    XLA then writes the probabilities over the scores; with separate B and K it would copy.
    heads: K.
    """
    x = x if x.shape[2] == heads else join_groups(x, x.shape[2] // heads)
    x = x.swapaxes(1, 2)
    return x.reshape(-1, *x.shape[2:])


def _unflat(x: Array, like: Array, heads: int) -> Array:
    """Undoes `_flat`, with the batch and the heads of `like`, `[B, T, N, H]`."""
    x = x.reshape(like.shape[0], heads, *x.shape[1:]).swapaxes(1, 2)
    return x if like.shape[2] == heads else part_groups(x, like.shape[2] // heads)


def _scores(
    q_GTH: Array, k_GSH: Array, coordinates: ScoreCoordinates, scores: Scores, groups: int
) -> Array:
    """Scaled scores and their bias, `[G, T, S]`; minus infinity for keys that a query does not see.

    groups: N/K, the query heads that share a kv head.
    """
    wide = jnp.promote_types(q_GTH.dtype, jnp.float32)
    s_GTS = jnp.einsum("GTH,GSH->GTS", q_GTH, k_GSH, preferred_element_type=wide)
    seen = visible(coordinates, scores)
    seen = group_mask(seen, groups) if groups > 1 else seen
    if seen.ndim == 4:  # [B, 1, T, S]
        seen = jnp.repeat(seen[:, 0], q_GTH.shape[0] // seen.shape[0], axis=0)
    s_GTS = s_GTS * scores.scale
    if scores.cap is not None:
        capped_GTS = scores.cap * jnp.tanh(s_GTS / scores.cap)
        s_GTS = _if_capped(coordinates, capped_GTS, s_GTS)
    s_GTS = s_GTS if coordinates.bias_NR is None else add_bias(s_GTS, coordinates, groups)
    return jnp.where(seen, s_GTS, -jnp.inf)


def _if_capped(coordinates: ScoreCoordinates, x_GTS: Array, otherwise: Array | float) -> Array:
    """`x_GTS` in layers with a cap. A cap hides nothing, so that no choice of kernels is needed."""
    if coordinates.capped is None:
        return x_GTS
    return jnp.where(coordinates.capped, x_GTS, otherwise)


def _block_fwd(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    coordinates: ScoreCoordinates,
    dropout: Dropout,
    *,
    scores: Scores,
) -> tuple[Array, Array]:
    """Output `[B, T, N, H]` and logsumexp `[B, T, N]`, both float32 at least."""
    # Masks depend on coordinates only. Without the barrier JAX would move them out of the loops
    # over layers and chunks, and save those of all chunks: T * S of them.
    q_BTNH, coordinates = lax.optimization_barrier((q_BTNH, coordinates))
    heads = k_BSKH.shape[2]
    groups = q_BTNH.shape[2] // heads
    q_GTH, k_GSH, v_GSH = (_flat(x, heads) for x in (q_BTNH, k_BSKH, v_BSKH))
    s_GTS = _scores(q_GTH, k_GSH, coordinates, scores, groups)
    max_GT = finite(s_GTS.max(axis=-1))
    p_GTS = jnp.exp(s_GTS - max_GT[..., None])
    sum_GT = p_GTS.sum(axis=-1)
    if coordinates.seed_BN2 is not None:
        p_GTS = drop_groups(p_GTS, coordinates, dropout)
    p_GTS = p_GTS.astype(v_GSH.dtype)
    o_GTH = jnp.einsum("GTS,GSH->GTH", p_GTS, v_GSH, preferred_element_type=s_GTS.dtype)
    o_GTH = o_GTH / jnp.where(sum_GT == 0, 1, sum_GT)[..., None]
    lse_GT = max_GT + jnp.log(sum_GT)
    return _unflat(o_GTH, q_BTNH, heads), _unflat(lse_GT, q_BTNH, heads)


def _block_bwd(
    q_BTNH: Array,
    do_BTNH: Array,
    o_BTNH: Array,
    lse_BTN: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    *,
    coordinates: ScoreCoordinates,
    dropout: Dropout,
    scores: Scores,
) -> Gradients:
    dtype, wide = q_BTNH.dtype, jnp.promote_types(q_BTNH.dtype, jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=wide)
    # sum_S p * dp, also with dropout: o is the dropped p times v (Dao et al., appendix B.4)
    heads = k_BSKH.shape[2]
    groups = q_BTNH.shape[2] // heads
    flat, unflat = (partial(each, heads=heads) for each in (_flat, _unflat))
    delta_GT = flat(product("BTNH,BTNH->BTN", do_BTNH, o_BTNH))
    q_GTH, do_GTH, k_GSH, v_GSH = (flat(x) for x in (q_BTNH, do_BTNH, k_BSKH, v_BSKH))
    s_GTS = _scores(q_GTH, k_GSH, coordinates, scores, groups)
    p_GTS = jnp.exp(s_GTS - flat(lse_BTN)[..., None])
    drops = coordinates.seed_BN2 is not None
    dropped_GTS = drop_groups(p_GTS, coordinates, dropout) if drops else p_GTS
    dv_GSH = product("GTS,GTH->GSH", dropped_GTS.astype(dtype), do_GTH)
    dp_GTS = product("GTH,GSH->GTS", do_GTH, v_GSH)
    dp_GTS = drop_groups(dp_GTS, coordinates, dropout) if drops else dp_GTS
    ds_GTS = p_GTS * (dp_GTS - delta_GT[..., None])
    bias = None if coordinates.bias_NR is None else bias_gradient(ds_GTS, coordinates)
    if scores.cap is not None:  # a score without a bias, which models with a cap do not have
        ds_GTS *= _if_capped(coordinates, 1 - jnp.square(finite(s_GTS) / scores.cap), 1.0)
    ds_GTS = (ds_GTS * scores.scale).astype(dtype)
    dq_GTH = product("GTS,GSH->GTH", ds_GTS, k_GSH)
    dk_GSH = product("GTS,GTH->GSH", ds_GTS, q_GTH)
    dk, dv = (unflat(x_GSH, k_BSKH) for x_GSH in (dk_GSH, dv_GSH))
    return Gradients(unflat(dq_GTH, q_BTNH), dk, dv, bias)
