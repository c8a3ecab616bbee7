"""The benchmark of pipelines: the peer computes the same, and what is counted is there."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.lib.compiler import QUICK
from benchmarks.lib.measure import DifferentError
from benchmarks.pipeline import __main__ as pipeline
from benchmarks.pipeline import memory as pipeline_memory
from benchmarks.pipeline import time as pipeline_time
from benchmarks.pipeline.layer import calls, durations
from benchmarks.pipeline.programs import (
    PEER,
    Named,
    Peer,
    kept_by_a_layer,
    pools_of,
    start,
)
from benchmarks.pipeline.text import Tick, hops, tick
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.config import Config, ModelConfig, Remat, TrainConfig
from jaxptd.mesh import SCHEDULES, Layout, make_mesh
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.statistics import Durations
from jaxptd.step import Program

LAYOUT = Layout(pp=2, dp=2, schedule="gpipe")
MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=4, seq_length=8, vocab_size=13)


def config(layout: Layout = LAYOUT, **model: Any) -> Config:
    train = TrainConfig(global_batch_size=6 * layout.dp, micro_batches=3)
    return Config(model=dataclasses.replace(MODEL, **model), layout=layout, train=train)


def program(kind: type[Program] = Program, layout: Layout = LAYOUT, **model: Any) -> Any:
    return kind(config(layout, **model), make_mesh(layout))


# ---- tables -----------------------------------------------------------------------------------


def test_tables_say_what_formulas_say() -> None:
    rows = [
        line.split(" | ")
        for line in pipeline.schedules((2, 4), (1, 2, 3)).splitlines()
        if line.startswith("| ")
    ]
    assert rows[0] == ("| " + " | ".join(pipeline.COUNTED) + " |").split(" | ")
    assert len(rows) == 1 + 2 * 3 * len(SCHEDULES)
    for _, _, _, *pairs, last in rows[1:]:
        pairs.append(last.removesuffix(" |"))
        for counted, formula in zip(pairs[::2], pairs[1::2], strict=True):
            assert formula in ("", counted)
    assert ["| 1f1b", "4", "8", "22", "22", "0.375", "0.375", "4", "4", "48", "48 |"] in rows
    assert ["| zb-v", "4", "8", "51", "51", "0", "0", "4", "4", "96", "96 |"] in rows


# ---- the peer ---------------------------------------------------------------------------------


def results(kind: type[Program], **model: Any) -> dict[str, Any]:
    """Loss, and gradients in canonical form, in float64; dropout tells micro-batches apart."""
    with jax.enable_x64(True):
        run = program(kind, Layout(pp=2, schedule="gpipe"), dtype="float64", dropout=0.1, **model)
        state, batch = run.init_state(), run.place(random_batch(run.config))
        step = run.step_with_gradients.lower(state, batch).compile(compiler_options=QUICK)
        _, metrics, found = step(state, batch)
        host: Any = {name: np.asarray(x) for name, x in found.items()}
        return {"loss": metrics["loss"]} | run.resolved.blueprint.to_canonical(host)


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return results(Program)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_peer_is_the_same_step(remat: Remat, ours: dict[str, Any]) -> None:
    peers = results(Peer, remat=remat)
    assert set(ours) == set(peers) and len(ours) > 10
    for name, right in ours.items():
        error = np.linalg.norm(peers[name] - right) / np.linalg.norm(right)
        assert error <= 1e-12, name


def test_tied_weights_lie_whole_on_the_peers_stages() -> None:
    ours, peer = program(), program(Peer)
    assert "pp" in ours.infos["tokens.table"].axes
    assert "pp" not in peer.infos["tokens.table"].axes
    assert peer.infos["blocks.mlp.up.w"] == ours.infos["blocks.mlp.up.w"]


# ---- memory and copies ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        *("1f1b", "zb-h1"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpipe", "interleaved")),
    ],
)
def test_what_is_kept_is_slots_times_what_layers_keep(schedule: str) -> None:
    ours = program(layout=dataclasses.replace(LAYOUT, schedule=schedule), num_layers=8)
    pools, slots = pools_of(ours), ours.resolved.plan.slots
    depth = ours.resolved.plan.depth("blocks")
    part = kept_by_a_layer(ours) * depth
    activation = 4 * 2 * MODEL.seq_length * MODEL.hidden_size
    assert pools.mail == slots["mail"] * activation
    between = pools.kept - slots["saved_blocks"] * part
    assert between >= 0 and (between > 0) == (schedule == "zb-h1")
    if schedule == "zb-h1":  # what passes is whole activations, and vectors
        assert between % (slots["between_blocks"] * depth) == 0


@pytest.mark.slow
def test_rows_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B's memory is the same however many micro-batches there are, and nothing is copied."""
    monkeypatch.setattr(
        "benchmarks.pipeline.programs.MODEL", dataclasses.replace(MODEL, num_layers=8)
    )
    chosen = (("gpipe", "none"), ("1f1b", "none"), (PEER, "none"))
    monkeypatch.setattr(pipeline_memory, "COMPILED", chosen)
    found = {(n, m): pipeline_memory.memory(n, "none", m) for n, _ in chosen for m in (4, 8)}
    few, many = found["1f1b", 4], found["1f1b", 8]
    activation = 4 * 4 * MODEL.seq_length * MODEL.hidden_size
    assert 0 <= many.temporary - few.temporary < activation  # the schedule's table is longer
    assert few.kept == many.kept == many.theory
    assert few.copied[0] == many.copied[0] == 0
    few, many = found["gpipe", 4], found["gpipe", 8]
    part = (few.kept or 0) // 4
    assert (many.kept, many.held) == (8 * part, 8)
    assert 0 <= many.temporary - few.temporary - 4 * part < part
    assert found[PEER, 8].theory == 11 * part and found[PEER, 8].temporary > many.temporary
    assert found[PEER, 8].row[3:5] == ["", ""] and len(many.row) == len(pipeline_memory.MEMORY)
    words = pipeline_memory.compared(list(found.values()))
    assert "- 1f1b, remat none: 0.00" in words and "keeps 0.500 of" in words


