"""Attention by matmuls on a grid against plain attention to the whole sequence."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.attention.attend import AttentionInputs, Ring
from jaxptd.attention.kernel import Dropout, ScoreCoordinates, Scores
from jaxptd.layers.grid_attention import attend
from jaxptd.matmul.grid import Grid
from jaxptd.matmul.padding import panels
from jaxptd.mesh import Axis, Layout, make_mesh
from tests.attention.test_kernel import TOLERANCES, Plain, difference, mixed, plain
from tests.attention.test_xla import shapes

B, T, N, H = 2, 8, 3, 5  # neither heads nor their size divide over any grid
TENSOR = P(Axis.DP, (Axis.CP, Axis.ROW), None, Axis.COL)  # q[B/dp, T/(cp*row), N, H/col]


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention on a grid."""

    layout: Layout
    causal: bool = True
    window: int | None = None
    rate: float = 0.0
    documents: bool = False
    size: float = 1.0  # of q and k
    bias: bool = False
    keys: int = T

    def __str__(self) -> str:
        rich = ["dropout"] * bool(self.rate) + ["documents"] * self.documents
        rich += ["bias"] * self.bias + [f"{self.keys} keys"] * (self.keys != T)
        kind = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        return " ".join([str(self.layout), kind, *rich]).replace(" ", "-")

    @property
    def scores(self) -> Scores:
        return Scores(H**-0.5, self.causal, self.window)

    @property
    def grid(self) -> Grid:
        return Grid(self.layout.matmul2d, self.layout.matmul2d_slices)

    @property
    def ring(self) -> Ring:
        return Ring((Axis.CP,), self.layout.ring)

    def order(self, length: int) -> np.ndarray:
        """Positions in the order of the devices along cp."""
        return self.ring.order(length, self.layout.cp)

    def inputs(self) -> list[np.ndarray]:
        """q, k, v and the output's gradient."""
        draw, sizes = np.random.default_rng(0).standard_normal, (self.size, self.size, 1, 1)
        lengths = (T, self.keys, self.keys, T)
        return [size * draw((B, n, N, H)) for size, n in zip(sizes, lengths, strict=True)]

    def padded_inputs(self, dtype: str) -> list[Array]:
        """The inputs in the devices' order, with H zero-padded to a size that divides."""
        more = -H % panels(self.layout.row, self.layout.col, self.layout.matmul2d_slices)
        pad = [(0, 0)] * 3 + [(0, more)]
        held = (x[:, self.order(x.shape[1])] for x in self.inputs())
        return [jnp.asarray(np.pad(x, pad), dtype) for x in held]

    def coordinates(self) -> ScoreCoordinates:
        """Sites of the whole sequence."""
        rng, both = np.random.default_rng(1), {T, self.keys}
        seed = rng.integers(0, 2**32, (B, N, 2)).astype(np.uint32)
        place = {n: np.arange(n, dtype=np.int32) for n in both}
        segment = {n: np.sort(rng.integers(0, 3, (B, n)), 1).astype(np.int32) for n in both}
        for each in segment.values():
            each[:, -2:] = -1
        segments = (segment[T], segment[self.keys]) if self.documents else (None, None)
        bias = rng.standard_normal((N, 2 * max(both) - 1)) if self.bias else None
        return ScoreCoordinates(
            place[T], place[self.keys], *segments, seed if self.rate else None, bias
        )

    def tokens(self) -> AttentionInputs:
        coordinates = self.coordinates()
        segments = (coordinates.query_segment_BT, coordinates.key_segment_BS)
        parts = (B, self.layout.cp, -1)
        each = (x if x is None else x[:, self.order(x.shape[1])].reshape(parts) for x in segments)
        return AttentionInputs(*each, coordinates.seed_BN2, coordinates.bias_NR)

    def both_ways(self) -> Any:
        """(tokens, q, k, v, do) -> o, dq, dk, dv and the gradient of the bias."""

        def body(tokens: AttentionInputs, *qkvdo: Array) -> tuple[Array, ...]:
            *qkv, do = qkvdo
            how = {"dropout": Dropout(self.rate, mixed), "scores": self.scores}

            def attention(bias: Array | None, *qkv: Array) -> Array:
                own = tokens._replace(bias_NR=bias)
                return attend(*qkv, own, grid=self.grid, ring=self.ring, **how)

            o, back = jax.vjp(attention, tokens.bias_NR, *qkv)
            d_bias, *d_qkv = back(do)
            return o, *d_qkv, d_bias

        by_sample = AttentionInputs(P(Axis.DP), P(Axis.DP), P(Axis.DP), P())
        specs = {"in_specs": (by_sample, *[TENSOR] * 4), "out_specs": (*[TENSOR] * 4, P())}
        return jax.shard_map(body, mesh=make_mesh(self.layout), **specs, check_vma=True)


