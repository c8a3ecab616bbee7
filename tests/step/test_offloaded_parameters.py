"""Layers' parameters in host memory: a device holds one layer at a time; results are equal."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd.analysis.count import count, formula
from jaxptd.analysis.jaxprs import equations, inside, scans, traced
from jaxptd.costs.collective import subtract
from jaxptd.errors import UserError
from jaxptd.generate import Generator, Sampling
from jaxptd.mesh import Layout
from jaxptd.plan import plan
from jaxptd.step import Program
from jaxptd.step.state import DEVICE, HOST

ALONE = "parameters"
BOTH = ("optimizer", "parameters")
KEPT = ("parameters", "activations")
EVERY = ("optimizer", "parameters", "activations")
THREE = {"num_layers": 3, "dropout": 0.1}
LLAMA = {"family": "llama", "num_kv_heads": 2}


def memories(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow(Layout(tp=2, offload=ALONE), THREE | {"remat": "full", "micro_batches": 2}),
        (Layout(dp=2, zero=1, offload=EVERY), {"num_layers": 3, "remat": "dots"}),
        slow(
            Layout(dp=2, tp=2, sequence_parallel=True, zero=1, offload=EVERY),
            THREE | {"remat": "dots", "remat_layers": 1},
        ),
        slow(Layout(offload=BOTH), THREE | {"scan_layers": False, "remat": "attention"}),
        slow(Layout(dp=2, cp=2, zero=2, offload=KEPT), THREE | {"remat": "dots", **LLAMA}),
        slow(Layout(dp=2, row=2, col=2, zero=3, offload=BOTH), THREE | {"remat": "none"}),
        slow(Layout(row=2, col=2, offload=KEPT), THREE | {"remat": "dots", "scan_layers": False}),
        slow(Layout(dp=2, zero=3, offload=ALONE), THREE | {"scan_layers": False, "family": "bert"}),
        slow(Layout(dp=2, tp=2, offload=EVERY), {**tiny.T5, "remat": "dots", "micro_batches": 2}),
        slow(Layout(dp=2, cp=2, zero=2, offload=BOTH), {**tiny.T5, "remat": "full"}),
        slow(Layout(tp=2, dp=2, zero=1, offload=KEPT), {"family": "swin-unet", "remat": "dots"}),
        slow(Layout(cp=2, zero=3, offload=BOTH), {"family": "swin-unet", "remat": "none"}),
        slow(Layout(dp=2, offload=ALONE), {"family": "swin", "remat": "full"}),
    ],
    ids=str,
)
def test_a_step_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(pp=2, zero=1, dp=2, offload=BOTH), THREE | {"remat": "dots"}),
        (Layout(pp=2, tp=2, schedule="zb-h1", offload=ALONE), THREE | {"remat": "none"}),
        (Layout(pp=2, dp=2, zero=3, schedule="zb-v", offload=BOTH), THREE | {"num_layers": 4}),
        (Layout(pp=2, stage_layers=(2, 1), zero=2, dp=2, offload=ALONE), THREE),
        (Layout(pp=2, schedule="interleaved", offload=BOTH), THREE | {"num_layers": 4}),
        (Layout(pp=2, offload=ALONE), {**tiny.T5, "scan_layers": False}),
    ],
    ids=str,
)
def test_a_pipeline_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **{"remat": "full", **choice}, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(dp=2, offload=ALONE), {"dtype": "float16", "remat": "full"}),
        (Layout(dp=2, zero=1, offload=BOTH), {"dtype": "bfloat16", "optimizer": "muon"}),
        (Layout(dp=2, zero=2, offload=EVERY), {"dtype": "bfloat16", "remat": "dots"}),
        (Layout(tp=2, offload=BOTH), {"dtype": "bfloat16", "optimizer": "adafactor"}),
    ],
    ids=str,
)
def test_steps_in_16_bits_follow_those_without(layout: Layout, choice: dict) -> None:
    found = []
    for each in (layout, dataclasses.replace(layout, offload="none")):
        program, losses = tiny.program(each, **THREE | choice), []
        state = program.init_state()
        for step in range(3):
            state, metrics = program.train_step(state, program.place(tiny.batch(step)))
            losses.append(float(metrics["loss"]))
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2, zero=1), Layout(pp=2)], ids=str)
def test_evaluation_and_sampling_read_parameters_from_host_memory(layout: Layout) -> None:
    found = []
    for offload in ("none", ALONE):
        program = tiny.program(dataclasses.replace(layout, offload=offload))
        params = program.init_state()["params"]
        loss = program.eval_step(params, program.place(tiny.batch()))["cross_entropy"]["sum"]
        write = Generator(program, tiny.VOCAB, Sampling(seed=1))
        found.append((float(loss), write(params, [1, 2], 4)))
    assert found[0] == found[1]


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offload", "params", "moments"),
    [(ALONE, {HOST}, {DEVICE}), (BOTH, {HOST}, {HOST, DEVICE}), ("none", {DEVICE}, {DEVICE})],
)
def test_parameters_and_moments_have_memories_of_their_own(
    offload: Any, params: set[str], moments: set[str]
) -> None:
    state = tiny.program(Layout(dp=2, zero=1, offload=offload)).abstract_state
    assert memories(state["params"]) == params
    assert memories(state["optimizer"]) == moments  # the number of updates is on the device
    assert memories((state["step"], state["guard"])) == {DEVICE}


def copied(jaxpr: Any) -> list[tuple[int, ...]]:
    """Shapes of the arrays copied to devices."""
    return [
        each.outvars[0].aval.shape
        for each in equations(jaxpr)
        if each.primitive.name == "device_put"
        and each.outvars[0].aval.memory_space == jax.memory.Space.Device
        and each.invars[0].aval.memory_space == jax.memory.Space.Host
    ]


def of_stacks(program: Program) -> list[tuple[int, ...]]:
    """Shapes of layers' matrices on a device, as stored in the state."""
    mesh = dict(program.mesh.shape)
    stored = program.states.stored
    names = [name for name, info in program.infos.items() if info.stack and len(info.shape) > 2]
    return [
        tuple(
            size // math.prod(mesh[axis] for axis in axes)
            for size, axes in zip(stored[name].stored_shape, _axes(stored[name].spec), strict=True)
        )
        for name in names
    ]