BODY = """HloModule step

fused {
  p = f32[2,16]{1,0} parameter(0)
  ROOT c = f32[2,16]{1,0} copy(p)
}

layers {
  x = f32[8,16]{1,0} parameter(0)
  ROOT y = f32[8,16]{1,0} copy(x)
}

once {
  w = f32[3,8,16]{2,1,0} parameter(0)
  l = (f32[8,16]{1,0}) while(w), body=layers, backend_config={"known_trip_count":{"n":"5"}}
  ROOT z = f32[3,8,16]{2,1,0} copy(w)
}

ticks {
  a = (f32[3,8,16]{2,1,0}, f32[1,2,16]{2,1,0}) parameter(0)
  b = (f32[3,8,16]{2,1,0}) while(a), body=once
  f = f32[2,16]{1,0} fusion(a), kind=kLoop, calls=fused
  n = s32[] copy(a)
}

ENTRY main {
  i = f32[3,8,16]{2,1,0} parameter(0)
  o = f32[3,8,16]{2,1,0} copy(i)
  t = (CARRIED) while(o), body=ticks, backend_config={"known_trip_count":{"n":"7"}}
}
""".replace("CARRIED", "s32[], f32[3,8,16]{2,1,0}, f32[1,2,16]{2,1,0}, f32[1,8,16]{2,1,0}")


def test_copies_of_a_tick_are_read() -> None:
    """Carried arrays are a pool in a loop and a vector in a fusion; copies before do not count."""
    carried = 4 * (3 * 8 * 16 + 2 * 16)
    assert tick(BODY, 7, (1, 8, 16)) == Tick(1, 1, 0, carried, 5 * 4 * 8 * 16 + 4)
    assert tick(BODY, 7, (9,)).carried == carried + 5 * 4 * 8 * 16
    with pytest.raises(ValueError, match="no loop of 8 ticks"):
        tick(BODY, 8, (1, 8, 16))


