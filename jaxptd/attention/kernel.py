"""Attention of one block of queries with one block of keys: the interface under every attention.

Forward, a kernel gives the output and the logsumexp of each row; backward, it uses both to compute
the scores again. There they may belong to a longer row of keys than the block that it is given. So
a ring can visit one block after the other, and `merge` joins the results. Implementations:
`xla.Xla`, matrix products in chunks, which always works, and `cudnn.Cudnn`, NVIDIA's.

Where groups of G = N / K query heads share keys and values, query head n reads kv head n // G: see
`groups.py`.
Letters: B batch, T query position, S key position, N heads, K heads of keys and values, H head
size, G query heads of a kv head.
Source: Dao et al., arXiv 2205.14135; Liu et al., arXiv 2310.01889 (blocks joined over devices).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

NOWHERE = np.iinfo(np.int32).max  # the position of a key that no query sees


class ScoreCoordinates(NamedTuple):
    """Global numbers of the rows and columns of the scores, int32, and dropout seeds.

    query_T, key_S: positions; `Scores` says at which distances a query sees a key.
    query_segment_BT, key_segment_BS: the document of each token; a query sees keys of its own
    document only, and no query sees a key whose document is negative (padding). Without those of
    the queries, they see keys of all documents; without those of the keys there are none. seed_BN2:
    two words for each sequence and head, or None for no dropout. bias_NR: added to the scaled
    scores of each head, number R // 2 + key - query of it, or None; with it positions in a block
    of queries, and in one of keys, follow one another without a gap.
    """

    query_T: Array
    key_S: Array
    query_segment_BT: Array | None = None
    key_segment_BS: Array | None = None
    seed_BN2: Array | None = None
    bias_NR: Array | None = None

    def each(
        self, queries: Callable[[Array, int], Array], keys: Callable[[Array, int], Array]
    ) -> "ScoreCoordinates":
        """Maps `queries(x, dim)` over arrays of queries, and `keys(x, dim)` over arrays of keys."""
        query_BT, key_BS = self.query_segment_BT, self.key_segment_BS
        return self._replace(
            query_T=queries(self.query_T, 0),
            key_S=keys(self.key_S, 0),
            query_segment_BT=None if query_BT is None else queries(query_BT, 1),
            key_segment_BS=None if key_BS is None else keys(key_BS, 1),
        )


class Lengths(NamedTuple):
    """Numbers of queries and of keys."""

    queries: int
    keys: int


class Scores(NamedTuple):
    """The scores of an attention: their factor, and the distances of keys that a query sees.

    scale: factor of q k. causal: a query sees no key after its own position. window: it sees no key
    that is `window` positions or more before its own; None: any.
    """

    scale: float
    causal: bool = True
    window: int | None = None


class Dropout(NamedTuple):
    """Fraction of probabilities dropped, and `keep_mask(seed, query, key, rate)`, True to keep."""

    rate: float
    keep_mask: Callable[[Array, Array, Array, float], Array]


class Saved(NamedTuple):
    """Residuals for backward: inputs, output, and logsumexp `[B, T, N]` over all keys of a row."""

    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array


class Gradients(NamedTuple):
    """Results of backward; bias: of `bias_NR`, summed over this block of scores."""

    q: Array
    k: Array
    v: Array
    bias: Array | None = None


class Kernel(Protocol):
    """An implementation; a row that sees nothing has output 0 and logsumexp minus infinity.

    If attention is causal and there are as many keys as queries, they are the same tokens, in
    ascending order. dropout: dropout of the probabilities.
    """

    @property
    def dropout(self) -> Dropout: ...

    def within(self, limit: int) -> "Kernel":
        """The same with at most `limit` queries, and keys, in a product, if it forms scores."""

    def tile(self, side: int) -> int:
        """Number in which callers should pass `side` queries, or keys; divides it."""

    def fwd(
        self, q: Array, k: Array, v: Array, coordinates: ScoreCoordinates, *, scores: Scores
    ) -> tuple[Array, Array]:
        """q[B, T, N, H], k and v[B, S, K, H] -> o[B, T, N, H]; logsumexp[B, T, N], float32."""

    def bwd(
        self, saved: Saved, do: Array, coordinates: ScoreCoordinates, *, scores: Scores
    ) -> Gradients:
        """Gradient of the output -> those of the inputs."""


def merge(o: Array, lse: Array, other: Array, other_lse: Array) -> tuple[Array, Array]:
    """Merges outputs `[.., H]` and logsumexps `[..]` over two sets of keys: -> over their union."""
    both = jnp.logaddexp(lse, other_lse)
    safe = finite(both)
    weight, other_weight = (jnp.exp(x - safe)[..., None] for x in (lse, other_lse))
    return o * weight + other * other_weight, both


def merge_at(
    total: tuple[Array, Array], part: tuple[Array, Array], start: Array | int, *, dim: int
) -> tuple[Array, Array]:
    """`total` with `found` merged into its rows from `start`, along `dim`."""
    o, lse = (lax.dynamic_slice_in_dim(x, start, part[1].shape[dim], dim) for x in total)
    o, lse = merge(o, lse, part[0], part[1])
    put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=dim)
    return put(total[0], o), put(total[1], lse)


def add_at(x: Array, block: Array, start: tuple[Array | int, ...]) -> Array:
    """`x` with `block` added at index `start`."""
    start = tuple(jnp.asarray(i, jnp.int32) for i in start)
    block += lax.dynamic_slice(x, start, block.shape)
    return lax.dynamic_update_slice(x, block.astype(x.dtype), start)


def finite(lse: Array) -> Array:
    """lse with 0 for minus infinity, in rows that see nothing: there exp(score - 0) is 0, too."""
    return jnp.where(lse == -jnp.inf, 0, lse)


def visible(coordinates: ScoreCoordinates, scores: Scores) -> Array:
    """Mask of the keys that each query sees; broadcasts to `[B, N, T, S]`."""
    query_T1 = coordinates.query_T[:, None]
    seen_TS = (query_T1 if scores.causal else NOWHERE - 1) >= coordinates.key_S
    if scores.window is not None:
        seen_TS = seen_TS & (coordinates.key_S > query_T1 - scores.window)
    if coordinates.key_segment_BS is None:
        return seen_TS
    key_B1S = coordinates.key_segment_BS[:, None, :]
    seen_BTS = key_B1S >= 0
    if coordinates.query_segment_BT is not None:
        seen_BTS = seen_BTS & (coordinates.query_segment_BT[:, :, None] == key_B1S)
    return seen_TS & seen_BTS[:, None]


def drop(p_BNTS: Array, coordinates: ScoreCoordinates, dropout: Dropout) -> Array:
    """Probabilities, or their gradients, with a fraction zeroed and the rest scaled up."""
    if coordinates.seed_BN2 is None or dropout.rate == 0:
        return p_BNTS
    seed_BN112 = coordinates.seed_BN2[:, :, None, None]
    keep_BNTS = dropout.keep_mask(
        seed_BN112, coordinates.query_T[:, None], coordinates.key_S, dropout.rate
    )
    return jnp.where(keep_BNTS, p_BNTS / (1 - dropout.rate), 0)
