"""ZeRO's communication and memory, from jaxprs and compiled programs."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from turns import by_turns, slow

from jaxptd import comms
from jaxptd.analysis import memory_report
from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.jaxprs import equations
from jaxptd.analysis.peak.model import peak
from jaxptd.config import itemsize
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.mesh import ZERO_AXES, Axis, Layout
from jaxptd.parts.sizes import elements_on_device
from jaxptd.planner.steps.step import ConfigStep
from jaxptd.step import Program
from jaxptd.zero.shards import ShardedInfo

STAGES = (1, 2, 3)
THREE = {"num_layers": 3}

# ---- traffic ------------------------------------------------------------------------------------

REPLICAS = Layout(replicas=2, dp=2, tp=2)
SPLIT = dataclasses.replace(REPLICAS, replica_state="split")
INSIDE = [
    (Layout(ep=3, cp=2), {"batch": 12, "documents": "apart"}),
    (Layout(dp=2, tp=4, sequence_parallel=True), {"remat": "full"}),
    (Layout(pp=2, dp=2, schedule="interleaved"), {"num_layers": 5, "tie_embeddings": False}),
    (REPLICAS, {"micro_batches": 1}),
    (SPLIT, {"micro_batches": 3, "batch": 12, "dtype": "bfloat16"}),
]
MORE_INSIDE = [
    (REPLICAS, {"micro_batches": 3, "batch": 12}),
    (Layout(replicas=2, dp=2, ulysses=2), {"micro_batches": 1, "scan_layers": False}),
    (Layout(replicas=2, pp=2, dp=2), THREE),
    (Layout(dp=2, ep=2), {}),
    (Layout(dp=2, row=2, col=2), {"dtype": "bfloat16"}),
    (Layout(cp=2, row=2, col=2, matmul2d="summa"), {"remat": "dots"}),
    (Layout(pp=2, dp=2, tp=2), THREE | {"remat": "full"}),
    (Layout(pp=2, ep=2, cp=2, schedule="zb-h1"), THREE | {"dtype": "bfloat16", "remat": "dots"}),
    (Layout(pp=3, dp=2), THREE),
]
MORE = [*itertools.product(MORE_INSIDE, STAGES)]
MATRIX = [
    (dataclasses.replace(layout, zero=stage), choice)
    for (layout, choice), stage in [*itertools.product(INSIDE, STAGES), *MORE]
]


@pytest.mark.parametrize(
    ("inside", "stage"),
    [*by_turns(INSIDE, STAGES), *(slow(*each) for each in MORE)],
    ids=str,
)
def test_the_jaxpr_moves_what_the_formula_says(inside: tuple[Layout, dict], stage: int) -> None:
    layout, choice = inside
    program = tiny.program(dataclasses.replace(layout, zero=stage), **choice)
    assert comms.subtract(comms.count(program), comms.formula(program)) == []


def as_compiled(layout: Layout, choice: dict) -> tuple[Layout, dict]:
    """XLA looks positions up once for all micro-batches, and gathers a stage's only layer once.

    Without a pipeline, layers gathered outside of the loop over layers depend on no micro-batch,
    and XLA unrolls a loop of one iteration, which drops its needless gather.
    """
    choice = choice | {"micro_batches": 1} if layout.has_grid or layout.pp == 1 else choice
    if layout.pp == 1:
        return layout, THREE | choice
    single = choice.get("num_layers") == layout.pp
    return layout, choice | {"num_layers": 2 * layout.pp} if single else choice


COMPILED = [
    (Layout(pp=2, dp=2, zero=2), THREE),
    *(as_compiled(*each) for each in MATRIX if "dtype" not in each[1]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "choice"), COMPILED, ids=str)
def test_the_compiled_program_moves_the_same_bytes(layout: Layout, choice: dict) -> None:
    """XLA may merge collectives, which changes counts but not bytes.

    At stage 3 it skips gathers of vectors that backward does not read, such as biases.
    """
    program = tiny.program(layout, **choice)
    found = {(c.kind, c.axes): c.bytes for c in comms.count_compiled(program, CPU_OPTIONS)}
    wanted = {(c.kind, c.axes): c.bytes for c in comms.count(program)}
    assert found.keys() == wanted.keys()
    fewer = {each: n - found[each] for each, n in wanted.items() if n != found[each]}
    assert all(each[0] == ALL_GATHER and 0 < n <= unread(program) for each, n in fewer.items())


def unread(program: Program) -> int:
    """Bytes of a device's layer vectors over all micro-batches at stage 3, else 0."""
    config, zero = program.config, program.resolved.zero
    vectors = [
        n for n, info in program.infos.items() if info.stack and not zero.plans[n].own_collective
    ]
    held = sum(math.prod(program.states.stored[name].stored_shape) for name in vectors)
    return 4 * held * config.train.micro_batches * (zero.layers.stage == 3)