@pytest.mark.slow
def test_hops_are_the_permutes_between_stages() -> None:
    ours = program(layout=Layout(pp=2, dp=2))
    step = ours.train_step.lower(ours.abstract_state, ours.abstract_batch)
    text = step.compile(compiler_options=QUICK).as_text()
    sizes = {str(axis): size for axis, size in ours.mesh.shape.items()}
    found = hops(text, sizes)
    assert [hop.bytes for hop in found] == [4 * 2 * 8 * 16] * len(ours.resolved.plan.hops.pairs)
    assert {hop.hidden_by for hop in found} == {"nothing"}


# ---- time -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_halves_of_a_layer_make_its_whole_backward() -> None:
    operations = calls(Config(model=MODEL, train=TrainConfig(global_batch_size=2)))
    (dx, _), later, (found, whole_dx) = (operations[name]() for name in ("now", "then", "whole"))
    halves, whole = jax.tree.leaves((later, dx)), jax.tree.leaves((found, whole_dx))
    assert len(halves) == len(whole) == 13
    for half, right in zip(halves, whole, strict=True):
        assert np.linalg.norm(half - right) <= 1e-6 * np.linalg.norm(right)
        assert np.linalg.norm(right) > 0


def test_the_operations_of_a_layer_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}

    def take(seconds: float) -> None:
        clock["now"] += seconds

    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])
    seconds = {"forward": 1.0, "now": 4.0, "then": 2.0, "whole": 6.0}
    split, whole = durations({name: partial(take, each) for name, each in seconds.items()}, runs=3)
    assert (split, whole) == (Durations(F=1.0, B=4.0, W=2.0), 6.0)


@pytest.mark.slow
def test_another_program_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.pipeline.programs.CPU_OPTIONS", QUICK)
    layout = dataclasses.replace(LAYOUT, schedule="interleaved")
    both = Named("ours", program(layout=layout)), Named(PEER, program(Peer))
    runs = [start(named) for named in both]
    expected = runs[0].step()
    runs[1].check(expected)
    assert runs[1].error <= 1e-6
    with pytest.raises(DifferentError, match="differentiated scan is .* off one device"):
        runs[1].check([2 * expected[0], *expected[1:]])
    runs[0].seconds, runs[1].seconds = [0.5], [1.0, 1.5, 2.5]
    cells = pipeline_time.row(runs[1], runs[0])
    assert cells[:6] == ["pp=2 dp=2", PEER, "3", "1500", "3.00", "1000"]
    assert len(cells) == len(pipeline_time.TIMES)


def test_all_have_one_global_batch() -> None:
    found = pipeline_time.programs()
    assert {named.program.config.train.global_batch_size for named in found} == {64}
    assert [named.name for named in found] == ["dp", *pipeline_time.RACED]
    peers = [named.name for named in found if isinstance(named.program, Peer)]
    assert peers == [PEER]


def test_bubbles_are_those_of_the_formulas_where_they_hold() -> None:
    rows = pipeline_time.simulated(Durations(3e-3, 3e-3, 2e-3), 5e-3)
    assert [len(row) for row in rows] == [len(pipeline_time.SIMULATED)] * 2 * len(SCHEDULES)
    for name, m, makespan, waiting, share, bubble, formulas, names in rows:
        assert float(waiting) >= float(makespan) - 0.1
        schedule = make_schedule(name, stages=4, micro_batches=int(m))
        assert float(share) == pytest.approx(float(makespan) / (int(m) * 2 * 8), abs=1e-3)
        assert names.count(";") == formulas.count(";") == (name == "zb-h1")
        assert not formulas or bubble == formulas.split("; ")[0], schedule.name
