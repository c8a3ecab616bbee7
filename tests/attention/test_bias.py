"""Bias by distance: how a head's vector lands on a block of scores, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.attention.attend import AttentionInputs, Ring
from jaxptd.attention.kernel import (
    Dropout,
    ScoreCoordinates,
    Scores,
    add_bias,
    bias_gradient,
    check_distances,
)
from jaxptd.attention.xla import Xla
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.ring_attention import attend
from tests.attention.test_kernel import TOLERANCES, difference
from tests.attention.test_xla import Case, N, both_ways

# Two heads, for keys from 2 before to 2 after the query.
BIAS = np.arange(-2, 3) + np.array([[0.0], [10]])


def coordinates(query: int, key: int) -> ScoreCoordinates:
    """Coordinates of two queries and three keys that begin at these positions."""
    query_T, key_S = query + np.arange(2), key + np.arange(3)
    return ScoreCoordinates(
        *(jnp.asarray(x, jnp.int32) for x in (query_T, key_S)), bias_NR=jnp.asarray(BIAS)
    )


@pytest.mark.parametrize(("query", "key"), [(0, 0), (1, 0), (0, 1), (7, 6)])
def test_a_score_gets_the_number_of_its_distance(query: int, key: int) -> None:
    head = key - query + np.array([[0, 1, 2], [-1, 0, 1]])
    found = add_bias(jnp.zeros((1, 2, 2, 3)), coordinates(query, key), groups=1)
    inside = np.abs(head) <= 2  # only padding is further away, and no query sees it
    for n, want in enumerate((head, head + 10)):
        np.testing.assert_array_equal(np.asarray(found)[0, n][inside], want[inside])


def test_a_gradient_is_the_sum_over_the_scores_of_a_distance() -> None:
    ds = np.array([[1.0, 2, 4], [8, 16, 32]])
    found = bias_gradient(jnp.asarray([[ds, 2 * ds]]), coordinates(5, 4))
    head = np.array([8, 1 + 16, 2 + 32, 4, 0])
    np.testing.assert_array_equal(found, [head, 2 * head])


def test_there_is_no_gather_and_no_scatter() -> None:
    """On GPUs, a scatter adds in any order."""

    def both_ways(ds: jax.Array, where: ScoreCoordinates) -> tuple:
        return add_bias(ds, where, groups=1), bias_gradient(ds, where)

    text = str(jax.make_jaxpr(both_ways)(jnp.zeros((1, 2, 2, 3)), coordinates(0, 0)))
    assert "gather" not in text and "scatter" not in text


@pytest.mark.parametrize("chunk", [slow(4), 512])
def test_heads_of_a_group_have_a_bias_each(chunk: int) -> None:
    """One kv head shared by all queries equals that head, repeated."""
    case = Case(7, 7, chunk, bias=True)
    q, k, v, do = case.inputs("float32")
    k, v = (jnp.repeat(x[:, :, :1], N, axis=2) for x in (k, v))
    run = partial(both_ways, case.kernel, scores=case.scores)
    want = [np.asarray(x) for x in run(q, k, v, do, case.coordinates())]
    want[3:5] = (x.sum(2, keepdims=True) for x in want[3:5])  # gradients of k and v
    for x, y in zip(run(q, k[:, :, :1], v[:, :, :1], do, case.coordinates()), want, strict=True):
        assert difference(x, y) <= TOLERANCES["float32"]


@pytest.mark.parametrize(("distances", "longest"), [(5, 4), (6, 3), (8, 4)])
def test_a_bias_without_all_distances_is_refused(distances: int, longest: int) -> None:
    words = f"a bias of {distances} distances: {longest} tokens need {2 * longest - 1}, or a larger"
    with pytest.raises(ValueError, match=words):
        check_distances(jnp.zeros((2, distances)), longest)
    check_distances(jnp.zeros((2, 2 * longest + 1)), longest)


@pytest.mark.parametrize(
    ("keys", "distances", "words"),
    [
        (6, 13, "causal attention of 4 queries to 6 keys of another sequence"),
        (4, 13, "a bias of 13 distances: 8 tokens need 15"),
    ],
)
def test_a_ring_refuses_too_short_a_bias_and_causal_attention_of_two_lengths(
    keys: int, distances: int, words: str
) -> None:
    spec, kernel = P(None, Axis.CP), Xla(Dropout(0.0, lambda *_: True))
    q, kv = np.zeros((1, 8, 2, 4), np.float32), np.zeros((1, 2 * keys, 2, 4), np.float32)

    def body(q: jax.Array, kv: jax.Array) -> jax.Array:
        tokens = AttentionInputs(bias_NR=jnp.zeros((2, distances)))
        return attend(q, kv, kv, tokens, ring=Ring(Axis.CP), kernel=kernel, scores=Scores(1.0))

    mesh = make_mesh(Layout(cp=2))
    with pytest.raises(ValueError, match=words):
        jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(q, kv)