def bytes_of(program: Program, *, layers: bool) -> int:
    """Bytes of padded parameters in float32, either of the layers or of all others."""
    return sum(
        4 * math.prod(each.stored_shape)
        for name, each in program.states.stored.items()
        if (program.infos[name].stack is not None) == layers
    )


def thirds(stage: int, **choice: Any) -> Program:
    return tiny.program(Layout(dp=3, zero=stage), batch=6, micro_batches=1, **THREE | choice)


@pytest.mark.parametrize("stage", [slow(1), 2, slow(3)])
def test_parameters_are_gathered_once_or_twice_and_gradients_scattered_once(stage: int) -> None:
    """All else summed over dp is the count of targets, the loss and two squares of the norm."""
    program = thirds(stage)
    found = {c.kind: c for c in comms.count(program)}
    layers, rest = bytes_of(program, layers=True), bytes_of(program, layers=False)
    assert found.keys() == {ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE}
    assert found[ALL_GATHER].bytes == (2 if stage == 3 else 1) * layers + rest
    assert found[REDUCE_SCATTER].bytes == layers + rest
    assert found[ALL_REDUCE].bytes == 4 * 4


@pytest.mark.parametrize(("scanned", "messages"), [(True, 6), (False, 2)])
def test_a_loops_matrices_are_messages_of_their_own(scanned: bool, messages: int) -> None:
    """Four matrices per layer, plus parameters that tp would shard and others."""
    program = thirds(3, scan_layers=scanned)
    found = {c.kind: c.count for c in comms.count(program)}
    assert comms.subtract(comms.count(program), comms.formula(program)) == []
    number = sum(not info.stack for info in program.infos.values())
    assert found[REDUCE_SCATTER] == number + messages * program.config.model.num_layers
    assert found[ALL_GATHER] == number + 2 * messages * program.config.model.num_layers


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_of_each_kind_the_compiled_program_moves_as_much(stage: int) -> None:
    program = thirds(stage)
    compiled: dict[str, int] = {}
    for each in comms.count_compiled(program, CPU_OPTIONS):
        compiled[each.kind] = compiled.get(each.kind, 0) + each.bytes
    wanted = {each.kind: each.bytes for each in comms.count(program)}
    assert 0 <= wanted.pop(ALL_GATHER) - compiled.pop(ALL_GATHER) <= unread(program)
    assert compiled == wanted


