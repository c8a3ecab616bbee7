"""Attention of one block of queries with one block of keys: the interface under every attention.

Forward, a kernel gives the output and the logsumexp of each row; backward, it uses both to compute
the scores again. There they may belong to a longer row of keys than the block that it is given. So
a ring can visit one block after the other, and `merge` joins the results. Implementations:
`xla.Xla`, matrix products in chunks, which always works, and `cudnn.Cudnn`, NVIDIA's.

Where groups of G = N / K query heads share keys and values, query head n reads kv head n // G. The
queries of a group's heads follow one after the other, so that one product makes all their scores.

Letters: B batch, T query position, S key position, N heads, K heads of keys and values, H head
size, G query heads of a kv head, R distances.
Source: Dao et al., arXiv 2205.14135; Liu et al., arXiv 2310.01889 (blocks joined over devices);
Ainslie et al., arXiv 2305.13245 (groups).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.remat import SAVED_MATMUL_OUT

NOWHERE = np.iinfo(np.int32).max  # the position of a key that no query sees


class ScoreCoordinates(NamedTuple):
    """Global numbers of the rows and columns of the scores, int32, and dropout seeds.

    query_T, key_S: positions; `Scores` says at which distances a query sees a key. `[B, T]` and
    `[B, S]` where each sample has its own.
    query_segment_BT, key_segment_BS: the document of each token; a query sees keys of its own
    document only, and no query sees a key whose document is negative (padding). Without those of
    the queries, they see keys of all documents; without those of the keys there are none. seed_BN2:
    two words for each sequence and head, or None for no dropout. bias_NR: added to the scaled
    scores of each head, number R // 2 + key - query of it, or None; with it positions in a block
    of queries, and in one of keys, follow one another without a gap. windowed: whether the layer
    has the window of `Scores`; None: it has. capped: whether it has their cap; None: it has.
    """

    query_T: Array
    key_S: Array
    query_segment_BT: Array | None = None
    key_segment_BS: Array | None = None
    seed_BN2: Array | None = None
    bias_NR: Array | None = None
    windowed: Array | None = None
    capped: Array | None = None

    def each(
        self, queries: Callable[[Array, int], Array], keys: Callable[[Array, int], Array]
    ) -> "ScoreCoordinates":
        """Maps `queries(x, dim)` over arrays of queries, and `keys(x, dim)` over arrays of keys."""
        query_BT, key_BS = self.query_segment_BT, self.key_segment_BS
        return self._replace(
            query_T=queries(self.query_T, self.query_T.ndim - 1),
            key_S=keys(self.key_S, self.key_S.ndim - 1),
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
    that is `window` positions or more before its own; None: any. cap: limit of scaled scores, by
    tanh; None: none.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    cap: float | None = None


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


# ---- sinks: a logit of each head beside its scores, which takes a share of probabilities ---------
# With Z the sum of exp(score) over the keys that a row sees, o' = o Z / (Z + exp(sink)). A kernel's
# backward needs nothing but o' and log(Z + exp(sink)) in place of o and log Z: a sink is a key with
# the value zero.
# Source: Xiao et al., arXiv 2309.17453 (keys that take what no token should get); gpt-oss.


def with_sinks(o: Array, lse: Array, sink_N: Array) -> tuple[Array, Array]:
    """Output `[B, T, N, H]` and logsumexp `[B, T, N]` of whole rows: -> the same with sinks."""
    both = jnp.logaddexp(lse, sink_N.astype(lse.dtype))
    return o * jnp.exp(lse - both)[..., None], both


def sink_gradient(saved: Saved, do: Array, sink_N: Array) -> Array:
    """The gradient of sinks from that of an output that they are part of."""
    share_BTN = jnp.exp(sink_N.astype(saved.lse.dtype) - saved.lse)
    product = partial(jnp.einsum, preferred_element_type=share_BTN.dtype)
    product_BTN = product("BTNH,BTNH->BTN", do.astype(saved.o.dtype), saved.o)
    return -(share_BTN * product_BTN).sum((0, 1)).astype(sink_N.dtype)


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
    query_T1, key_1S = coordinates.query_T[..., None], coordinates.key_S[..., None, :]
    seen_TS = (query_T1 if scores.causal else NOWHERE - 1) >= key_1S
    if scores.window is not None:
        near_TS = key_1S > query_T1 - scores.window
        windowed = coordinates.windowed
        seen_TS = seen_TS & (near_TS if windowed is None else near_TS | ~windowed)
    if coordinates.key_segment_BS is None:
        return seen_TS if seen_TS.ndim == 2 else seen_TS[:, None]
    key_B1S = coordinates.key_segment_BS[:, None, :]
    seen_BTS = key_B1S >= 0
    if coordinates.query_segment_BT is not None:
        seen_BTS = seen_BTS & (coordinates.query_segment_BT[:, :, None] == key_B1S)
    return (seen_TS & seen_BTS)[:, None]


Ends = tuple[Array, Array]


def document_ends(segment_BXT: Array) -> Ends:
    """The lowest and the highest document of each block X of tokens, `[B, X]` each.

    segment_BXT: documents; negative or `NOWHERE` for padding.
    """
    real = (segment_BXT >= 0) & (segment_BXT != NOWHERE)
    lowest = jnp.where(real, segment_BXT, NOWHERE).min(-1)
    return lowest, jnp.where(real, segment_BXT, -1).max(-1)


def documents_meet(query: Ends, key: Ends, also_BX: Array | None = None) -> Array:
    """True where queries and keys may have a document in common in any sample, `[X]`.

    False only if the numbers of their documents have separate ranges, as those of packed sequences
    have far from the diagonal: no query then sees a key.

    Args:
        query: documents of queries, see `document_ends`.
        key: documents of keys.
        also_BX: another condition, of the same sample; None: there is none.
    """
    (first_query, last_query), (first_key, last_key) = query, key
    meet_BX = (first_query <= last_key) & (first_key <= last_query)
    return (meet_BX if also_BX is None else meet_BX & also_BX).any(0)


Result = TypeVar("Result")


def by_window(windowed: Array | None, scores: Scores, run: Callable[[Scores], Result]) -> Result:
    """`run(scores)`, without their window where the layer has none.

    A kernel can only skip what a window hides if the window is known at compile time, so both
    versions are compiled. `run` must not contain collectives.

    windowed: as in `ScoreCoordinates`. What `run` reads must vary over the axes it varies over.
    """
    if windowed is None:
        return run(scores)
    result: Result = lax.cond(
        windowed, lambda: run(scores), lambda: run(scores._replace(window=None))
    )
    return result


def drop(p_BNTS: Array, coordinates: ScoreCoordinates, dropout: Dropout) -> Array:
    """Probabilities, or their gradients, with a fraction zeroed and the rest scaled up."""
    if coordinates.seed_BN2 is None or dropout.rate == 0:
        return p_BNTS
    seed_BN112 = coordinates.seed_BN2[:, :, None, None]
    query_T1, key_1S = coordinates.query_T[..., None], coordinates.key_S[..., None, :]
    if query_T1.ndim == 3:
        query_T1, key_1S = query_T1[:, None], key_1S[:, None]
    keep_BNTS = dropout.keep_mask(seed_BN112, query_T1, key_1S, dropout.rate)
    return jnp.where(keep_BNTS, p_BNTS / (1 - dropout.rate), 0)


# ---- bias of scores by distance: one vector for each head, spread over the scores of a block -----
# Where the queries of a block follow one another, and its keys do, the bias of a score depends on
# its row and column as j - i. Such rows are one vector, repeated and reshaped with a row longer by
# one element: no gather, and backward no scatter, but sums along diagonals in a fixed order. Runs
# of queries and keys with gaps between them are such blocks side by side.
# Source: Raffel et al., arXiv 1910.10683, section 2.1 (relative positions); Press et al., arXiv
# 2108.12409 (slopes).


def check_distances(bias_NR: Array, longest: int) -> None:
    """Checks that a bias has every distance between two tokens of a sequence.

    Args:
        bias_NR: as in `ScoreCoordinates`.
        longest: number of queries or of keys in a sequence, the larger of both.

    Raises:
        ValueError: it has fewer, or an even number, so that none is in the middle.
    """
    distances, needed = bias_NR.shape[-1], 2 * longest - 1
    if distances < needed or distances % 2 == 0:
        raise ValueError(
            f"a bias of {distances} distances: {longest} tokens need {needed}, or a larger odd "
            "number, from the farthest key before a query to the farthest after it"
        )


def varying_with(q: Array, x_N: Array) -> Array:
    """A bias or sinks of heads, typed as varying over the axes of q, beyond its own.

    Each device's gradient is that of its own scores; their sum over the devices is made here, or
    where the caller's array began to vary.
    """
    return as_varying(x_N, sorted(varying_axes(q)))


def add_bias(
    s_GTS: Array, coordinates: ScoreCoordinates, groups: int, run: Lengths | None = None
) -> Array:
    """Scaled scores `[.., K or B * K, G * T, S]` with the bias of `coordinates`, which have one.

    Args:
        s_GTS: the scores.
        coordinates: of the queries of one head, and of the keys.
        groups: G.
        run: numbers of them that follow one another without a gap; None: all.
    """
    assert coordinates.bias_NR is not None
    bias_NTS = _spread_runs(coordinates.bias_NR.astype(s_GTS.dtype), coordinates, run)
    heads, length, keys = bias_NTS.shape
    by_head = s_GTS.reshape(-1, heads // groups, groups * length, keys)
    return (by_head + bias_NTS.reshape(by_head.shape[1:])).reshape(s_GTS.shape)


def bias_gradient(ds_GTS: Array, coordinates: ScoreCoordinates) -> Array:
    """Gradient of the bias of `coordinates`, which have one, from the scores', in its type."""
    assert coordinates.bias_NR is not None
    shape = (
        -1,
        coordinates.bias_NR.shape[0],
        coordinates.query_T.shape[0],
        coordinates.key_S.shape[0],
    )
    bias_NR = coordinates.bias_NR.astype(ds_GTS.dtype)
    _, transpose = jax.vjp(lambda bias_NR: _spread(bias_NR, coordinates), bias_NR)
    (gradient,) = transpose(ds_GTS.reshape(shape).sum(0))
    return gradient


