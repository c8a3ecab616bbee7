"""Compares the kernel of chunked matmuls with plain softmax attention."""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from turns import slow

from jaxptd.analysis.jaxprs import inside
from jaxptd.attention.kernel import Dropout, Saved, ScoreCoordinates, Scores
from jaxptd.attention.xla import Xla
from tests.attention.test_kernel import TOLERANCES, Plain, difference, mixed, plain

B, N, H = 2, 3, 5
SEED_BN2 = np.random.default_rng(9).integers(0, 2**32, (B, N, 2)).astype(np.uint32)
DOCUMENTS = [0, 0, 1, 1, 1, 3, 3]  # a short sequence; padding follows


@dataclasses.dataclass(frozen=True)
class Case:
    """Numbers of queries and keys; the queries are the last tokens, or all with `halves`.

    halves: use the positions of a zigzag block, two runs with a gap between them. documents: number
    each token's document, with padding at the end. bias: add one to the scores, by distance.
    """

    queries: int
    keys: int
    chunk: int
    causal: bool = True
    window: int | None = None
    rate: float = 0.0
    documents: bool = False
    halves: bool = False
    bias: bool = False

    @property
    def scores(self) -> Scores:
        return Scores(H**-0.5, self.causal, self.window)

    @property
    def kernel(self) -> Xla:
        return Xla(Dropout(self.rate, mixed), self.chunk)

    def coordinates(self) -> ScoreCoordinates:
        key_S = np.arange(self.keys, dtype=np.int32)
        if self.halves:
            key_S = np.where(key_S < self.keys // 2, key_S + 4, key_S + 40).astype(np.int32)
        first = max(self.keys - self.queries, 0)
        query_T = key_S if self.queries == self.keys else first + np.arange(self.queries)
        segments: tuple = (None, None)
        if self.documents:
            segments = (self._documents(self.queries), self._documents(self.keys))
        seed = SEED_BN2 if self.rate else None
        distances = 2 * max(self.queries, self.keys) + 1  # one more than can occur
        bias = np.random.default_rng(2).standard_normal((N, distances)) if self.bias else None
        arrays = (query_T.astype(np.int32), key_S, *segments, seed, bias)
        return ScoreCoordinates(*(None if x is None else jnp.asarray(x) for x in arrays))

    def _documents(self, length: int) -> np.ndarray:
        names = np.full((B, length), -1, np.int32)
        names[0, : len(DOCUMENTS)] = DOCUMENTS[:length]
        names[1, : length - 1] = 2
        return names

    def inputs(self, dtype: str) -> list[Array]:
        rng = np.random.default_rng(0)
        lengths = (self.queries, self.keys, self.keys, self.queries)
        return [jnp.asarray(rng.standard_normal((B, n, N, H)), dtype) for n in lengths]


@partial(jax.jit, static_argnums=0, static_argnames="scores")
def both_ways(
    kernel: Xla,
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    coordinates: ScoreCoordinates,
    *,
    scores: Scores,
) -> Any:
    o, lse = kernel.fwd(q, k, v, coordinates, scores=scores)
    return o, lse, *kernel.bwd(Saved(q, k, v, o, lse), do, coordinates, scores=scores)


def run(case: Case, dtype: str) -> tuple[tuple[Array, ...], Plain]:
    """Results of the kernel and of plain attention."""
    with jax.enable_x64(dtype == "float64"):
        inputs, coordinates = case.inputs(dtype), case.coordinates()
        found = both_ways(case.kernel, *inputs, coordinates, scores=case.scores)
    want = plain(
        *(np.asarray(x, "float64") for x in inputs), coordinates, scores=case.scores, rate=case.rate
    )
    return found, want


def hold(case: Case, dtype: str) -> None:
    found, want = run(case, dtype)
    some = np.isfinite(want.lse)
    np.testing.assert_array_equal(np.isneginf(found[1]), ~some)
    for name, x, y in zip(want._fields, found, want, strict=True):
        if x is None and y is None:
            continue
        x, y = (np.where(some, x, 0), np.where(some, y, 0)) if name == "lse" else (x, y)
        assert difference(x, y) <= TOLERANCES[dtype], name


CASES = [
    Case(7, 7, 3, rate=0.3, documents=True),
    Case(11, 5, 3, documents=True),
    Case(1, 1, 1),
    Case(12, 12, 5, halves=True, window=3),
    Case(9, 9, 512, causal=False, window=2, rate=0.3),
    Case(7, 16, 5, causal=False, bias=True),
]
MORE = [
    Case(13, 13, 5, causal=False, documents=True),
    Case(12, 12, 5, halves=True, rate=0.3),
    Case(5, 11, 4, rate=0.3),
    Case(13, 13, 4, window=6, rate=0.3, documents=True),
    Case(13, 13, 4, causal=False, rate=0.3, documents=True, bias=True),
    Case(16, 7, 512, causal=False, rate=0.3, bias=True),
    Case(8, 8, 512),
    Case(8, 8, 4, rate=0.3),
    Case(13, 13, 4, causal=False, rate=0.3),
    Case(5, 11, 4, causal=False),
    Case(5, 11, 4, window=4),
    Case(12, 12, 5, bias=True),
    Case(3, 16, 4, bias=True),
]


@pytest.mark.parametrize("case", [*CASES, *map(slow, MORE)], ids=str)
def test_value_logsumexp_and_gradients_are_the_plain_ones(case: Case) -> None:
    hold(case, "float64")


@pytest.mark.parametrize("case", [CASES[0], slow(MORE[8])], ids=str)
def test_in_float32_too(case: Case) -> None:
    hold(case, "float32")


lengths = st.integers(1, 19)
cases = st.builds(
    lambda queries, keys, chunk, rich, **scores: Case(
        queries, keys or queries, chunk, rate=0.3 * rich, documents=rich, **scores
    ),
    lengths,
    st.none() | lengths,
    st.integers(1, 21),
    st.booleans(),
    causal=st.booleans(),
    bias=st.booleans(),
    window=st.none() | lengths,
)


@pytest.mark.slow
@given(cases)
@settings(max_examples=100)
def test_any_lengths_and_chunks(case: Case) -> None:
    hold(case, "float64")


@pytest.mark.parametrize("case", [CASES[0], slow(CASES[3]), slow(Case(8, 8, 512))], ids=str)
@pytest.mark.parametrize("dtype", ["float64", slow("bfloat16")])
def test_a_layer_has_its_cap_or_none_at_all(case: Case, dtype: str) -> None:
    """Scores reach several times the cap. Programs may round otherwise in a few last bits."""
    scores = case.scores._replace(scale=9.0)
    with jax.enable_x64(dtype == "float64"):
        inputs, coordinates = case.inputs(dtype), case.coordinates()

        def results(capped: bool | None, cap: float | None) -> list[np.ndarray]:
            own = coordinates._replace(capped=None if capped is None else jnp.asarray(capped))
            found = both_ways(case.kernel, *inputs, own, scores=scores._replace(cap=cap))
            return [np.asarray(x) for x in jax.tree.leaves(found)]

        plain, capped = results(None, None), results(None, 2.0)
        for x, y, of_plain, of_capped in zip(
            results(False, 2.0), results(True, 2.0), plain, capped, strict=True
        ):
            pairs = [
                tuple(np.asarray(z, float) for z in each)
                for each in ((x, of_plain), (y, of_capped))
            ]
            few = 8 * float(jnp.finfo(x.dtype).eps)
            for found, expected in pairs:
                largest = np.abs(expected[np.isfinite(expected)]).max()
                np.testing.assert_allclose(found, expected, rtol=0, atol=few * largest)
            assert not np.allclose(pairs[0][1], pairs[1][1], rtol=0, atol=2 * few * largest)


def test_a_query_that_sees_nothing_gives_nothing_and_gets_no_gradient() -> None:
    case = Case(11, 11, 4, rate=0.3, documents=True)
    (o, lse, dq, dk, dv, _), _ = run(case, "float32")
    padding = np.asarray(case.coordinates().query_segment_BT) < 0
    assert padding.any()
    for x in (o, dq, dk, dv):
        assert np.isfinite(x).all()
        assert not np.asarray(x)[padding].any()
    assert np.isneginf(np.asarray(lse)[padding]).all()
    assert np.isfinite(np.asarray(lse)[~padding]).all()


@pytest.mark.parametrize("chunk", [3, slow(512)])
def test_keys_of_a_cache_that_are_not_written_yet_are_not_seen(chunk: int) -> None:
    case = Case(8, 8, chunk)
    q, k, v, _ = case.inputs("float32")
    coordinates = ScoreCoordinates(jnp.array([2], jnp.int32), jnp.arange(8, dtype=jnp.int32))
    garbage = k.at[:, 3:].set(1e3), v.at[:, 3:].set(1e3)
    fwd = jax.jit(partial(case.kernel.fwd, scores=case.scores))
    o, lse = fwd(q[:, 2:3], *garbage, coordinates)
    whole, whole_lse = fwd(q[:, :3], k[:, :3], v[:, :3], cut(coordinates, 3))
    np.testing.assert_allclose(o, whole[:, 2:], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse[:, 2:], rtol=1e-6)


def cut(coordinates: ScoreCoordinates, length: int) -> ScoreCoordinates:
    return coordinates._replace(
        query_T=coordinates.key_S[:length], key_S=coordinates.key_S[:length]
    )


def test_bfloat16_keeps_its_softmax_and_sums_in_float32() -> None:
    found, want = run(Case(16, 16, 4), "bfloat16")
    assert {x.dtype for x in found[:5]} == {jnp.dtype("float32")}
    assert difference(found[1], want.lse) <= TOLERANCES["float32"]
    assert difference(found[0], want.o) < 2**-8  # one rounding, of the probabilities
    for x, y in zip(found[2:5], want[2:5], strict=True):
        assert difference(x, y) < 2**-7  # and a second, of the scores' gradients


def test_bfloat16_rounds_the_probabilities_and_the_scores_gradients_alone() -> None:
    """Checks the jaxpr, because XLA on CPU computes in float32 what the program rounds."""
    case = Case(16, 16, 4)
    made = [e for e, _ in equations(trace(case, "bfloat16")) if e.outvars]
    multiplied = [e.outvars[0].aval for e in made if e.primitive.name == "dot_general"]
    assert {aval.dtype for aval in multiplied} == {jnp.dtype("float32")}
    rounded = [
        e.outvars[0].aval.shape
        for e in made
        if e.primitive.name == "convert_element_type" and e.outvars[0].aval.dtype == jnp.bfloat16
    ]
    assert rounded == [(B * N, 4, 4)] * 3  # forward: p; backward: p and the gradient of s


def test_dropped_values_depend_on_the_head_and_the_sequence() -> None:
    case = Case(8, 8, 512, rate=0.5, causal=False)
    q, k, v, _ = (jnp.ones((B, 8, N, H)) for _ in range(4))
    o, _ = jax.jit(partial(case.kernel.fwd, scores=case.scores))(q, k, v, case.coordinates())
    rows = np.asarray(o)[..., 0].swapaxes(1, 2).reshape(B * N, 8)
    assert len({row.tobytes() for row in rows}) == B * N


# ---- work and memory -------------------------------------------------------------------------


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields every equation of a jaxpr and of nested jaxprs, with how often it runs.

    Every branch of a conditional counts.
    """
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation, times
        for inner in inside(equation):
            yield from equations(inner, times * equation.params.get("length", 1))


def products(jaxpr: Any) -> int:
    """Number of multiplications in matmuls."""
    total = 0
    for equation, times in equations(jaxpr):
        if equation.primitive.name == "dot_general":
            left, _ = (variable.aval.shape for variable in equation.invars)
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(left[i] for i in contracted)
            total += times * inner * math.prod(equation.outvars[0].aval.shape)
    return total


def shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    """Shapes of all intermediate arrays."""
    made = (variable.aval for equation, _ in equations(jaxpr) for variable in equation.outvars)
    return {aval.shape for aval in made if hasattr(aval, "shape")}


def trace(case: Case, dtype: str = "float32") -> Any:
    run = partial(both_ways, case.kernel, scores=case.scores)
    return jax.make_jaxpr(run)(*case.inputs(dtype), case.coordinates())


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        (Case(16, 16, 4), 10),  # of the 4 x 4 chunks, those on and below the diagonal
        (Case(16, 16, 4, causal=False), 16),
        (Case(16, 16, 16), 1),
        (Case(16, 16, 4, window=1), 4),  # only the diagonal
        (Case(16, 16, 4, window=5), 7),  # and the chunks next to it
        (Case(16, 16, 4, window=6), 9),
        (Case(8, 16, 4), 8),  # positions of queries unknown: all chunks
    ],
    ids=str,
)
def test_chunks_that_no_query_sees_are_not_computed(case: Case, pairs: int) -> None:
    side = min(case.chunk, case.queries)
    # forward: scores and output; backward: scores, dp, dv, dq, dk, and do times o
    assert products(trace(case)) == pairs * B * N * side * H * (7 * side + 1)


@pytest.mark.parametrize("causal", [True, False])
def test_no_array_is_larger_than_a_chunk_in_both_dims_of_the_scores(causal: bool) -> None:
    made = shapes(trace(Case(48, 48, 8, causal=causal)))
    assert (B * N, 8, 8) in made
    assert not [shape for shape in made if sum(size > 8 for size in shape) > 1]


def temporary_bytes(length: int) -> int:
    case = Case(length, length, 64)
    arguments = *case.inputs("float32"), case.coordinates()
    lowered = both_ways.lower(case.kernel, *arguments, scores=case.scores)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_length_not_with_its_square() -> None:
    assert temporary_bytes(1024) <= 2.2 * temporary_bytes(512)