@pytest.mark.parametrize(
    ("inside", "stage"),
    by_turns([{"dp": 4}, {"pp": 2, "dp": 2}, {"row": 2, "col": 2, "dp": 2}], STAGES, first=2),
    ids=str,
)
def test_sums_are_made_in_float32_whatever_was_gathered(inside: dict, stage: int) -> None:
    program = tiny.program(Layout(zero=stage, **inside), dtype="bfloat16")
    traced: Any = program.train_step
    jaxpr = traced.trace(program.abstract_state, program.abstract_batch).jaxpr
    moved: dict[str, set] = {"all_gather": set(), "reduce_scatter": set(), "psum": set()}
    for equation in equations(jaxpr):
        kind = equation.primitive.name.removesuffix("_invariant")
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        if kind in moved and Axis.DP in axes:
            moved[kind] |= {v.aval.dtype for v in equation.invars if v.aval.size > 1}
    assert moved["reduce_scatter"] == {jnp.dtype("float32")}
    assert jnp.dtype("bfloat16") not in moved["psum"]
    assert moved["all_gather"] == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
    found = program.resolved.zero
    layers = {plan.gather_dtype for plan in found.plans.values() if plan.runs != "outside"}
    assert ("bfloat16" in layers) == ("row" not in inside)  # a grid sums gradients inside a layer


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2), slow(Layout(pp=2, dp=2, tp=2, zero=1)), slow(Layout(pp=2, col=2))],
    ids=str,
)
def test_stages_gather_tables_in_16_bits(layout: Layout) -> None:
    program = tiny.program(layout, dtype="bfloat16", num_layers=2)
    found = comms.count(program)
    assert comms.subtract(found, comms.formula(program)) == []
    over_stages = {each.kind: each.bytes for each in found if each.axes == (Axis.PP,)}
    assert over_stages[ALL_GATHER] < 0.6 * over_stages[REDUCE_SCATTER]  # norms stay in float32


@pytest.mark.parametrize(
    ("inside", "stage"),
    [
        *by_turns([{"dp": 2, "row": 2, "col": 2}], STAGES, first=1),
        *(slow({"dp": 2, "tp": 4}, stage) for stage in STAGES),
    ],
    ids=str,
)
def test_inside_a_copy_of_the_model_nothing_else_is_moved(inside: dict, stage: int) -> None:
    """A grid sums gradients inside the layer, in the same precision as without ZeRO."""
    found = []
    for zero in (0, stage):
        program = tiny.program(Layout(zero=zero, **inside), dtype="bfloat16")
        every = comms.count(program)
        found.append([c for c in every if not {*c.axes} & {*ZERO_AXES} and c.kind != ALL_REDUCE])
    assert found[0] == found[1]
    assert bool(found[0]) == ("row" in inside)


@pytest.mark.parametrize(
    ("stage", "micro_batches"), [(1, 3), (2, 1), slow(1, 1), slow(2, 3), slow(3, 1), slow(3, 3)]
)
def test_replicas_exchange_shards_of_gradients_once(stage: int, micro_batches: int) -> None:
    layout = dataclasses.replace(REPLICAS, zero=stage)
    program = tiny.program(layout, batch=12, micro_batches=micro_batches)
    shards = sum(
        math.prod(x.sharding.shard_shape(x.shape))
        for x in program.abstract_state["params"].values()
    )
    sent = [each for each in comms.count(program) if Axis.REPLICAS in each.axes]
    assert {each.kind for each in sent} == {ALL_REDUCE}
    counts_and_losses = sum(each.bytes for each in sent) - 4 * shards
    assert 0 <= counts_and_losses <= 64
    inside = [each for each in comms.count(program) if each.kind in (ALL_GATHER, REDUCE_SCATTER)]
    assert inside and not any(Axis.REPLICAS in each.axes for each in inside)


