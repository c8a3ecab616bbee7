"""Attention where devices hold any tokens of each sample, against plain attention."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.attention.attend import AttentionInputs, attend
from jaxptd.attention.kernel import Dropout
from jaxptd.attention.xla import Xla
from jaxptd.mesh import Axis, Layout
from tests.attention.test_kernel import TOLERANCES, difference, mixed, plain
from tests.test_ring_attention import TENSOR, B, Case, H, T

BLOCK = 6  # tokens of a block with cp=4


def orders(kind: str) -> np.ndarray:
    """Positions of the tokens in the order in which devices hold them, `[B, T]`."""
    draw = np.random.default_rng(5)
    if kind == "tokens":
        return np.stack([draw.permutation(T) for _ in range(B)])
    blocks = np.stack([draw.permutation(T // BLOCK) for _ in range(B)])
    return (blocks[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(B, T)


def along(x: np.ndarray, order_BT: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, order_BT.reshape(*order_BT.shape, *[1] * (x.ndim - 2)), 1)


def run(case: Case, order_BT: np.ndarray, qkvdo: list[np.ndarray]) -> list[np.ndarray]:
    """o, dq, dk, dv in the sequences' order."""
    coordinates = case.coordinates()
    parts = (B, case.layout.cp, -1)
    segment, position = (
        jnp.asarray(along(x, order_BT).reshape(parts), jnp.int32)
        for x in (coordinates.query_segment_BT, np.broadcast_to(np.arange(T), (B, T)))
    )
    tokens = AttentionInputs(segment, segment, coordinates.seed_BN2, position_BCT=position)
    each = P(Axis.DP)
    specs = AttentionInputs(each, each, P(Axis.DP, Axis.TP), position_BCT=each)
    kernel = Xla(Dropout(case.rate, mixed), 512)

    def body(tokens: AttentionInputs, *qkvdo: Array) -> tuple[Array, ...]:
        one = partial(attend, inputs=tokens, ring=case.ring, kernel=kernel, scores=case.scores)
        o, back = jax.vjp(one, *qkvdo[:3])
        return o, *back(qkvdo[3])

    on_mesh = jax.shard_map(
        body, mesh=case.mesh, in_specs=(specs, *[TENSOR] * 4), out_specs=(*[TENSOR] * 4,)
    )
    found = jax.jit(on_mesh)(tokens, *(along(x, order_BT) for x in qkvdo))
    return [along(np.asarray(x), np.argsort(order_BT, 1)) for x in found]


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("tokens", {"rate": 0.1}),
        slow("blocks", {"window": 9}),
        slow("blocks", {"window": 9, "rate": 0.1}),
    ],
)
def test_any_placement_of_tokens_is_plain_attention(kind: str, choice: dict[str, Any]) -> None:
    case, order_BT = Case(Layout(cp=4, ring="gather"), documents=True, **choice), orders(kind)
    with jax.enable_x64(True):
        found = run(case, order_BT, case_inputs(case))
    want = plain(*case_inputs(case), case.coordinates(), scores=case.scores, rate=case.rate)
    for name, x in zip(("o", "dq", "dk", "dv"), found, strict=True):
        assert difference(x, getattr(want, name)) <= TOLERANCES["float64"], name


def case_inputs(case: Case) -> list[np.ndarray]:
    """q, k, v and the output's gradient in the sequences' order."""
    draw = np.random.default_rng(0).standard_normal
    return [draw((B, T, case.heads, H)) for _ in range(4)]


def test_keys_after_all_queries_of_a_chunk_are_not_read() -> None:
    """Keys that are not numbers, in the last block: no chunk of queries before it visits them.

    Both samples have the same order: a chunk that one of them needs is visited for both.
    """
    case, order_BT = Case(Layout(cp=4, ring="gather"), documents=True), orders("blocks")
    order_BT[1] = order_BT[0]
    q, k, v, do = case_inputs(case)
    for x in (k, v):
        x[:, -BLOCK:] = np.nan
    o, dq, _, _ = run(case, order_BT, [x.astype(np.float32) for x in (q, k, v, do)])
    for x in (o, dq):
        assert np.isfinite(x[:, :-BLOCK]).all()


def test_rings_refuse_positions_of_samples() -> None:
    case = Case(Layout(cp=4), documents=True)
    with pytest.raises(ValueError, match="kind 'zigzag' has its own positions; use gather"):
        run(case, orders("blocks"), case_inputs(case))
