"""Attention of one block by matrix products in chunks: memory grows with T, never with T * S.

Letters: B batch, T query position, S key position, N heads, H head size.
Source: Dao et al., arXiv 2205.14135.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.flash import NOWHERE, Dropout, Saved, Sites, drop, finite, merge_at, visible

CHUNK = 512  # queries and keys of one product; scores of [B, N, CHUNK, CHUNK] exist at a time


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """A dim of `length` in chunks of one size, at most `limit`; the last may need padding."""

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

    def add(self, x: Array, number: Array, dim: int, part: Array) -> Array:
        """`x` with `part` added to one chunk."""
        part += self.take(x, number, dim)
        return lax.dynamic_update_slice_in_dim(x, part, number * self.size, dim)

    def whole(self, x: Array) -> Array:
        """`[B, N, T, ..]` -> `[B, T, N, ..]` without the padding of T."""
        return lax.slice_in_dim(x, 0, self.length, axis=2).swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The chunks of queries and of keys, and which pairs of them meet."""

    queries: _Chunks
    keys: _Chunks
    causal: bool

    @property
    def pairs(self) -> tuple[Array, Array]:
        """Numbers of query and key chunks, without those above the diagonal: nothing is seen."""
        query, key = np.indices((self.queries.count, self.keys.count), np.int32).reshape(2, -1)
        if not self.causal or self.queries.length != self.keys.length:
            return jnp.asarray(query), jnp.asarray(key)
        return jnp.asarray(query[key <= query]), jnp.asarray(key[key <= query])

    def pad_sites(self, sites: Sites) -> Sites:
        query_BT, key_BS = sites.query_segment_BT, sites.key_segment_BS
        return sites._replace(
            query_T=self.queries.pad(sites.query_T, 0),
            key_S=self.keys.pad(sites.key_S, 0, NOWHERE),
            query_segment_BT=None if query_BT is None else self.queries.pad(query_BT, 1),
            key_segment_BS=None if key_BS is None else self.keys.pad(key_BS, 1),
        )

    def sites_at(self, sites: Sites, i: Array, j: Array) -> Sites:
        query_BT, key_BS = sites.query_segment_BT, sites.key_segment_BS
        return sites._replace(
            query_T=self.queries.take(sites.query_T, i, 0),
            key_S=self.keys.take(sites.key_S, j, 0),
            query_segment_BT=None if query_BT is None else self.queries.take(query_BT, i, 1),
            key_segment_BS=None if key_BS is None else self.keys.take(key_BS, j, 1),
        )


@dataclasses.dataclass(frozen=True)
class Xla:
    """Matrix products in chunks, with dropout, documents and any positions.

    Args:
        dropout: of the probabilities.
        chunk: most queries, and most keys, of one product.
    """

    dropout: Dropout
    chunk: int = CHUNK

    def fwd(
        self, q: Array, k: Array, v: Array, sites: Sites, *, causal: bool
    ) -> tuple[Array, Array]:
        """Implements `Kernel.fwd`; o is float32 at least, so that `merge` adds nothing rounded."""
        grid = self._grid(q, k, causal)
        sites = grid.pad_sites(sites)
        q, k, v = _by_head(grid, q, k, v)
        zero = jnp.zeros(q.shape, _wide(q))
        total = _as_varying_as((zero, zero[..., 0] - jnp.inf), (q, k, v, sites))

        def visit(total: tuple, pair: tuple[Array, Array]) -> tuple[tuple, None]:
            i, j = pair
            part = _block_fwd(
                grid.queries.take(q, i, 2),
                grid.keys.take(k, j, 2),
                grid.keys.take(v, j, 2),
                grid.sites_at(sites, i, j),
                self.dropout,
                causal=causal,
            )
            return merge_at(total, part, i * grid.queries.size, dim=2), None

        (o, lse), _ = lax.scan(visit, total, grid.pairs)
        return grid.queries.whole(o), grid.queries.whole(lse)

    def bwd(
        self, saved: Saved, do: Array, sites: Sites, *, causal: bool
    ) -> tuple[Array, Array, Array]:
        """Implements `Kernel.bwd`; the gradients are float32 at least."""
        grid = self._grid(saved.q, saved.k, causal)
        sites = grid.pad_sites(sites)
        # sum_S p * dp, also with dropout: o is the dropped p times v (Dao et al., appendix B.4)
        delta = jnp.einsum("BTNH,BTNH->BNT", do, saved.o, preferred_element_type=_wide(do))
        rows = [finite(saved.lse).swapaxes(1, 2), delta]
        q, k, v = _by_head(grid, saved.q, saved.k, saved.v)
        do, *rows = (grid.queries.pad(x, 2) for x in (do.swapaxes(1, 2), *rows))
        zeros = tuple(jnp.zeros(x.shape, _wide(x)) for x in (q, k, v))
        total = _as_varying_as(zeros, (q, k, v, do, rows, sites))

        def visit(total: tuple, pair: tuple[Array, Array]) -> tuple[tuple, None]:
            i, j = pair
            part = _block_bwd(
                *(grid.queries.take(x, i, 2) for x in (q, do, *rows)),
                *(grid.keys.take(x, j, 2) for x in (k, v)),
                sites=grid.sites_at(sites, i, j),
                dropout=self.dropout,
                causal=causal,
            )
            where = ((grid.queries, i), (grid.keys, j), (grid.keys, j))
            added = zip(where, total, part, strict=True)
            return tuple(chunks.add(x, n, 2, dx) for (chunks, n), x, dx in added), None

        (dq, dk, dv), _ = lax.scan(visit, total, grid.pairs)
        return grid.queries.whole(dq), grid.keys.whole(dk), grid.keys.whole(dv)

    def _grid(self, q: Array, k: Array, causal: bool) -> _Grid:
        return _Grid(_Chunks(q.shape[1], self.chunk), _Chunks(k.shape[1], self.chunk), causal)


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _as_varying_as(tree: Any, others: Any) -> Any:
    """`tree`, varying along every axis that an array of `others` varies along."""
    axes = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(others)))
    return jax.tree.map(lambda x: as_varying(x, sorted(axes)), tree)


