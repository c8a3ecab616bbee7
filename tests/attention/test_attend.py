"""Attention through `attend`: a new strategy needs one row of the table and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from turns import slow

from jaxptd import ring_attention
from jaxptd.attention.attend import AttentionInputs, Ring, attend
from jaxptd.attention.kernel import Kernel, Lengths, Rows, Scores
from jaxptd.collectives import all_gather
from jaxptd.context_parallel import (
    BLOCKS,
    CONTIGUOUS,
    ROWS,
    STRATEGIES,
    ZIGZAG,
    ContextParallel,
    Exchange,
    TokenOrder,
)
from jaxptd.layout import Axis, Layout
from tests.test_ring_attention import Case, both_ways, hold, moved

CALLS: list[int] = []


def attend_gathered(
    q: Array,
    k: Array,
    v: Array,
    inputs: AttentionInputs,
    *,
    ring: Ring,
    kernel: Kernel,
    scores: Scores,
) -> Array:
    """Gathers all keys and values, then plain attention."""
    CALLS.append(k.shape[1])
    lengths = Lengths(q.shape[1], k.shape[1])
    run = Lengths(*(ring.run(length) for length in lengths))
    rows = Rows(ring.all_coordinates(inputs, lengths), scores, kernel.dropout, groups=1, run=run)
    k, v = (all_gather(x, ring.axis, 1) for x in (k, v))
    s_BNTS = rows.add_bias(jnp.einsum("BTNH,BSNH->BNTS", q, k) * scores.scale)
    seen = jnp.broadcast_to(rows.seen(), s_BNTS.shape)
    p_BNTS = jnp.where(seen, jax.nn.softmax(jnp.where(seen, s_BNTS, -1e30)), 0)
    return rows.output(jnp.einsum("BNTS,BSNH->BTNH", rows.drop(p_BNTS, v.dtype), v))


def _last_first(device, devices):
    return devices - 1 - device


REVERSED = TokenOrder((_last_first,))
GATHERED = Exchange(f"{__name__}:attend_gathered")
OWN = {
    "reversed": ContextParallel(REVERSED, BLOCKS),
    "another name": ContextParallel(CONTIGUOUS, BLOCKS),
    "reversed rows": ContextParallel(REVERSED, ROWS),
    "zigzag rows": ContextParallel(ZIGZAG, ROWS),
    "gathered": ContextParallel(CONTIGUOUS, GATHERED),
    "gathered zigzag": ContextParallel(ZIGZAG, GATHERED),
}


@pytest.fixture(autouse=True)
def own_rows(monkeypatch) -> None:
    for name, row in OWN.items():
        monkeypatch.setitem(STRATEGIES, name, row)


@dataclasses.dataclass(frozen=True)
class Own(Case):
    """A case with a strategy that no layout has a name for."""

    kind: str = ""

    def __str__(self) -> str:
        return f"{self.kind}-{super().__str__()}".replace(" ", "-")

    @property
    def ring(self) -> Ring:
        return Ring(Axis.CP, self.kind)  # type: ignore[arg-type]


def own(kind: str, cp: int = 4, **choice) -> Own:
    return Own(Layout(cp=cp), kind=kind, **choice)


RICH = {"rate": 0.1, "documents": True, "bias": True}


@pytest.mark.parametrize(
    "case",
    [
        own("reversed", **RICH),
        own("reversed", window=14),
        slow(own("reversed", 3, causal=False, **RICH)),
        slow(own("reversed", 4, causal=False, bias=True, keys=72, chunk=4)),
        slow(own("another name", window=14)),
        own("reversed rows", 2, bias=True),
        slow(own("reversed rows", window=14, **RICH)),
        own("zigzag rows", 3, bias=True),
        slow(own("zigzag rows", window=14, **RICH)),
        slow(own("zigzag rows", causal=False, keys=72, **RICH)),
        own("gathered", **RICH),
        slow(own("gathered zigzag", window=14, **RICH)),
    ],
    ids=str,
)
def test_a_strategy_of_ones_own_gives_the_attention_of_one_device(case: Own) -> None:
    hold(case, "float64")


def test_the_row_says_which_function_runs() -> None:
    case = own("gathered")
    CALLS.clear()
    kinds = {each.kind for each in moved(case, both_ways(case), "float32")}
    assert [case.block] == CALLS
    assert kinds == {"all-gather", "reduce-scatter"}


def test_one_device_exchanges_nothing() -> None:
    case = own("gathered", 1)
    CALLS.clear()
    assert moved(case, both_ways(case), "float32") == []
    assert not CALLS


def test_ring_attention_has_the_same_entrance() -> None:
    assert ring_attention.attend is attend
