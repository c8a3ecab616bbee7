"""Bias of scores by distance: one vector for each head, spread over the scores of a block.

Where the queries of a block follow one another, and its keys do, the bias of a score depends on its
row and column as j - i. Such rows are one vector, repeated and reshaped with a row longer by one
element: no gather, and backward no scatter, but sums along diagonals in a fixed order. Runs of
queries and keys with gaps between them are such blocks side by side.

Letters: B batch, T query position, S key position, N heads, K heads of keys and values, G query
heads of a kv head, R distances.
Source: Raffel et al., arXiv 1910.10683, section 2.1 (relative positions); Press et al., arXiv
2108.12409 (slopes).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.attention.kernel import Lengths, Sites
from jaxptd.collectives import as_varying, varying_axes


def check_distances(bias_NR: Array | None, longest: int) -> None:
    """Checks that a bias has every distance between two tokens of a sequence.

    Args:
        bias_NR: as in `Sites`, or None.
        longest: number of queries or of keys in a sequence, the larger of both.

    Raises:
        ValueError: it has fewer, or an even number, so that none is in the middle.
    """
    if bias_NR is None:
        return
    distances, needed = bias_NR.shape[-1], 2 * longest - 1
    if distances < needed or distances % 2 == 0:
        raise ValueError(
            f"a bias of {distances} distances: {longest} tokens need {needed}, or a larger odd "
            "number, from the farthest key before a query to the farthest after it"
        )


def bias_for(q: Array, bias_NR: Array | None) -> Array | None:
    """The bias, if there is one, typed as varying over the axes of q, beyond its own.

    Each device's gradient is that of its own scores; their sum over the devices is made here, or
    where the caller's bias began to vary.
    """
    return None if bias_NR is None else as_varying(bias_NR, sorted(varying_axes(q)))


def add_bias(s_GTS: Array, sites: Sites, groups: int, run: Lengths | None = None) -> Array:
    """Scaled scores `[.., K or B * K, G * T, S]` with the bias of `sites`, if there is one.

    Args:
        s_GTS: the scores.
        sites: of the queries of one head, and of the keys.
        groups: G.
        run: numbers of them that follow one another without a gap; None: all.
    """
    if sites.bias_NR is None:
        return s_GTS
    bias_NTS = _spread_runs(sites.bias_NR.astype(s_GTS.dtype), sites, run)
    heads, length, keys = bias_NTS.shape
    by_head = s_GTS.reshape(-1, heads // groups, groups * length, keys)
    return (by_head + bias_NTS.reshape(by_head.shape[1:])).reshape(s_GTS.shape)


def bias_gradient(ds_GTS: Array, sites: Sites) -> Array | None:
    """Gradient of `sites.bias_NR` from that of the scores in `add_bias`, in the latter's type."""
    if sites.bias_NR is None:
        return None
    shape = (-1, sites.bias_NR.shape[0], sites.query_T.shape[0], sites.key_S.shape[0])
    bias_NR = sites.bias_NR.astype(ds_GTS.dtype)
    _, transpose = jax.vjp(lambda bias_NR: _spread(bias_NR, sites), bias_NR)
    (gradient,) = transpose(ds_GTS.reshape(shape).sum(0))
    return gradient


def add_gradients(total: Array | None, found: Array | None) -> Array | None:
    """Sum of two gradients of a bias, if there is one."""
    return None if total is None or found is None else total + found


def _spread_runs(bias_NR: Array, sites: Sites, run: Lengths | None) -> Array:
    """The bias of each score of a block that may have gaps, `[N, T, S]`."""
    if run is None:
        return _spread(bias_NR, sites)
    queries, keys = (x.reshape(-1, n) for x, n in zip(sites[:2], run, strict=True))
    blocks = [[_spread(bias_NR, sites._replace(query_T=q, key_S=k)) for k in keys] for q in queries]
    return jnp.block(blocks)


def _spread(bias_NR: Array, sites: Sites) -> Array:
    """The bias of each score of a block, `[N, T, S]`; of padding at the block's end, any number."""
    length, keys = sites.query_T.shape[0], sites.key_S.shape[0]
    padded = jnp.pad(bias_NR, [(0, 0), (length - 1, keys - 1)])
    first = sites.key_S[0] - sites.query_T[0] + bias_NR.shape[1] // 2
    own = lax.dynamic_slice_in_dim(padded, first, length + keys - 1, 1)
    return _diagonals(own, length, keys)


def _diagonals(x_NR: Array, length: int, keys: int) -> Array:
    """x[N, T + S - 1] -> `[N, T, S]` with number j - i + T - 1 in row i and column j."""
    heads, row = x_NR.shape[0], length + keys - 1
    longer = jnp.pad(x_NR, [(0, 0), (0, 1)])
    flat = jnp.broadcast_to(longer[:, None], (heads, length, row + 1)).reshape(heads, -1)
    shifted = lax.slice_in_dim(flat, length - 1, length - 1 + length * row, axis=1)
    return shifted.reshape(heads, length, row)[:, :, :keys]
