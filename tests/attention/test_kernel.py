"""Code that attention kernels share: merging blocks, visible keys, dropout of probabilities.

Also defines the plain attention with which the tests of kernels and rings compare.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.attention.kernel import (
    NOWHERE,
    Dropout,
    ScoreCoordinates,
    Scores,
    drop,
    merge,
    merge_at,
    visible,
)
from jaxptd.layers.dropout import keep_mask

TOLERANCES = {"float32": 1e-6, "float64": 1e-12}  # relative to a tensor's norm; never loosened
B, T, S, N, H = 2, 5, 9, 3, 4
CAUSAL = Scores(H**-0.5)
FULL = CAUSAL._replace(causal=False)
SEED_BN2 = np.random.default_rng(9).integers(0, 2**32, (B, N, 2)).astype(np.uint32)


class Plain(NamedTuple):
    """Results of attention, float64 numpy arrays."""

    o: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None = None


def plain_seen(coordinates: ScoreCoordinates, scores: Scores) -> np.ndarray:
    """Mask of visible keys by definition, `[B, 1, T, S]` or `[1, 1, T, S]`."""
    query_T, key_S = np.asarray(coordinates.query_T), np.asarray(coordinates.key_S)
    seen = np.broadcast_to(key_S != NOWHERE, (1, 1, len(query_T), len(key_S)))
    distance_TS = query_T[:, None].astype(np.int64) - key_S
    if scores.causal:
        seen = seen & (distance_TS >= 0)
    if scores.window is not None:
        seen = seen & (distance_TS < scores.window)
    if coordinates.key_segment_BS is not None:
        seen = seen & (np.asarray(coordinates.key_segment_BS) >= 0)[:, None, None]
        if coordinates.query_segment_BT is not None:
            query, key = (
                np.asarray(coordinates.query_segment_BT),
                np.asarray(coordinates.key_segment_BS),
            )
            seen = seen & (query[:, :, None] == key[:, None])[:, None]
    return seen


def plain_distances(coordinates: ScoreCoordinates) -> np.ndarray:
    """Index of each score's bias, `[T, S]`."""
    query_T, key_S = (np.asarray(x, np.int64) for x in (coordinates.query_T, coordinates.key_S))
    distances = np.asarray(coordinates.bias_NR).shape[1]
    return np.clip(key_S - query_T[:, None] + distances // 2, 0, distances - 1)


def mixed(seed: Any, first: Any, second: Any, rate: float) -> Any:
    """Replaces `layers.dropout.keep_mask`: works in numpy and JAX, and compiles quickly."""
    word = first.astype("uint32") * np.uint32(2654435761) + seed[..., 0]
    word = (word ^ (word >> 15)) * np.uint32(739982445) + second.astype("uint32")
    word = (word ^ (word >> 13)) * np.uint32(695872825) + seed[..., 1]
    return (word ^ (word >> 16)) % 1000 >= rate * 1000


def plain_weight(coordinates: ScoreCoordinates, rate: float) -> np.ndarray:
    """Factor by which dropout scales each probability."""
    if coordinates.seed_BN2 is None or rate == 0:
        return np.ones((1, 1, 1, 1))
    query_T, key_S, seed = (
        np.asarray(x) for x in (coordinates.query_T, coordinates.key_S, coordinates.seed_BN2)
    )
    return mixed(seed[:, :, None, None], query_T[:, None], key_S, rate) / (1 - rate)


def plain(
    q: Any, k: Any, v: Any, do: Any, coordinates: ScoreCoordinates, *, scores: Scores, rate: float
) -> Plain:
    """Softmax attention and its gradients by their definitions, in float64."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    seen, weight = plain_seen(coordinates, scores), plain_weight(coordinates, rate)
    scale = scores.scale
    s = np.einsum("BTNH,BSNH->BNTS", q, k) * scale
    if coordinates.bias_NR is not None:
        s = s + np.asarray(coordinates.bias_NR, np.float64)[:, plain_distances(coordinates)]
    s = np.where(seen, s, -np.inf)
    highest = s.max(-1, keepdims=True, where=seen, initial=-1e300)
    e = np.exp(s - highest)
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    dp = np.einsum("BTNH,BSNH->BNTS", do, v) * weight
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dbias = None
    if coordinates.bias_NR is not None:
        dbias = np.zeros(coordinates.bias_NR.shape)
        np.add.at(dbias.T, plain_distances(coordinates), np.moveaxis(ds.sum(0), 0, -1))
    ds = ds * scale
    log = np.log(total, where=total > 0, out=np.full_like(total, -np.inf))
    return Plain(
        np.einsum("BNTS,BSNH->BTNH", p * weight, v),
        (highest + log)[..., 0].swapaxes(1, 2),
        np.einsum("BNTS,BSNH->BTNH", ds, k),
        np.einsum("BNTS,BTNH->BSNH", ds, q),
        np.einsum("BNTS,BTNH->BSNH", p * weight, do),
        dbias,
    )


def difference(found: Any, want: np.ndarray) -> float:
    """Norm of the difference, relative to the norm of the wanted array."""
    assert found.shape == want.shape
    error = np.linalg.norm(np.asarray(found, np.float64) - want)
    return float(error / (np.linalg.norm(want) or 1))


def test_the_plain_attention_is_the_softmax_of_jax_and_its_gradients() -> None:
    q, k, v, do = np.random.default_rng(0).standard_normal((4, B, T, N, H))
    place = np.arange(T, dtype=np.int32)
    coordinates = ScoreCoordinates(place, place, seed_BN2=SEED_BN2)
    seen, weight = plain_seen(coordinates, CAUSAL), plain_weight(coordinates, 0.3)

    def attention(q: Any, k: Any, v: Any) -> Any:
        s = jnp.where(seen, jnp.einsum("BTNH,BSNH->BNTS", q, k) / H**0.5, -jnp.inf)
        o = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(s) * weight, v)
        return o, jax.nn.logsumexp(s, -1).swapaxes(1, 2)

    def both_ways(do: Any, *qkv: Any) -> Any:
        o, back, lse = jax.vjp(attention, *qkv, has_aux=True)
        return o, lse, *back(do)

    with jax.enable_x64(True):
        found = jax.jit(both_ways)(do, q, k, v)
    want = plain(q, k, v, do, coordinates, scores=CAUSAL, rate=0.3)
    for x, y in zip(found, want[:5], strict=True):
        assert difference(x, y) <= TOLERANCES["float64"]


# ---- merge -----------------------------------------------------------------------------------

merged, merged_at = jax.jit(merge), jax.jit(merge_at, static_argnames="dim")


def over_keys(*cuts: slice, empty_rows: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Splits one attention by keys: a pair o[B, T, N, H], logsumexp[B, T, N] for each cut.

    The first `empty_rows` queries see only the last key.
    """
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, B, T, N, H))
    k, v = rng.standard_normal((2, B, S, N, H))
    query_T = np.where(np.arange(T) < empty_rows, 0, 1)
    key_S = np.where(np.arange(S) == S - 1, 0, 1)
    found = []
    for cut in cuts:
        coordinates = ScoreCoordinates(query_T, key_S[cut])
        o, lse, *_ = plain(q, k[:, cut], v[:, cut], do, coordinates, scores=CAUSAL, rate=0.0)
        found.append((o, lse))
    return found