def add_gradients(total: Array | None, gradient: Array | None) -> Array | None:
    """Sum of two gradients of a bias, if there is one."""
    return None if total is None or gradient is None else total + gradient


def _spread_runs(bias_NR: Array, coordinates: ScoreCoordinates, run: Lengths | None) -> Array:
    """The bias of each score of a block that may have gaps, `[N, T, S]`."""
    if run is None:
        return _spread(bias_NR, coordinates)
    queries, keys = (x.reshape(-1, n) for x, n in zip(coordinates[:2], run, strict=True))
    blocks = [
        [_spread(bias_NR, coordinates._replace(query_T=q, key_S=k)) for k in keys] for q in queries
    ]
    return jnp.block(blocks)


def _spread(bias_NR: Array, coordinates: ScoreCoordinates) -> Array:
    """The bias of each score of a block, `[N, T, S]`; of padding at the block's end, any number."""
    length, keys = coordinates.query_T.shape[0], coordinates.key_S.shape[0]
    padded = jnp.pad(bias_NR, [(0, 0), (length - 1, keys - 1)])
    first = coordinates.key_S[0] - coordinates.query_T[0] + bias_NR.shape[1] // 2
    distances = lax.dynamic_slice_in_dim(padded, first, length + keys - 1, 1)
    return _diagonals(distances, length, keys)


