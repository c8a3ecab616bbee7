"""Attention over a ring against plain attention to the whole sequence, and its messages."""

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
from turns import slow

from jaxptd.analysis.collective import Collective
from jaxptd.analysis.count import collectives_of
from jaxptd.attention.kernel import Dropout, Scores, Sites
from jaxptd.attention.ring import Ring, Tokens
from jaxptd.attention.xla import Xla
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.ring_attention import attend
from tests.attention.test_kernel import TOLERANCES, Plain, difference, mixed, plain

B, T, H = 2, 48, 5
TENSOR = P(Axis.DP, Axis.CP, Axis.TP)  # q[B/dp, T/cp, N/tp, H]
RINGS = [("zigzag", True), ("blockwise", True), ("blockwise", False), ("rsa", True)]


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention on a mesh. Its tokens are `order`ed as the devices hold them."""

    layout: Layout
    causal: bool = True
    window: int | None = None
    rate: float = 0.0
    documents: bool = False
    chunk: int = 2
    heads: int = 3

    def __str__(self) -> str:
        layout = str(self.layout) if self.layout.cp > 1 else f"one device {self.layout.ring}"
        chosen = [layout, "causal" if self.causal else "full"]
        chosen += [f"window {self.window}"] * bool(self.window)
        rich = ["dropout"] * bool(self.rate) + ["documents"] * self.documents
        return " ".join(chosen + rich).replace(" ", "-")

    @property
    def scores(self) -> Scores:
        return Scores(H**-0.5, self.causal, self.window)

    @property
    def mesh(self) -> Mesh:
        return make_mesh(self.layout)

    @property
    def ring(self) -> Ring:
        return Ring(Axis.CP, self.layout.ring)

    @property
    def block(self) -> int:
        return T // self.layout.cp

    @property
    def order(self) -> np.ndarray:
        return self.ring.order(T, self.layout.cp)

    def inputs(self) -> np.ndarray:
        """q, k, v and the output's gradient."""
        return np.random.default_rng(0).standard_normal((4, B, T, self.heads, H))

    def sites(self) -> Sites:
        """Sites of the whole sequence."""
        rng, place = np.random.default_rng(1), np.arange(T, dtype=np.int32)
        seed = rng.integers(0, 2**32, (B, self.heads, 2)).astype(np.uint32)
        segment = np.sort(rng.integers(0, 4, (B, T)), 1).astype(np.int32)
        segment[:, -5:] = -1
        segments = (segment, segment) if self.documents else (None, None)
        return Sites(place, place, *segments, seed if self.rate else None)

    def tokens(self) -> Tokens:
        sites, segment = self.sites(), None
        if sites.query_segment_BT is not None:
            segment = sites.query_segment_BT[:, self.order].reshape(B, self.layout.cp, -1)
        return Tokens(segment, sites.seed_BN2)

    def attention(self, tokens: Tokens) -> Callable[[Array, Array, Array], Array]:
        kernel = Xla(Dropout(self.rate, mixed), self.chunk)
        return partial(attend, tokens=tokens, ring=self.ring, kernel=kernel, scores=self.scores)

    def on_mesh(self, body: Callable, outs: Any) -> Callable:
        """Maps `body(tokens, q, k, v, do)` over the devices' blocks."""
        tokens = Tokens(P(Axis.DP), P(Axis.DP, Axis.TP))
        specs = {"in_specs": (tokens, *[TENSOR] * 4), "out_specs": outs}
        return jax.shard_map(body, mesh=self.mesh, **specs, check_vma=True)

    def arguments(self, dtype: str) -> tuple[Tokens, *tuple[Array, ...]]:
        return self.tokens(), *(jnp.asarray(x[:, self.order], dtype) for x in self.inputs())


def both_ways(case: Case, wrap: Callable = lambda attention: attention) -> Callable:
    """-> o, dq, dk, dv."""

    def body(tokens: Tokens, *qkvdo: Array) -> tuple[Array, ...]:
        *qkv, do = qkvdo
        o, back = jax.vjp(wrap(case.attention(tokens)), *qkv)
        return o, *back(do)

    return case.on_mesh(body, TENSOR)


def only_forward(case: Case) -> Callable:
    return case.on_mesh(lambda tokens, q, k, v, do: case.attention(tokens)(q, k, v), TENSOR)


def run(case: Case, dtype: str) -> tuple[list[np.ndarray], Plain]:
    """Results of the ring, in the sequence's order, and of plain attention."""
    with jax.enable_x64(dtype == "float64"):
        arguments = case.arguments(dtype)
        found = jax.jit(both_ways(case))(*arguments)
    inputs = [np.asarray(x, np.float64)[:, np.argsort(case.order)] for x in arguments[1:]]
    want = plain(*inputs, case.sites(), scores=case.scores, rate=case.rate)
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    return [np.asarray(x, np.float64)[:, np.argsort(case.order)] for x in found], want