@pytest.mark.parametrize(
    ("stage", "micro_batches"), [(3, 3), slow(1, 1), slow(1, 3), slow(2, 3), slow(3, 1)]
)
def test_replicas_that_split_the_state_exchange_shards_of_both_once(
    stage: int, micro_batches: int
) -> None:
    """Shards of parameters in 16 bits are gathered, and those of gradients reduce-scattered."""
    layout, choice = dataclasses.replace(SPLIT, zero=stage), {"dtype": "bfloat16", "batch": 12}
    program = tiny.program(layout, micro_batches=micro_batches, **choice)
    sent = [each for each in comms.count(program) if Axis.REPLICAS in each.axes]
    among = {kind: sum(x.bytes for x in sent if x.kind == kind) for kind in {x.kind for x in sent}}
    stored = program.states.stored
    shards = {
        kind: sum(
            elements_on_device(each, layout)
            * layout.replicas
            * size(program.resolved.zero.plans[n])
            for n, each in stored.items()
        )
        for kind, size in (
            (ALL_GATHER, lambda plan: itemsize(plan.gather_dtype)),
            (REDUCE_SCATTER, lambda plan: 4),
        )
    }
    assert {kind: among[kind] for kind in shards} == shards
    assert among.keys() == {ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER}
    assert among[ALL_REDUCE] <= 64  # counts and losses
    for each in sent:  # nothing goes over all at once
        assert each.axes == (Axis.REPLICAS,) or each.kind == ALL_REDUCE


# ---- state --------------------------------------------------------------------------------------

HELD = [
    SPLIT,
    Layout(dp=8),
    Layout(dp=3, cp=2),
    REPLICAS,
    Layout(dp=2, tp=4, sequence_parallel=True),
    Layout(dp=2, row=2, col=2),
    Layout(pp=2, dp=3, stage_layers=(2, 1)),
    Layout(pp=2, ep=2, cp=2, schedule="interleaved", stage_layers=(1, 1, 1, 0)),
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", HELD, ids=str)
def test_a_device_holds_one_shard_of_parameters_and_moments(layout: Layout, stage: int) -> None:
    """A shard is n/Z of a block's n elements, rounded up, per layer if layers move one by one."""
    choice = {"num_layers": 3, "batch": 48, "micro_batches": 1}
    plain = tiny.program(dataclasses.replace(layout, zero=0), **choice)
    program = tiny.program(dataclasses.replace(layout, zero=stage), **choice)
    number = layout.zero_shards * (layout.replicas if layout == SPLIT else 1)
    for held in (program.abstract_state["params"], *moments(program)):
        assert held.keys() == plain.infos.keys()
        for name, x in held.items():
            info = plain.infos[name]
            sharding = plain.abstract_state["params"][name].sharding
            block = sharding.shard_shape(info.stored_shape)
            rows = block[0] if program.resolved.zero.plans[name].shards == "layer" else 1
            size = math.prod(block) // rows
            assert math.prod(x.sharding.shard_shape(x.shape)) == rows * math.ceil(size / number)
            assert x.dtype == jnp.float32
    everything = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in state(program))
    once = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in state(plain))
    rows = 3 * sum(i.stored_shape[0] if i.stack else 1 for i in plain.infos.values())
    assert once / number <= everything < once / number + rows


def moments(program: Program) -> list[dict[str, Any]]:
    adam = program.abstract_state["optimizer"][0]
    return [adam.mu, adam.nu]


def state(program: Program) -> list[Any]:
    """The state's arrays without two counters."""
    counted = jax.tree.leaves(program.abstract_state)
    return [x for x in counted if x.shape]


# ---- memory of a step ---------------------------------------------------------------------------

WIDE = {"num_layers": 12, "hidden_size": 64, "num_heads": 4, "micro_batches": 2}


def held(layout: Layout, batch: int, **choice: Any) -> tuple[Any, ...]:
    """What a device holds by the formulas: of the state, as published, and at the peak on GPUs."""
    config = tiny.config(layout, dtype="bfloat16", batch=batch, **choice)
    step = ConfigStep(config)
    return (
        step.state,
        memory_report.published_state(config, step.infos),
        peak(config, step.state, step.plan),
        step.description(Cluster(find_accelerator("h200"))).own_parameters,
    )