def _diagonals(x_NR: Array, length: int, keys: int) -> Array:
    """x[N, T + S - 1] -> `[N, T, S]` with number j - i + T - 1 in row i and column j."""
    heads, row = x_NR.shape[0], length + keys - 1
    longer = jnp.pad(x_NR, [(0, 0), (0, 1)])
    flat = jnp.broadcast_to(longer[:, None], (heads, length, row + 1)).reshape(heads, -1)
    shifted = lax.slice_in_dim(flat, length - 1, length - 1 + length * row, axis=1)
    return shifted.reshape(heads, length, row)[:, :, :keys]


# ---- groups of query heads that share keys and values --------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
    """Whole rows of scores `[B, K, G * T, S]`: the steps that do not depend on who makes them.

    It is all that an attention needs which makes whole rows at once.

    Args:
        coordinates: of the queries of one head, and of the keys.
        scores: which of them a query sees.
        dropout: dropout of the probabilities.
        groups: G.
        run: numbers of queries and keys that follow one another without a gap; None: all.
    """

    coordinates: ScoreCoordinates
    scores: Scores
    dropout: Dropout
    groups: int
    run: Lengths | None = None

    def queries(self, q_BTNH: Array) -> Array:
        """q[B, T, N, H] -> `[B, G * T, K, H]`."""
        return join_groups(q_BTNH, self.groups) if self.groups > 1 else q_BTNH

    def add_bias(self, s_BKTS: Array) -> Array:
        """Scaled scores with the bias by distance, if there is one."""
        if self.coordinates.bias_NR is None:
            return s_BKTS
        return add_bias(s_BKTS, self.coordinates, self.groups, self.run)

    def seen(self) -> Array:
        """Mask of the keys that each row sees; broadcasts to the rows."""
        seen_TS = visible(self.coordinates, self.scores)
        return group_mask(seen_TS, self.groups) if self.groups > 1 else seen_TS

    def drop(self, p_BKTS: Array, dtype: DTypeLike) -> Array:
        """Probabilities after dropout, in `dtype`. Backward drops again, so no mask is saved."""
        drops = self.coordinates.seed_BN2 is not None
        # Also where nothing drops: backward's barrier stays before what reads p.
        again = partial(drop_groups, dropout=self.dropout) if drops else lambda p_BKTS, _: p_BKTS
        return jax.checkpoint(again)(p_BKTS, self.coordinates).astype(dtype)

    def output(self, o_BTKH: Array) -> Array:
        """Output `[B, G * T, K, H]` -> o[B, T, N, H], with the name of what remat keeps."""
        o_BTNH = part_groups(o_BTKH, self.groups) if self.groups > 1 else o_BTKH
        return checkpoint_name(o_BTNH, SAVED_MATMUL_OUT)