def _axes(spec: Any) -> list[tuple[str, ...]]:
    return [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(dp=2, zero=1), {"remat": "full"}),
        slow(Layout(tp=2), {"remat": "none"}),
        slow(Layout(dp=2, zero=3), {"remat": "dots", "scan_layers": False}),
        slow(Layout(pp=2, dp=2, zero=2), {"remat": "dots"}),
    ],
    ids=str,
)
def test_a_step_copies_layers_one_by_one_to_the_device(layout: Layout, choice: dict) -> None:
    """Whole stacks are copied once, for the update; the scans of the passes copy single layers."""
    program = tiny.program(dataclasses.replace(layout, offload=ALONE), **THREE | choice)
    stacks, jaxpr = of_stacks(program), traced(program).jaxpr
    passes = [shape for loop in scans(jaxpr) for shape in copied(loop.params["jaxpr"].jaxpr)]
    assert passes
    for shape in stacks:
        assert copied(jaxpr).count(shape) == stacks.count(shape)
        assert shape not in passes
        assert shape[1:] in passes


def test_copies_for_the_update_wait_for_updates_before() -> None:
    """XLA would otherwise copy the whole state at the beginning of a step."""
    program = tiny.program(Layout(tp=2, offload=BOTH))
    jaxpr = next(x for x in inside_all(traced(program).jaxpr) if waits(x))
    assert len(waits(jaxpr)) == 3 * len(program.infos)  # a parameter and two moments
    others = [each.invars[1] for each in waits(jaxpr)]
    assert len({*others}) >= len(program.infos) - 2  # all except the first of each sharding


def inside_all(jaxpr: Any) -> Iterator[Any]:
    """The jaxpr and all jaxprs inside."""
    yield jaxpr
    for each in equations(jaxpr):
        yield from inside(each)


def waits(jaxpr: Any) -> list[Any]:
    """Barriers that hold back an array on the host."""
    return [
        each
        for each in jaxpr.eqns
        if each.primitive.name == "optimization_barrier"
        and each.invars[0].aval.memory_space == jax.memory.Space.Host
        and len(each.invars) == 2
    ]


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(dp=2, tp=2, sequence_parallel=True, zero=1), {"remat": "dots"}),
        slow(Layout(dp=2, row=2, col=2, zero=2), {"remat": "full"}),
        slow(Layout(row=2, col=2), {"remat": "none"}),
        slow(Layout(dp=2, tp=2), {"remat": "attention", "scan_layers": False}),
        slow(Layout(pp=2, dp=2, zero=1), {"remat": "full", "micro_batches": 4}),
        slow(Layout(dp=2, cp=2, zero=1), {**tiny.T5, "remat": "dots"}),
    ],
    ids=str,
)
def test_collectives_are_those_of_the_formula(layout: Layout, choice: dict) -> None:
    program = tiny.program(dataclasses.replace(layout, offload=BOTH), **THREE | choice)
    assert subtract(count(program), formula(program)) == []


# ---- the planner --------------------------------------------------------------------------------


def test_the_planner_refuses_parameters_in_host_memory() -> None:
    config = tiny.config(Layout(), dtype="bfloat16")
    with pytest.raises(UserError, match="`plan` does not cover layout.offload=parameters"):
        plan(config, gpus=1, gpu="h100", pins={"layout.offload": ALONE})