def hold_equal(found: tuple, want: tuple) -> None:
    np.testing.assert_allclose(found[0], want[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found[1], want[1], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("empty_rows", [0, 2])
def test_merged_parts_are_the_attention_to_all_their_keys(empty_rows: int) -> None:
    cuts = slice(0, 4), slice(4, S), slice(0, S)
    first, second, whole = over_keys(*cuts, empty_rows=empty_rows)
    assert np.isneginf(first[1]).any() == bool(empty_rows)
    with jax.enable_x64(True):
        hold_equal(merged(*first, *second), whole)
        hold_equal(merged(*second, *first), whole)


def test_merging_is_associative_also_with_rows_that_see_nothing() -> None:
    a, b, c = over_keys(slice(0, 2), slice(2, 5), slice(5, 8), empty_rows=2)
    with jax.enable_x64(True):
        left = merged(*merged(*a, *b), *c)
        hold_equal(left, tuple(np.asarray(x) for x in merged(*a, *merged(*b, *c))))
    assert np.isneginf(left[1][:, :2]).all()
    assert not np.asarray(left[0])[:, :2].any()


def test_merging_with_nothing_changes_nothing() -> None:
    (o, lse), (_, nowhere) = over_keys(slice(0, S), slice(0, 2), empty_rows=T)
    nothing = np.zeros_like(o), nowhere
    assert np.isneginf(nowhere).all()
    with jax.enable_x64(True):
        for found in (merged(o, lse, *nothing), merged(*nothing, o, lse)):
            np.testing.assert_array_equal(found[0], o)
            np.testing.assert_array_equal(found[1], lse)
        zero, still_nowhere = merged(*nothing, *nothing)
    np.testing.assert_array_equal(zero, nothing[0])
    np.testing.assert_array_equal(still_nowhere, nowhere)


@pytest.mark.parametrize("lse", [-5e4, 0.0, 5e4])
def test_merging_takes_logsumexps_of_any_size(lse: float) -> None:
    ones = jnp.ones((3, H))
    o, both = merged(ones, jnp.full(3, lse), 2 * ones, jnp.full(3, lse))
    # the weights are only as exact as float32 can be for a logsumexp of this size
    np.testing.assert_allclose(o, 1.5 * ones, rtol=1e-6 + abs(lse) * 2**-23)
    np.testing.assert_allclose(both, np.full(3, lse + math.log(2)), rtol=1e-6)


def test_merging_into_some_rows_leaves_the_others() -> None:
    whole, other = over_keys(slice(0, 4), slice(4, S))
    rows = slice(1, 4)
    with jax.enable_x64(True):
        piece = tuple(x[:, rows] for x in other)
        found = merged_at(whole, piece, jnp.int32(1), dim=1)
        want = merged(*(x[:, rows] for x in whole), *piece)
    for x, y, old in zip(found, want, whole, strict=True):
        np.testing.assert_array_equal(x[:, rows], y)
        np.testing.assert_array_equal(x[:, :1], old[:, :1])
        np.testing.assert_array_equal(x[:, 4:], old[:, 4:])


def test_merged_rows_keep_the_type_of_the_total() -> None:
    total = jnp.zeros((3, H)), jnp.full(3, -jnp.inf)
    other = jnp.ones((2, H), "bfloat16"), jnp.zeros(2)
    o, lse = merged_at(total, other, 1, dim=0)
    assert (o.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_array_equal(lse, [-np.inf, 0, 0])
    np.testing.assert_array_equal(o[:, 0], [0, 1, 1])


# ---- visible ---------------------------------------------------------------------------------

numbers = st.lists(st.integers(0, 9), min_size=6, max_size=6)
documents = st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=2, max_size=2)


@given(
    numbers,
    numbers,
    st.none() | st.tuples(st.none() | documents, documents),
    st.builds(Scores, st.just(1.0), st.booleans(), st.none() | st.integers(1, 9)),
)
def test_a_query_sees_what_the_definition_says(query, key, segments, scores: Scores) -> None:
    key = [*key[:-1], NOWHERE]
    pair = [None if x is None else np.array(x, np.int32) for x in segments or (None, None)]
    coordinates = ScoreCoordinates(np.array(query, np.int32), np.array(key, np.int32), *pair)
    found = np.asarray(visible(coordinates, scores))
    shape = (2, 1, 6, 6)
    want = plain_seen(coordinates, scores)
    np.testing.assert_array_equal(np.broadcast_to(found, shape), np.broadcast_to(want, shape))


def test_what_is_seen_by_hand() -> None:
    place = np.array([0, 1, 2], np.int32)
    causal = np.tril(np.ones((3, 3), bool))
    np.testing.assert_array_equal(visible(ScoreCoordinates(place, place), CAUSAL), causal)
    assert np.broadcast_to(visible(ScoreCoordinates(place, place), FULL), (3, 3)).all()
    segment = np.array([[0, 1, 1], [0, 0, -1]], np.int32)
    seen = visible(ScoreCoordinates(place, place, segment, segment), FULL)
    want = [[[1, 0, 0], [0, 1, 1], [0, 1, 1]], [[1, 1, 0], [1, 1, 0], [0, 0, 0]]]
    np.testing.assert_array_equal(seen[:, 0], np.array(want, bool))
    window = visible(
        ScoreCoordinates(place, place), CAUSAL._replace(window=2)
    )  # a token and the one before it
    np.testing.assert_array_equal(window, [[1, 0, 0], [1, 1, 0], [0, 1, 1]])


@pytest.mark.parametrize("scores", [CAUSAL, FULL, FULL._replace(window=NOWHERE)], ids=str)
def test_nobody_sees_a_key_that_is_nowhere(scores: Scores) -> None:
    query_T, key_S = np.array([0, NOWHERE - 1], np.int32), np.array([0, NOWHERE], np.int32)
    seen = np.broadcast_to(visible(ScoreCoordinates(query_T, key_S), scores), (2, 2))
    np.testing.assert_array_equal(seen, [[True, False]] * 2)


# ---- drop ------------------------------------------------------------------------------------

PLACE = np.arange(64, dtype=np.int32)


def test_dropping_nothing_is_the_identity() -> None:
    p = jnp.ones((B, N, 64, 64))
    assert drop(p, ScoreCoordinates(PLACE, PLACE, seed_BN2=SEED_BN2), Dropout(0.0, keep_mask)) is p
    assert drop(p, ScoreCoordinates(PLACE, PLACE), Dropout(0.3, keep_mask)) is p


def test_a_share_is_dropped_and_the_rest_scaled() -> None:
    p = np.random.default_rng(1).random((B, N, 64, 64)).astype(np.float32)
    coordinates = ScoreCoordinates(PLACE, PLACE, seed_BN2=jnp.asarray(SEED_BN2))
    found = np.asarray(jax.jit(drop, static_argnums=2)(p, coordinates, Dropout(0.3, keep_mask)))
    keep = keep_mask(coordinates.seed_BN2[:, :, None, None], PLACE[:, None], PLACE, 0.3)
    np.testing.assert_allclose(found, p * np.asarray(keep) / 0.7, rtol=1e-6)
    assert abs((found == 0).mean() - 0.3) < 0.01
    masks = (found == 0).reshape(B * N, -1)
    assert len({mask.tobytes() for mask in masks}) == B * N  # each head draws a different mask


def test_what_is_dropped_follows_positions_not_places_in_the_array() -> None:
    p = jnp.ones((B, N, 64, 64))
    rng = np.random.default_rng(2)
    rows, columns = rng.permutation(64), rng.permutation(64)
    whole = ScoreCoordinates(PLACE, PLACE, seed_BN2=jnp.asarray(SEED_BN2))
    moved = whole._replace(query_T=PLACE[rows], key_S=PLACE[columns])
    found = drop(p, moved, Dropout(0.3, keep_mask))
    want = np.asarray(drop(p, whole, Dropout(0.3, keep_mask)))[:, :, rows][..., columns]
    np.testing.assert_array_equal(found, want)