def trace(case: Case, fn: Callable, dtype: str = "float32") -> Any:
    return jax.make_jaxpr(fn)(*case.arguments(dtype))


def moved(case: Case, fn: Callable, dtype: str) -> list[Collective]:
    return collectives_of(trace(case, fn, dtype), case.mesh)


def hold(case: Case, dtype: str) -> None:
    found, want = run(case, dtype)
    padding = np.isneginf(want.lse).all(-1)
    assert padding.any() == case.documents
    for name, x in zip(("o", "dq", "dk", "dv"), found, strict=True):
        assert difference(x, getattr(want, name)) <= TOLERANCES[dtype], name
        assert not x[padding].any(), name


def case(ring: Any, cp: int, *, rich: bool = False, causal: bool = True, **choice: Any) -> Case:
    rate = 0.1 if rich else 0.0
    return Case(Layout(cp=cp, ring=ring), rate=rate, documents=rich, causal=causal, **choice)


CASES = [
    case("zigzag", 1, rich=True, chunk=512),
    case("zigzag", 2),
    case("zigzag", 3, rich=True),
    case("zigzag", 8, rich=True),
    case("zigzag", 4, rich=True, causal=False),
    case("blockwise", 2, rich=True),
    case("blockwise", 8),
    case("blockwise", 3, rich=True, causal=False),
    case("rsa", 1, rich=True),
    case("rsa", 2),
    case("rsa", 4, rich=True),
    case("rsa", 8, rich=True, causal=False),
    case("zigzag", 4, window=17, rich=True),
    case("blockwise", 4, window=14, rich=True),
    case("blockwise", 2, window=1),
    case("rsa", 4, window=14, rich=True),
    case("blockwise", 3, window=20, causal=False),
]
ALL = [
    Case(Layout(cp=cp, ring=ring), causal=causal, rate=rate, documents=documents, chunk=4)
    for ring, cp, causal, rate, documents in itertools.product(
        ("zigzag", "blockwise", "rsa"), (2, 4, 8), (True, False), (0, 0.1), (False, True)
    )
]
WINDOWS = [
    Case(Layout(cp=cp, ring=ring), window=window, rate=0.1, documents=True, chunk=chunk)
    for ring, cp, window, chunk in itertools.product(
        ("zigzag", "blockwise", "rsa"), (3, 4, 8), (1, 2, 6, 13, 30, 47), (2, 512)
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ring_gives_the_attention_of_one_device(case: Case) -> None:
    hold(case, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL + WINDOWS, ids=lambda case: f"{case}-{case.chunk}")
def test_every_ring_gives_the_attention_of_one_device(case: Case) -> None:
    hold(case, "float64")


@pytest.mark.parametrize("case", [case("zigzag", 4, rich=True), case("rsa", 2)], ids=str)
def test_in_float32_too(case: Case) -> None:
    hold(case, "float32")


@pytest.mark.parametrize("ring", ["zigzag", "blockwise", "rsa"])
def test_a_ring_does_not_care_for_the_other_axes(ring: Any) -> None:
    """Sequences sharded over dp, heads over tp: each group of cp devices is a ring."""
    layout = Layout(dp=2, cp=2, tp=2, ring=ring)
    hold(Case(layout, rate=0.1, documents=True, heads=2), "float64")


@pytest.mark.parametrize(("ring", "cp"), [("zigzag", 3), slow("blockwise", 3), slow("rsa", 4)])
def test_hops_by_all_gathers_bring_the_same(ring: Any, cp: int) -> None:
    """On a mesh of two stages CPUs use no permute; the results are equal to the last bit."""
    each, other = (Case(Layout(cp=cp, ring=ring, pp=pp)) for pp in (2, 1))
    np.testing.assert_array_equal(run(each, "float64")[0], run(other, "float64")[0])
    assert {c.kind for c in moved(each, both_ways(each), "float32")} == {"all-gather"}


def test_more_devices_round_no_more_in_bfloat16() -> None:
    """Outputs and gradients are summed in float32, and rounded once at the end."""
    errors = []
    for cp in (1, 8):
        found, want = run(case("zigzag", cp), "bfloat16")
        wanted = (want.o, want.dq, want.dk, want.dv)
        errors.append([difference(x, y) for x, y in zip(found, wanted, strict=True)])
    assert max(errors[0]) < 2**-7
    np.testing.assert_array_less(errors[1], 1.2 * np.array(errors[0]))