def join_groups(x_BTN: Array, groups: int) -> Array:
    """`[B, T, N, ..]` -> `[B, G * T, K, ..]`: queries that share a kv head, one after the other.

    Partner: `part_groups`. groups: G.
    """
    batch, length, queries, *rest = x_BTN.shape
    x_BTKG = x_BTN.reshape(batch, length, queries // groups, groups, *rest)
    return jnp.moveaxis(x_BTKG, 3, 1).reshape(batch, -1, queries // groups, *rest)


def part_groups(x_BTK: Array, groups: int) -> Array:
    """`[B, G * T, K, ..]` -> `[B, T, N, ..]`. Undoes `join_groups`; groups: G."""
    batch, length, heads, *rest = x_BTK.shape
    x_BGTK = x_BTK.reshape(batch, groups, length // groups, heads, *rest)
    return jnp.moveaxis(x_BGTK, 1, 3).reshape(batch, length // groups, -1, *rest)


def group_mask(seen_TS: Array, groups: int) -> Array:
    """A mask of queries for those of groups one after the other: `[.., T, S]`, or of all alike."""
    alike = seen_TS.ndim == 1 or seen_TS.shape[-2] == 1
    return seen_TS if alike else jnp.concatenate([seen_TS] * groups, -2)


def drop_groups(p_BKTS: Array, coordinates: ScoreCoordinates, dropout: Dropout) -> Array:
    """`drop` of probabilities `[B, K, G * T, S]`, for which there are seeds."""
    assert coordinates.seed_BN2 is not None
    batch, queries = coordinates.seed_BN2.shape[:2]
    p_BNTS = p_BKTS.reshape(batch, queries, -1, p_BKTS.shape[-1])
    return drop(p_BNTS, coordinates, dropout).reshape(p_BKTS.shape)
