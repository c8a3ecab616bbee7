"""Attention through `attend`: a new strategy needs one row of the table and nothing else."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd import ring_attention
from jaxptd.attention.attend import AttentionInputs, AttentionSpec, Ring, attend
from jaxptd.attention.kernel import Dropout, Lengths, Rows, Scores
from jaxptd.attention.xla import Xla
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
from jaxptd.mesh import make_mesh
from tests.test_ring_attention import Case, both_ways, hold, moved

CALLS: list[int] = []
KERNEL = Xla(Dropout(0.0, lambda *_: True))


def attend_gathered(
    q: Array, k: Array, v: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Gathers all keys and values, then runs plain attention."""
    ring, kernel, scores, _ = spec
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
GATHERED = Exchange(attend_gathered)
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
    """A case with a strategy that no layout can name."""

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


def test_backward_computes_no_scores_before_its_gradient_arrives() -> None:
    """Otherwise XLA computes them in forward and saves them: see `_backward` in `attend.py`."""
    inputs, spec = AttentionInputs(), P(None, Axis.CP)
    run = partial(attend, inputs=inputs, ring=Ring(Axis.CP), kernel=KERNEL, scores=Scores(1.0))

    def both_passes(q: Array, k: Array, v: Array, do: Array) -> tuple[Array, ...]:
        gradients: tuple[Array, ...] = jax.vjp(run, q, k, v)[1](do)
        return gradients

    x, mesh = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32), make_mesh(Layout())
    mapped = jax.shard_map(both_passes, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 3)
    (whole,) = jax.make_jaxpr(mapped)(x, x, x, x).eqns
    body = whole.params["jaxpr"]
    waiting, early = {body.invars[3]}, 0
    for equation in body.eqns:
        if waiting & {each for each in equation.invars if not hasattr(each, "val")}:
            waiting |= set(equation.outvars)
        else:
            early += str(equation).count("dot_general[")
    assert early == 2  # forward's scores and output