@pytest.mark.parametrize("choice", [{}, tiny.MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (1, 3), (2, 1), (3, 3)])
def test_each_replica_holds_what_a_run_of_its_own_would(
    stage: int, micro_batches: int, offload: Any, choice: dict
) -> None:
    alone = Layout(dp=2, ep=2 if choice else 1, zero=stage, offload=offload)
    choice = choice | {"micro_batches": micro_batches}
    both = dataclasses.replace(alone, replicas=2)
    assert held(both, 24, **choice) == held(alone, 12, **choice)


@pytest.mark.parametrize("choice", [{}, tiny.MOE], ids=["dense", "experts"])
@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (2, 3), (3, 1), (3, 3)])
def test_replicas_that_split_the_state_hold_a_part_and_for_a_step_their_shards(
    stage: int, micro_batches: int, choice: dict
) -> None:
    copied = Layout(replicas=2, dp=2, ep=2 if choice else 1, zero=stage)
    split = dataclasses.replace(copied, replica_state="split")
    (before, published, high, _), (after, less, low, _) = (
        held(layout, 24, micro_batches=micro_batches, **choice) for layout in (copied, split)
    )
    for name in ("parameters", "optimizer"):  # parts are padded
        assert before[name] <= 2 * after[name] < 1.02 * before[name]
    assert before["gradients"] <= after["gradients"] < 1.02 * before["gradients"]
    shards = before["parameters"] // 2  # in 16 bits, and vectors in 32
    more = after["gathered"] - before["gathered"]
    assert (0.9 * shards < more < 1.2 * shards) if stage == 3 else more == 0
    assert less["optimizer"] * 2 == pytest.approx(published["optimizer"], abs=1)
    assert low.state < high.state and low.gathered - high.gathered == more


def temporary(stage: int, layout: Layout, **choice: Any) -> tuple[int, int, int]:
    """Bytes of the compiled step's temporaries, a device's layers, and their shards."""
    program = tiny.program(dataclasses.replace(layout, zero=stage), **WIDE | choice)
    traced: Any = program.train_step
    lowered = traced.trace(program.abstract_state, program.abstract_batch).lower()
    taken = lowered.compile(compiler_options=CPU_OPTIONS).memory_analysis().temp_size_in_bytes
    layers = [each for n, each in program.states.stored.items() if program.infos[n].stack]
    held = sum(s.info.stored_shape[0] // layout.pp * math.prod(_block(s, layout)) for s in layers)
    return taken, 4 * held, 4 * held // math.prod(layout.sizes[axis] for axis in ZERO_AXES)


def _block(stored: Any, layout: Layout) -> tuple[int, ...]:
    return ShardedInfo(stored.info, layout.sizes, lead=1).block_shape


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(pp=2, dp=4)], ids=str)
def test_memory_of_a_step_falls_by_gradients_and_then_by_layers(layout: Layout) -> None:
    first, layers, shards = temporary(1, layout)
    second, third = (temporary(stage, layout)[0] for stage in (2, 3))
    one = layers * layout.pp // WIDE["num_layers"]
    # Gradient sums: blocks of all layers, or their shards plus two copies of one layer's gradients,
    # as computed by backward and in the order of the collective.
    assert first - second >= layers - shards - 2 * one
    # Parameters: blocks of all layers, or two copies of two layers' parameters, as gathered and
    # reshaped; of one layer's in a pipeline, which gathers no layer ahead.
    assert second - third >= layers - (2 if layout.pp > 1 else 4) * one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(dp=4, zero=3), {"micro_batches": 1}),
        (Layout(dp=2, pp=2, zero=3), {"remat": "full"}),
    ],
    ids=str,
)
def test_unrolled_layers_are_gathered_again_for_backward(layout, choice) -> None:
    """XLA would keep what forward gathered without barriers, as it does on CPUs."""
    program = tiny.program(layout, scan_layers=False, num_layers=4, **choice)
    moved = [
        sum(each.bytes for each in found if each.kind == ALL_GATHER)
        for found in (comms.count(program), comms.count_compiled(program, CPU_OPTIONS))
    ]
    assert moved[0] == moved[1]