def _by_head(grid: _Grid, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """`[B, T, N, H]` -> `[B, N, T, H]`, padded to whole chunks."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return grid.queries.pad(q, 2), grid.keys.pad(k, 2), grid.keys.pad(v, 2)


def _scores(q_BNTH: Array, k_BNSH: Array, sites: Sites, *, causal: bool) -> Array:
    """Scaled scores `[B, N, T, S]`, minus infinity where a query may not look."""
    s_BNTS = jnp.einsum("BNTH,BNSH->BNTS", q_BNTH, k_BNSH, preferred_element_type=_wide(q_BNTH))
    s_BNTS = s_BNTS * q_BNTH.shape[-1] ** -0.5
    return jnp.where(visible(sites, causal=causal), s_BNTS, -jnp.inf)


def _block_fwd(
    q_BNTH: Array, k_BNSH: Array, v_BNSH: Array, sites: Sites, dropout: Dropout, *, causal: bool
) -> tuple[Array, Array]:
    """-> o[B, N, T, H], logsumexp[B, N, T], both float32 at least."""
    s_BNTS = _scores(q_BNTH, k_BNSH, sites, causal=causal)
    max_BNT = finite(s_BNTS.max(axis=-1))
    p_BNTS = jnp.exp(s_BNTS - max_BNT[..., None])
    sum_BNT = p_BNTS.sum(axis=-1)
    p_BNTS = drop(p_BNTS, sites, dropout).astype(v_BNSH.dtype)
    o_BNTH = jnp.einsum("BNTS,BNSH->BNTH", p_BNTS, v_BNSH, preferred_element_type=_wide(v_BNSH))
    return o_BNTH / jnp.where(sum_BNT == 0, 1, sum_BNT)[..., None], max_BNT + jnp.log(sum_BNT)


def _block_bwd(
    q_BNTH: Array,
    do_BNTH: Array,
    lse_BNT: Array,
    delta_BNT: Array,
    k_BNSH: Array,
    v_BNSH: Array,
    *,
    sites: Sites,
    dropout: Dropout,
    causal: bool,
) -> tuple[Array, Array, Array]:
    dtype, product = q_BNTH.dtype, partial(jnp.einsum, preferred_element_type=_wide(q_BNTH))
    p_BNTS = jnp.exp(_scores(q_BNTH, k_BNSH, sites, causal=causal) - lse_BNT[..., None])
    dropped_BNTS = drop(p_BNTS, sites, dropout).astype(dtype)
    dv_BNSH = product("BNTS,BNTH->BNSH", dropped_BNTS, do_BNTH)
    dp_BNTS = drop(product("BNTH,BNSH->BNTS", do_BNTH, v_BNSH), sites, dropout)
    ds_BNTS = p_BNTS * (dp_BNTS - delta_BNT[..., None]) * q_BNTH.shape[-1] ** -0.5
    ds_BNTS = ds_BNTS.astype(dtype)
    dq_BNTH = product("BNTS,BNSH->BNTH", ds_BNTS, k_BNSH)
    dk_BNSH = product("BNTS,BNTH->BNSH", ds_BNTS, q_BNTH)
    return dq_BNTH, dk_BNSH, dv_BNSH
