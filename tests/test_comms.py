"""Counted collectives: the jaxpr's, the compiled program's and the formula's are the same."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxptd import comms
from jaxptd.analysis.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.analysis.traffic.step import expected
from jaxptd.collectives import as_varying
from jaxptd.layers.forms import make_form
from jaxptd.mesh import SCHEDULES, Axis, Layout, make_mesh
from jaxptd.step import program as step

B_T_D = 4 * 8 * 16 * 4  # bytes of a device's x[B/dp, T, D] in float32, with dp=2


def by_kind(collectives: list[Collective]) -> dict[str, tuple[int, int]]:
    return {c.kind: (c.count, c.bytes) for c in collectives if c.axes == ("tp",)}


@pytest.mark.parametrize("remat", ["none", "attention"])
def test_a_layer_makes_four_all_reduces(remat: str) -> None:
    program = tiny.program(Layout(dp=2, tp=4), micro_batches=1, remat=remat)
    assert by_kind(comms.per_layer(program)) == {ALL_REDUCE: (4, 4 * B_T_D)}


def test_a_layer_makes_four_gathers_and_four_scatters_under_sequence_parallelism() -> None:
    program = tiny.program(tiny.SEQUENCE_PARALLEL, micro_batches=1)
    four = (4, 4 * B_T_D)
    assert by_kind(comms.per_layer(program)) == {ALL_GATHER: four, REDUCE_SCATTER: four}


def test_a_layer_makes_ten_rounds_of_hops_with_collective_matmul() -> None:
    """Two gathers and two scatters, their derivatives, and the two blocks of x once more."""
    program = tiny.program(RING_STEPS, micro_batches=1)
    assert by_kind(comms.per_layer(program)) == {PERMUTE: (30, 30 * B_T_D // 4)}


@pytest.mark.parametrize(("ring", "hops"), [("zigzag", 9), ("blockwise", 9), ("rsa", 18)])
def test_a_layer_sends_keys_and_values_round_and_their_gradients_home(ring, hops) -> None:
    """Over cp nothing else moves: no gather, and no sum of gradients at full length."""
    program = tiny.program(Layout(cp=4, ring=ring), micro_batches=1)
    part = 8 * 8 // 4 * 16 * 4  # bytes of a device's k, [B, T/cp, D] in float32
    (found,) = [c for c in comms.per_layer(program) if c.kind != ALL_REDUCE]
    # 3 hops of k and v forward, 3 backward, 3 of dk and dv: together, or each on its own in RSA
    assert found == Collective(PERMUTE, ("cp",), hops, 9 * 2 * part)


MATRIX = [
    (layout, choice)
    for layout in (Layout(), Layout(dp=4), Layout(tp=4), Layout(dp=2, tp=4), tiny.SEQUENCE_PARALLEL)
    for choice in ({}, {"remat": "full"}, {"remat": "dots"}, {"micro_batches": 1})
    if layout.num_devices > 1 or not choice
]
RING_STEPS = dataclasses.replace(tiny.SEQUENCE_PARALLEL, collective_matmul=True)
MATRIX += [(RING_STEPS, {"remat": r}) for r in ("none", "attention", "dots", "full")]
MATRIX += [
    (dataclasses.replace(layout, ring=ring), choice)
    for layout in (Layout(cp=4), tiny.CONTEXT_PARALLEL)
    for ring in ("zigzag", "blockwise", "rsa")
    for choice in ({"documents": "apart"}, *({"remat": r} for r in ("attention", "dots", "full")))
]
UNEVEN = {"num_heads": 3, "hidden_size": 15, "ffn_hidden_size": 23}
PIPELINED = [
    Layout(pp=2, dp=2, tp=2),
    Layout(pp=2, cp=2, tp=2, sequence_parallel=True, ring="rsa"),
    *(Layout(pp=2, row=2, col=2, matmul2d=kind) for kind in ("gather", "summa", "fox", "cannon")),
]
GRIDS = [
    Layout(row=2, col=2),
    Layout(row=2, col=2, matmul2d="gather", matmul2d_slices=2),
    Layout(row=2, col=2, matmul2d="summa"),
    Layout(row=2, col=2, matmul2d="fox"),
    Layout(row=2, col=2, matmul2d="cannon"),
    Layout(row=2, col=4, ring="rsa"),
    Layout(row=4, col=2, matmul2d="summa", ring="blockwise"),
    Layout(dp=2, cp=2, row=2, col=1),
    Layout(dp=2, cp=2, row=1, col=2),
]
MATRIX += [(layout, {"remat": r}) for layout in GRIDS for r in ("none", "dots", "full")]
MATRIX += [(Layout(row=2, col=2, ring=ring), {"remat": "attention"}) for ring in ("zigzag", "rsa")]
MATRIX += [
    (Layout(row=2, col=2, matmul2d=kind, attention2d="blocks"), UNEVEN | {"remat": remat})
    for kind in ("gather", "summa", "fox", "cannon")
    for remat in ("none", "dots", "attention", "full")
]
MATRIX += [(layout, {"dtype": "bfloat16"}) for layout in GRIDS[2:5]]
MATRIX += [(Layout(row=2, col=2, attention2d="blocks"), UNEVEN | {"dtype": "bfloat16"})]
MATRIX += [(Layout(dp=2, row=2, col=2), {"ffn_hidden_size": 27, "documents": "apart"})]
FOUR = {"num_layers": 4, "micro_batches": 4}
# Of parts of one layer XLA drops what the layer's second run need not make.
EIGHT = FOUR | {"num_layers": 8, "remat": "full"}
PIPELINES = [
    (Layout(pp=4), FOUR | {"micro_batches": 1}),
    (Layout(pp=2, dp=2, tp=2), FOUR | {"num_layers": 5, "tie_embeddings": False}),
    (Layout(pp=2, schedule="interleaved", tp=4, sequence_parallel=True), EIGHT),
    (Layout(pp=2, tp=4, sequence_parallel=True, collective_matmul=True), EIGHT),
    (Layout(pp=3, schedule="gpipe", dp=2, stage_layers=(0, 3, 1)), FOUR | {"remat": "dots"}),
    (Layout(pp=2, schedule="zb-v", cp=2, tp=2), FOUR | {"documents": "apart"}),
    (Layout(pp=4, schedule="zb-h2", cp=2, ring="rsa"), FOUR | {"remat": "full"}),
    (Layout(pp=4, schedule="zb-h1", tp=2), FOUR | {"dtype": "bfloat16", "remat": "attention"}),
    (Layout(pp=2, row=2, col=2), FOUR | {"remat": "full"}),
    (Layout(pp=2, row=2, col=2, matmul2d="cannon", schedule="zb-h1"), FOUR),
    (Layout(pp=2, row=2, col=2, matmul2d="summa", attention2d="blocks"), FOUR | UNEVEN),
    (Layout(pp=2, row=2, col=2, matmul2d="fox"), FOUR | {"dtype": "bfloat16"}),
]
FIVE = {"num_layers": 5, "remat_layers": 2}
MIXED = [
    *((tiny.SEQUENCE_PARALLEL, FIVE | {"remat": remat}) for remat in ("dots", "full")),
    (Layout(tp=4), FIVE | {"remat": "full", "scan_layers": False}),
    (Layout(cp=4), FIVE | {"remat": "attention"}),
    (Layout(cp=2, ring="rsa"), FIVE | {"remat": "dots"}),
    (Layout(row=2, col=2), FIVE | {"remat": "full"}),
    (Layout(row=2, col=2), {"vocab_multiple": 32}),
    (Layout(tp=4), {"vocab_multiple": 32}),
    (Layout(row=2, col=2, attention2d="blocks"), FIVE | {"remat": "dots"}),
    # Of parts with 3 and 2 layers, 2 of each.
    (Layout(pp=2, tp=2, sequence_parallel=True), FIVE | {"remat": "full", "micro_batches": 4}),
    (Layout(pp=2, cp=2, stage_layers=(1, 4)), FIVE | {"remat": "attention"}),
    (Layout(pp=2, row=2, col=2, schedule="zb-h1"), FOUR | {"remat": "full", "remat_layers": 1}),
]


@pytest.mark.parametrize(("layout", "choice"), MATRIX + PIPELINES + MIXED, ids=str)
def test_the_jaxpr_moves_what_the_formula_says(layout: Layout, choice: dict) -> None:
    program = tiny.program(layout, **choice)
    assert comms.subtract(comms.count(program), comms.formula(program)) == []


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "attention", "full"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", PIPELINED, ids=str)
def test_every_pipeline_moves_what_the_formula_says(layout, schedule, remat) -> None:
    program = tiny.program(dataclasses.replace(layout, schedule=schedule), remat=remat, **FOUR)
    assert comms.subtract(comms.count(program), comms.formula(program)) == []


def test_between_stages_moves_what_a_message_holds_and_what_is_no_layer_once() -> None:
    """Over pp alone nothing else but scalars of the norm."""
    program = tiny.program(Layout(pp=2, dp=2), **FOUR)
    found = {c.kind: (c.count, c.bytes) for c in comms.count(program) if c.axes == ("pp",)}
    ends = [info for info in program.infos.values() if not info.stacked]
    whole = sum(4 * np.prod(info.shape) for info in ends)
    message = 1 * 8 * 16 * 4  # x[B/dp/M, T, D] in float32
    # 1F1B, M + p - 1 times: an activation one way, a gradient the other, at the same time.
    assert found.pop(PERMUTE) == (5, 5 * message)
    assert found.pop(ALL_GATHER) == found.pop(REDUCE_SCATTER) == (len(ends), whole)
    assert found == {ALL_REDUCE: (2, 8)}  # squares of what tp would cut, and of the rest


def test_a_grid_of_gpus_moves_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """SUMMA broadcasts; fox cannot."""
    monkeypatch.setattr(step, "make_form", lambda layout, **_: make_form(layout, native=True))
    for kind, some in (("summa", True), ("fox", False)):
        program = tiny.program(Layout(row=2, col=2, matmul2d=kind))
        formula = comms.add_up(expected(program.config, program.infos, native=True))
        assert comms.subtract(comms.count(program), formula) == []
        assert any(each.kind == BROADCAST for each in formula) == some


UNROLLED = {"scan_layers": False, "remat": "dots"}
COMPILED = [
    *(
        (layout, choice)
        for layout in (Layout(dp=2, tp=4), tiny.SEQUENCE_PARALLEL)
        for choice in ({}, UNROLLED)
    ),
    # Unrolled, XLA on CPU drops the barrier in front of the backward ring, and its first hop.
    *((layout, {}) for layout in (tiny.CONTEXT_PARALLEL, Layout(cp=4, ring="rsa"))),
    # Positions are looked up once for all micro-batches.
    *((layout, {"micro_batches": 1}) for layout in GRIDS[:6]),
    *PIPELINES[1:3],
    *MIXED[:1],
]


MORE_COMPILED = [
    *((dataclasses.replace(PIPELINED[0], schedule=kind), EIGHT) for kind in SCHEDULES),
    (dataclasses.replace(PIPELINED[1], schedule="zb-h1"), FOUR),
    (Layout(pp=4, schedule="zb-h1", tp=2), FOUR),
    (Layout(pp=4, dp=2), FOUR),
    *MIXED[3:5],
    (MIXED[5][0], MIXED[5][1] | {"micro_batches": 1}),
    *MIXED[7:9],
]
COMPILED += [pytest.param(*each, marks=pytest.mark.slow) for each in MORE_COMPILED]


@pytest.mark.parametrize(("layout", "choice"), COMPILED, ids=str)
def test_the_compiled_program_moves_the_same_bytes(layout: Layout, choice: dict) -> None:
    """XLA may merge reductions into one: the counts differ then, the bytes do not."""
    program = tiny.program(layout, **choice)
    found = {(c.kind, c.axes): c.bytes for c in comms.count_compiled(program, CPU_OPTIONS)}
    assert found == {(c.kind, c.axes): c.bytes for c in comms.count(program)}


def test_gradients_are_one_message_in_the_compiled_program() -> None:
    """Over dp, and with sequence parallelism one more, over dp and tp, for norms and biases."""
    found = {
        (c.kind, c.axes): c.count
        for c in comms.count_compiled(tiny.program(tiny.SEQUENCE_PARALLEL))
    }
    assert found[ALL_REDUCE, ("dp", "tp")] == 1
    assert found[ALL_REDUCE, ("dp",)] == 2  # the count of targets comes before, alone


def test_loops_count_as_often_as_they_run_and_size_one_axes_not_at_all() -> None:
    mesh = make_mesh(Layout(dp=2))

    def body(x):
        add = lambda carry, _: (lax.psum(carry, Axis.DP) * x, None)  # noqa: E731
        looped = lax.scan(add, x, None, length=5)[0]
        alone = lax.psum(as_varying(jnp.ones(3), [Axis.TP]), Axis.TP)
        return lax.psum(looped, Axis.DP) + x + alone

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P(Axis.DP), out_specs=P(Axis.DP), check_vma=True
    )
    traced = jax.jit(mapped).trace(jnp.zeros((4, 3)))
    want = [Collective(ALL_REDUCE, ("dp",), 6, 6 * 2 * 3 * 4)]
    assert comms.collectives_of(traced.jaxpr, mesh) == want
    text = traced.lower().compile().as_text()
    assert comms.add_up(collectives_from_hlo(text, dict(mesh.shape))) == want


def test_a_loop_of_unknown_length_is_an_error() -> None:
    mesh = make_mesh(Layout(dp=2))

    def body(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: lax.psum(x, Axis.DP), x)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=True)
    with pytest.raises(ValueError, match="while loop"):
        comms.collectives_of(jax.make_jaxpr(mapped)(jnp.ones(3)), mesh)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [(ALL_REDUCE, 150), (ALL_GATHER, 75), (REDUCE_SCATTER, 75), ("collective-permute", 100)],
)
def test_bytes_that_a_ring_sends(kind: str, sent: int) -> None:
    assert Collective(kind, ("tp",), 1, 100).wire_bytes({"tp": 4, "dp": 2}) == sent


HLO = [
    (
        "%a = f32[8,4]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}",
        ALL_GATHER,
        ("tp",),
        128,
    ),
    (
        "%a = bf16[8]{0} all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add",
        ALL_REDUCE,
        ("dp",),
        16,
    ),
    (
        "%a = (f32[2]{0}, f32[3]{0}) all-reduce(%p, %q), replica_groups={{0,1,2,3,4,5,6,7}}",
        ALL_REDUCE,
        ("dp", "tp"),
        20,
    ),
    (
        "%a = f32[2]{0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
        REDUCE_SCATTER,
        ("tp",),
        32,
    ),
    (
        "%a = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8]",
        ALL_GATHER,
        ("tp",),
        32,
    ),
    (
        "%a = f32[2]{0} all-reduce(%p), replica_groups=mesh['dp'=2,'tp'=4] {'tp'}, to_apply=%add",
        ALL_REDUCE,
        ("tp",),
        8,
    ),
    (
        "%a = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,4},{4,0}}",
        "collective-permute",
        ("dp",),
        8,
    ),
    (
        "%a = ((f32[2]{0}, f32[4]{0}), (f32[2]{0}, f32[4]{0})) collective-permute-start(%p, %q), "
        "source_target_pairs={{0,4},{4,0}}",
        "collective-permute",
        ("dp",),
        24,
    ),
    (
        "%a = ((f32[8]{0}, f32[4]{0}), (f32[2]{0}, f32[1]{0})) reduce-scatter-start(%p, %q), "
        "replica_groups={{0,1,2,3},{4,5,6,7}}",
        REDUCE_SCATTER,
        ("tp",),
        48,
    ),
]


@pytest.mark.parametrize(("line", "kind", "axes", "size"), HLO)
def test_spellings_of_hlo(line: str, kind: str, axes: tuple, size: int) -> None:
    text = f"HloModule m\n\nENTRY %main (p: f32[]) -> f32[] {{\n  {line}\n}}\n"
    assert list(collectives_from_hlo(text, {"dp": 2, "tp": 4})) == [Collective(kind, axes, 1, size)]


def test_groups_of_one_device_are_left_out() -> None:
    line = "%a = f32[2]{0} all-reduce(%p), replica_groups=[8,1]<=[8]"
    text = f"HloModule m\n\nENTRY %main () -> f32[] {{\n  {line}\n}}\n"
    assert list(collectives_from_hlo(text, {"dp": 2, "tp": 4})) == []


def test_the_command_prints_json(capsys) -> None:
    options = [f"--model.{k}={v}" for k, v in vars(tiny.MODEL).items() if v is not None]
    assert comms.main([*options, "--layout.dp=2", "--layout.tp=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"pp": 1, "dp": 2, "cp": 1, "row": 1, "col": 1, "tp": 4}
    assert found["jaxpr"] == found["formula"]
    rows = {(r["kind"], *r["axes"]): r for r in found["jaxpr"]}
    assert rows[ALL_REDUCE, "tp"]["wire_bytes"] == rows[ALL_REDUCE, "tp"]["bytes"] * 3 // 2
    assert np.sum([r["count"] for r in found["per_layer"]]) == 4
