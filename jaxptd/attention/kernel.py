"""Attention of one block of queries with one block of keys: the interface under every attention.

A kernel gives, forward, the output and the logsumexp of each row; backward it makes the scores
again from those. Both may be the ones of a longer row of keys than the block it is shown, so that a
ring can visit one block after the other: `merge` joins what the blocks give. Implementations:
`flash_xla.Xla`, matrix products in chunks, for anything, and `flash_cudnn.Cudnn`, NVIDIA's.

Letters: B batch, T query position, S key position, N heads, H head size.
Source: Dao et al., arXiv 2205.14135; Liu et al., arXiv 2310.01889 (blocks joined over devices).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Under these names stands what backward may keep of a layer; `layers/block.py` says which policy
# keeps which. What products gave or devices summed, and statistics of norms:
KEPT = "kept"
# The output and the logsumexp of an attention that makes its scores again:
CORE = "core"
# What products, norms, GELU and attention take, where it is none of those:
TAKEN = "taken"
NOWHERE = np.iinfo(np.int32).max  # the position of a key that no query sees


class Sites(NamedTuple):
    """Global numbers of the rows and columns of the scores, int32, and the seed of dropout.

    query_T, key_S: positions; where attention is causal, a query sees the keys at or before its
    own. query_segment_BT, key_segment_BS: the document of each token, or both None; a query sees
    the keys of its own document only, and no query sees a key whose document is negative (padding).
    seed_BN2: two words for each sequence and head, or None to drop nothing.
    """

    query_T: Array
    key_S: Array
    query_segment_BT: Array | None = None
    key_segment_BS: Array | None = None
    seed_BN2: Array | None = None

    def each(
        self, queries: Callable[[Array, int], Array], keys: Callable[[Array, int], Array]
    ) -> "Sites":
        """`queries(x, dim)` of what is said of rows, `keys(x, dim)` of what is said of columns."""
        query_BT, key_BS = self.query_segment_BT, self.key_segment_BS
        return self._replace(
            query_T=queries(self.query_T, 0),
            key_S=keys(self.key_S, 0),
            query_segment_BT=None if query_BT is None else queries(query_BT, 1),
            key_segment_BS=None if key_BS is None else keys(key_BS, 1),
        )


class Dropout(NamedTuple):
    """Share of the probabilities dropped; mask: `keep_mask(seed, query, key, rate)`, True stays."""

    rate: float
    keep_mask: Callable[[Array, Array, Array, float], Array]


class Saved(NamedTuple):
    """What backward needs: the inputs, the output and the logsumexp `[B, T, N]` of whole rows."""

    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array


class Kernel(Protocol):
    """One implementation; a row that sees nothing has output 0 and logsumexp minus infinity.

    Where attention is causal and there are as many keys as queries, they are the same tokens, in
    ascending order. dropout: of the probabilities.
    """

    @property
    def dropout(self) -> Dropout: ...

    def tile(self, side: int) -> int:
        """Side of the squares in which to show it `side` queries and keys; it divides `side`."""

    def fwd(
        self, q: Array, k: Array, v: Array, sites: Sites, *, causal: bool
    ) -> tuple[Array, Array]:
        """q[B, T, N, H], k and v[B, S, N, H] -> o[B, T, N, H]; logsumexp[B, T, N], float32."""

    def bwd(
        self, saved: Saved, do: Array, sites: Sites, *, causal: bool
    ) -> tuple[Array, Array, Array]:
        """The output's gradient -> dq, dk, dv."""


def merge(o: Array, lse: Array, other: Array, other_lse: Array) -> tuple[Array, Array]:
    """Outputs `[.., H]` and logsumexps `[..]` of two sets of keys -> those of both together."""
    both = jnp.logaddexp(lse, other_lse)
    safe = finite(both)
    weight, other_weight = (jnp.exp(x - safe)[..., None] for x in (lse, other_lse))
    return o * weight + other * other_weight, both


def merge_at(
    total: tuple[Array, Array], part: tuple[Array, Array], start: Array | int, *, dim: int
) -> tuple[Array, Array]:
    """`total` with `part` merged into its rows from `start`, along `dim`."""
    o, lse = (lax.dynamic_slice_in_dim(x, start, part[1].shape[dim], dim) for x in total)
    o, lse = merge(o, lse, part[0], part[1])
    put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=dim)
    return put(total[0], o), put(total[1], lse)


def add_at(x: Array, part: Array, start: tuple[Array | int, ...]) -> Array:
    """`x` with `part` added where it starts, in each dim."""
    start = tuple(jnp.asarray(i, jnp.int32) for i in start)
    part += lax.dynamic_slice(x, start, part.shape)
    return lax.dynamic_update_slice(x, part.astype(x.dtype), start)


def finite(lse: Array) -> Array:
    """0 for minus infinity, of a row that sees nothing: exp(score - 0) is 0 all the same."""
    return jnp.where(lse == -jnp.inf, 0, lse)


def visible(sites: Sites, *, causal: bool) -> Array:
    """Which keys each query sees: something that broadcasts to `[B, N, T, S]`."""
    seen_TS = (sites.query_T[:, None] if causal else NOWHERE - 1) >= sites.key_S
    if sites.query_segment_BT is None or sites.key_segment_BS is None:
        return seen_TS
    key_B1S = sites.key_segment_BS[:, None, :]
    same_BTS = (sites.query_segment_BT[:, :, None] == key_B1S) & (key_B1S >= 0)
    return seen_TS & same_BTS[:, None]


def drop(p_BNTS: Array, sites: Sites, dropout: Dropout) -> Array:
    """Probabilities, or their gradients, with a share zeroed and the rest scaled up."""
    if sites.seed_BN2 is None or dropout.rate == 0:
        return p_BNTS
    seed_BN112 = sites.seed_BN2[:, :, None, None]
    keep_BNTS = dropout.keep_mask(seed_BN112, sites.query_T[:, None], sites.key_S, dropout.rate)
    return jnp.where(keep_BNTS, p_BNTS / (1 - dropout.rate), 0)