def run(case: Case, dtype: str) -> tuple[list[np.ndarray], Plain]:
    """Results of the grid and of plain attention."""
    with jax.enable_x64(dtype == "float64"):
        inputs = case.padded_inputs(dtype)
        found = jax.jit(case.both_ways())(case.tokens(), *inputs)
    assert {x.dtype for x in found[:4]} == {jnp.dtype(dtype)}
    whole = [in_text_order(x, case)[..., :H] for x in inputs]
    want = plain(*whole, case.coordinates(), scores=case.scores, rate=case.rate)
    *tensors, d_bias = found
    bias = [] if d_bias is None else [np.asarray(d_bias, np.float64)]
    return [in_text_order(x, case) for x in tensors] + bias, want


def in_text_order(x: Array, case: Case) -> np.ndarray:
    order = case.order(x.shape[1])
    return np.asarray(x, np.float64)[:, np.argsort(order)]


def hold(case: Case, dtype: str) -> None:
    found, want = run(case, dtype)
    unseen = np.isneginf(want.lse).all(-1)
    assert unseen.any() == case.documents
    if case.bias:
        assert difference(found.pop(), want.dbias) <= TOLERANCES[dtype]
    segment = case.coordinates().key_segment_BS
    unread = np.zeros((B, case.keys), bool) if segment is None else segment < 0
    for name, x in zip(("o", "dq", "dk", "dv"), found, strict=True):
        assert difference(x[..., :H], getattr(want, name)) <= TOLERANCES[dtype], name
        assert not x[..., H:].any(), name  # padding
        assert not x[unseen if name in ("o", "dq") else unread].any(), name


def case(row: int, col: int, kind: Any = "gather", *, rich: bool = False, **choice: Any) -> Case:
    others = {name: choice.pop(name) for name in ("dp", "cp", "ring") if name in choice}
    layout = Layout(**others, row=row, col=col, matmul2d=kind, attention2d="blocks")
    return Case(layout, rate=0.3 if rich else 0.0, documents=rich, **choice)


CASES = [
    case(2, 4, rich=True),
    case(2, 2, "fox", rich=True),
    case(1, 2, "summa", rich=True, causal=False, cp=2, bias=True, keys=16),
    case(2, 1, rich=True, window=3, cp=2, ring="blockwise", bias=True),
    case(2, 2, "cannon", cp=2, ring="rsa"),
]
MORE = [
    case(2, 2),
    case(4, 2, causal=False),
    case(4, 2, "summa", rich=True, causal=False),
    case(2, 2, "cannon", rich=True, dp=2, bias=True),
    case(1, 8, rich=True),
    case(2, 4, rich=True, window=3),
    case(2, 4, rich=True, causal=False, bias=True, keys=16),
    case(2, 2, rich=True, cp=2),
]


@pytest.mark.parametrize("case", [*CASES, *map(slow, MORE)], ids=str)
def test_attention_in_blocks_is_that_of_one_device(case: Case) -> None:
    """Both drop the same probabilities."""
    hold(case, "float64")


@pytest.mark.parametrize("case", [slow(CASES[0]), CASES[1]], ids=str)
def test_in_float32_too(case: Case) -> None:
    hold(case, "float32")


@pytest.mark.parametrize("size", [slow(1.0), 3.0])
def test_bfloat16_rounds_probabilities_and_not_scores(size: float) -> None:
    """Scores of any size and softmax use float32, so the output is exact to its precision."""
    found, want = run(case(2, 4, size=size), "bfloat16")
    assert difference(found[0][..., :H], want.o) <= 2**-8
    for x, y in zip(found[1:4], (want.dq, want.dk, want.dv), strict=True):
        assert difference(x[..., :H], y) <= 2**-6


def test_each_device_makes_its_block_of_the_scores() -> None:
    each = case(2, 4, rich=True)
    made = shapes(jax.make_jaxpr(each.both_ways())(each.tokens(), *each.padded_inputs("float32")))
    scores = {shape[2:] for shape in made if len(shape) == 4 and shape[:2] == (B, N)}
    assert (T // 2, T // 4) in scores
    assert (T, T) not in scores
    assert max(np.prod(shape, dtype=int) for shape in scores) <= T * T // 2  # as it is gathered
