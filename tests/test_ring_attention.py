"""Attention over a ring against plain attention to the whole sequence; its communication."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from turns import latin, slow

from jaxptd.analysis.count import collectives_of
from jaxptd.attention.attend import AttentionInputs, Ring
from jaxptd.attention.kernel import Dropout, ScoreCoordinates, Scores
from jaxptd.attention.xla import Xla
from jaxptd.costs.collective import Collective
from jaxptd.mesh import SEQUENCE_AXES, Axis, Layout, make_mesh
from jaxptd.ring_attention import attend
from tests.attention.test_kernel import TOLERANCES, Plain, difference, mixed, plain

B, T, H = 2, 48, 5
TENSOR = P(Axis.DP, SEQUENCE_AXES, Axis.TP)  # q[B/dp, T/(cp ulysses), N/tp, H]
RINGS = [("zigzag", True), ("blockwise", True), ("blockwise", False), ("rsa", True)]


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention on a mesh, with tokens in the devices' `order`.

    keys: S, if keys come from another sequence. bias: whether scores have a bias by distance.
    group: heads of queries that share a head of keys and values.
    """

    layout: Layout
    causal: bool = True
    window: int | None = None
    rate: float = 0.0
    documents: bool = False
    chunk: int = 2
    heads: int = 3
    bias: bool = False
    keys: int = T
    group: int = 1

    def __str__(self) -> str:
        one = f"one device {self.layout.ring}"
        layout = str(self.layout) if self.layout.sequence_shards > 1 else one
        chosen = [layout, "causal" if self.causal else "full"]
        chosen += [f"window {self.window}"] * bool(self.window)
        rich = ["dropout"] * bool(self.rate) + ["documents"] * self.documents
        rich += ["bias"] * self.bias + [f"{self.keys} keys"] * (self.keys != T)
        rich += [f"groups of {self.group}"] * (self.group > 1)
        return " ".join(chosen + rich).replace(" ", "-")

    @property
    def scores(self) -> Scores:
        return Scores(H**-0.5, self.causal, self.window)

    @property
    def mesh(self) -> Mesh:
        return make_mesh(self.layout)

    @property
    def ring(self) -> Ring:
        heads = Axis.ULYSSES if self.layout.ulysses > 1 else None
        return Ring(Axis.CP, self.layout.ring, heads)

    @property
    def block(self) -> int:
        return T // self.layout.cp

    @property
    def order(self) -> np.ndarray:
        return self.orders[0]

    @property
    def orders(self) -> list[np.ndarray]:
        """Orders of the tokens of q, k, v and the output's gradient."""
        return [self.ring.order(n, self.layout.cp) for n in (T, self.keys, self.keys, T)]

    def inputs(self) -> list[np.ndarray]:
        """q, k, v and the output's gradient."""
        draw = np.random.default_rng(0).standard_normal
        heads = [self.heads // each for each in (1, self.group, self.group, 1)]
        return [draw((B, len(o), n, H)) for o, n in zip(self.orders, heads, strict=True)]

    def coordinates(self) -> ScoreCoordinates:
        """Sites of the whole sequences."""
        rng, both = np.random.default_rng(1), {T, self.keys}
        seed = rng.integers(0, 2**32, (B, self.heads, 2)).astype(np.uint32)
        place = {n: np.arange(n, dtype=np.int32) for n in both}
        segment = {n: np.sort(rng.integers(0, 4, (B, n)), 1).astype(np.int32) for n in both}
        for each in segment.values():
            each[:, -5:] = -1
        segments = (segment[T], segment[self.keys]) if self.documents else (None, None)
        bias = rng.standard_normal((self.heads, 2 * max(both) - 1)) if self.bias else None
        return ScoreCoordinates(
            place[T], place[self.keys], *segments, seed if self.rate else None, bias
        )

    def tokens(self) -> AttentionInputs:
        coordinates = self.coordinates()
        segments = zip(
            (coordinates.query_segment_BT, coordinates.key_segment_BS), self.orders, strict=False
        )
        each = (None if x is None else x[:, o].reshape(B, self.layout.cp, -1) for x, o in segments)
        return AttentionInputs(*each, coordinates.seed_BN2, coordinates.bias_NR)

    def attention(self, tokens: AttentionInputs) -> Callable[[Array, Array, Array], Array]:
        kernel = Xla(Dropout(self.rate, mixed), self.chunk)
        return partial(attend, inputs=tokens, ring=self.ring, kernel=kernel, scores=self.scores)

    def on_mesh(self, body: Callable, outs: Any) -> Callable:
        """Maps `body(tokens, q, k, v, do)` over the devices' blocks."""
        tokens = AttentionInputs(P(Axis.DP), P(Axis.DP), P(Axis.DP, Axis.TP), P(Axis.TP))
        specs = {"in_specs": (tokens, *[TENSOR] * 4), "out_specs": outs}
        return jax.shard_map(body, mesh=self.mesh, **specs, check_vma=True)

    def arguments(self, dtype: str) -> tuple[AttentionInputs, *tuple[Array, ...]]:
        inputs = zip(self.inputs(), self.orders, strict=True)
        return self.tokens(), *(jnp.asarray(x[:, order], dtype) for x, order in inputs)


def both_ways(case: Case, wrap: Callable = lambda attention: attention) -> Callable:
    """Computes o, dq, dk, dv and the gradient of the bias, which every device holds in full."""

    def body(tokens: AttentionInputs, *qkvdo: Array) -> tuple[Array, ...]:
        *qkv, do = qkvdo

        def attention(bias: Array | None, *qkv: Array) -> Array:
            return wrap(case.attention(tokens._replace(bias_NR=bias)))(*qkv)

        o, back = jax.vjp(attention, tokens.bias_NR, *qkv)
        d_bias, *d_qkv = back(do)
        return o, *d_qkv, d_bias

    return case.on_mesh(body, (*[TENSOR] * 4, P(Axis.TP)))


def only_forward(case: Case) -> Callable:
    return case.on_mesh(lambda tokens, q, k, v, do: case.attention(tokens)(q, k, v), TENSOR)


def run(case: Case, dtype: str) -> tuple[list[np.ndarray], Plain]:
    """Results of the ring in the sequences' order, and of plain attention."""
    with jax.enable_x64(dtype == "float64"):
        arguments = case.arguments(dtype)
        found = jax.jit(both_ways(case))(*arguments)
    backs = [np.argsort(order) for order in case.orders]
    inputs = zip(arguments[1:], backs, strict=True)
    whole = [np.asarray(x, np.float64)[:, back] for x, back in inputs]
    q, k, v, do = whole
    k, v = (np.repeat(x, case.group, 2) for x in (k, v))
    want = plain(q, k, v, do, case.coordinates(), scores=case.scores, rate=case.rate)
    dk, dv = (x.reshape(B, case.keys, -1, case.group, H).sum(3) for x in (want.dk, want.dv))
    want = want._replace(dk=dk, dv=dv)
    *found, d_bias = found
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    results = zip(found, [backs[0], *backs[:3]], strict=True)
    ordered = [np.asarray(x, np.float64)[:, back] for x, back in results]
    return ordered + ([np.asarray(d_bias)] if case.bias else []), want


def trace(case: Case, fn: Callable, dtype: str = "float32") -> Any:
    return jax.make_jaxpr(fn)(*case.arguments(dtype))


def moved(case: Case, fn: Callable, dtype: str) -> list[Collective]:
    return collectives_of(trace(case, fn, dtype), case.mesh)


def hold(case: Case, dtype: str) -> None:
    found, want = run(case, dtype)
    if case.bias:
        assert difference(found.pop(), want.dbias) <= TOLERANCES[dtype]
    padding = np.isneginf(want.lse).all(-1)
    assert padding.any() == case.documents
    segment = case.coordinates().key_segment_BS
    unread = np.zeros((B, case.keys), bool) if segment is None else segment < 0
    for name, x in zip(("o", "dq", "dk", "dv"), found, strict=True):
        assert difference(x, getattr(want, name)) <= TOLERANCES[dtype], name
        assert not x[padding if name in ("o", "dq") else unread].any(), name


def case(ring: Any, cp: int, *, rich: bool = False, causal: bool = True, **choice: Any) -> Case:
    rate = 0.1 if rich else 0.0
    return Case(Layout(cp=cp, ring=ring), rate=rate, documents=rich, causal=causal, **choice)


CASES = [
    slow(case("zigzag", 1, rich=True, chunk=512)),
    slow(case("zigzag", 2)),
    case("zigzag", 3, rich=True, bias=True),
    slow(case("zigzag", 8, rich=True)),
    slow(case("zigzag", 4, rich=True, causal=False)),
    slow(case("blockwise", 2, rich=True)),
    slow(case("blockwise", 8)),
    slow(case("blockwise", 3, rich=True, causal=False)),
    slow(case("rsa", 1, rich=True)),
    slow(case("rsa", 2)),
    slow(case("rsa", 4, rich=True)),
    slow(case("rsa", 8, rich=True, causal=False)),
    case("zigzag", 2, window=17),
    slow(case("zigzag", 4, window=17, rich=True)),
    case("blockwise", 4, window=14, rich=True),
    slow(case("blockwise", 2, window=1)),
    slow(case("rsa", 4, window=14, rich=True)),
    slow(case("blockwise", 3, window=20, causal=False)),
    case("zigzag", 4, bias=True, causal=False, keys=72, chunk=4),
    slow(case("blockwise", 2, bias=True, chunk=512)),
    slow(case("blockwise", 4, bias=True, causal=False, keys=20, rich=True, chunk=512)),
    case("rsa", 4, bias=True, causal=False, keys=72, rich=True),
    slow(case("gather", 1, rich=True)),
    slow(case("gather", 2)),
    case("gather", 3, rich=True, bias=True),
    slow(case("gather", 8, rich=True, chunk=1)),
    case("gather", 4, window=14, rich=True),
    slow(case("gather", 2, window=1)),
    case("gather", 4, bias=True, causal=False, keys=72, chunk=4),
    slow(case("gather", 4, causal=False, window=20, rich=True, chunk=512)),
]
KINDS = ("zigzag", "blockwise", "rsa", "gather")
MASKS = list(itertools.product((True, False), (0, 0.1), (False, True)))
ALL = [
    Case(Layout(cp=cp, ring=ring), causal=causal, rate=rate, documents=documents, chunk=4)
    for (causal, rate, documents), cp, ring in latin(MASKS, (2, 3, 4, 8), KINDS)
]
BIASES = [
    Case(Layout(cp=cp, ring=ring), causal, rate=0.1, documents=True, bias=True, keys=keys)
    for ring, cp, (causal, keys) in itertools.product(
        KINDS, (1, 3, 6), ((True, T), (False, T), (False, 36), (False, 60))
    )
]
WINDOWS = [
    Case(Layout(cp=cp, ring=ring), window=window, rate=0.1, documents=True, chunk=chunk)
    for (ring, cp), window, chunk in latin(
        list(itertools.product(KINDS, (3, 4, 8))), (1, 2, 6, 13, 30, 47), (2, 512)
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ring_gives_the_attention_of_one_device(case: Case) -> None:
    hold(case, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL + WINDOWS + BIASES, ids=lambda case: f"{case}-{case.chunk}")
def test_every_ring_gives_the_attention_of_one_device(case: Case) -> None:
    hold(case, "float64")


@pytest.mark.parametrize(
    "case", [slow(case("zigzag", 4, rich=True)), case("rsa", 2), slow(case("gather", 4))], ids=str
)
def test_in_float32_too(case: Case) -> None:
    hold(case, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("ring", KINDS)
def test_a_ring_does_not_care_for_the_other_axes(ring: Any) -> None:
    """Sequences sharded over dp, heads over tp: each group of cp devices is a ring."""
    layout = Layout(dp=2, cp=2, tp=2, ring=ring)
    hold(Case(layout, rate=0.1, documents=True, heads=2, bias=True), "float64")


@pytest.mark.slow
@pytest.mark.parametrize(("ring", "cp"), [("zigzag", 3), ("blockwise", 3), ("rsa", 4)])
def test_hops_by_all_gathers_bring_the_same(ring: Any, cp: int) -> None:
    """CPUs use no permute on a mesh of two stages; the results are equal to the last bit."""
    each, other = (Case(Layout(cp=cp, ring=ring, pp=pp)) for pp in (2, 1))
    np.testing.assert_array_equal(run(each, "float64")[0], run(other, "float64")[0])
    assert {c.kind for c in moved(each, both_ways(each), "float32")} == {"all-gather"}


@pytest.mark.slow
@pytest.mark.parametrize("ring", ["zigzag", "gather"])
def test_more_devices_round_no_more_in_bfloat16(ring: Any) -> None:
    """Outputs and gradients are summed in float32 and rounded once at the end."""
    errors = []
    for cp in (1, 8):
        found, want = run(case(ring, cp), "bfloat16")
        wanted = (want.o, want.dq, want.dk, want.dv)
        errors.append([difference(x, y) for x, y in zip(found, wanted, strict=True)])
    assert max(errors[0]) < 2**-7
    np.testing.assert_array_less(errors[1], 1.2 * np.array(errors[0]))
