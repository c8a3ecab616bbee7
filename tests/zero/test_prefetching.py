"""A loop over layers moves parameters and gradients that the same iteration does not need."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import pytest
import tiny
from one_device import case, hold
from reading import needs, reading
from turns import slow

from jaxptd import comms
from jaxptd.analysis.compiled_step import compile_to_read
from jaxptd.analysis.hlo.text import parse, scope_of
from jaxptd.analysis.jaxprs import equations, inside, scans, traced
from jaxptd.costs.collective import ALL_GATHER
from jaxptd.mesh import ZERO_AXES, Layout
from jaxptd.pipeline.pools import APART
from jaxptd.step import Program
from jaxptd.zero.plan import layers_plan

GATHER, SCATTER = "all_gather", "reduce_scatter"
THREE = {"num_layers": 3}


# ---- what an iteration waits for ----------------------------------------------------------------


def moves(body: Any) -> list[Any]:
    """ZeRO's collectives among the equations of a jaxpr, and of those inside it."""
    return [
        each
        for each in equations(body)
        if each.primitive.name in (GATHER, SCATTER) and each.params["axis_name"] == ZERO_AXES
    ]


def has_product(equation: Any) -> bool:
    """True for a matmul, and for a call or loop that contains one."""
    inner = (each for jaxpr in inside(equation) for each in equations(jaxpr))
    return any(each.primitive.name == "dot_general" for each in (equation, *inner))


def trips(program: Program) -> Iterator[Any]:
    """Bodies of the innermost loops with ZeRO's collectives."""
    for loop in scans(traced(program).jaxpr):
        body = loop.params["jaxpr"].jaxpr
        found = moves(body)
        if found and all(any(x is each for each in body.eqns) for x in found):
            yield body


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(dp=4, zero=2), {"remat": "dots"}),
        slow(Layout(dp=4, zero=1), {"remat": "full", "micro_batches": 1}),
        (Layout(dp=2, zero=1), {"remat": "dots", "micro_batches": 2}),
        slow(Layout(dp=2, cp=2, zero=3), {"remat": "full", "dropout": 0.1}),
        (Layout(dp=2, tp=2, sequence_parallel=True, zero=3), {"remat": "none"}),
        slow(Layout(dp=2, row=2, col=2, zero=3), {"remat": "attention"}),
        slow(Layout(dp=4, zero=3), tiny.T5),
        slow(Layout(dp=4, zero=2), {**tiny.T5, "micro_batches": 1}),
        slow(Layout(dp=2, tp=2, zero=1), {**tiny.T5, "micro_batches": 2}),
    ],
    ids=str,
)
def test_collectives_of_a_trip_neither_wait_for_its_products_nor_these_for_them(
    layout: Layout, choice: dict
) -> None:
    program = tiny.program(layout, **THREE | choice)
    plan = program.resolved.zero.layers
    assert plan.prefetches or plan.reduce == "last_microbatch"
    kinds = []
    for body in trips(program):
        products = [each for each in body.eqns if has_product(each)]
        assert products
        kinds.append({each.primitive.name for each in moves(body)})
        for move in moves(body):
            assert not any(map(has_product, needs(body, move)))
            assert not any(x is move for each in products for x in needs(body, each))
    stacks = len(program.resolved.family.architecture(program.config.model).stacks)
    again = {GATHER} if layout.zero == 3 else set()
    several = layout.zero == 2 and program.config.train.micro_batches > 1
    assert kinds == stacks * [{GATHER}] + (1 + several) * stacks * [{SCATTER} | again]


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="see collectives.after")
def test_of_two_trips_in_one_the_second_waits_for_what_the_first_moves() -> None:
    """Backward's gathers wait for the incoming gradient of x, its scatters for the outgoing one."""
    program = tiny.program(Layout(dp=2, zero=3), **THREE | {"remat": "full"})
    *_, loop = (each for each in scans(traced(program).jaxpr) if each.params["reverse"])
    body = loop.params["jaxpr"].jaxpr
    *carry, _, x = body.invars[-2 - len(body.outvars) :]  # the rest: the layer's number, its input
    (number,) = (i for i, dx in enumerate(body.outvars) if dx.aval.shape == x.aval.shape)
    waiting = reading(body, {carry[number]})
    found = moves(body)
    assert {each.primitive.name for each in found} == {GATHER, SCATTER}
    for move in found:
        if move.primitive.name == GATHER:
            assert any(move is each for each in waiting)
        else:
            last = [x for each in needs(body, move) for x in each.outvars]
            assert body.outvars[number] in last


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(dp=2, zero=1), {"micro_batches": 2, "scan_layers": False}),
        (Layout(dp=2, zero=1), {"micro_batches": 1, "scan_layers": False}),
        slow(Layout(pp=2, dp=2, zero=1), {"micro_batches": 2}),
        (Layout(dp=2, zero=3), {"scan_layers": False}),
        slow(Layout(pp=2, dp=2, zero=3), {}),
    ],
    ids=str,
)
def test_other_steps_do_not_move_ahead(layout: Layout, choice: dict) -> None:
    program = tiny.program(layout, **choice)
    plan = program.resolved.zero.layers
    assert not plan.prefetches
    assert plan.reduce != "last_microbatch"
    for body in trips(program):
        assert any(has_product(x) for move in moves(body) for x in needs(body, move))


@pytest.mark.parametrize(
    ("stage", "micro_batches", "apart"),
    [slow(1, 2, 1), slow(1, 3, 2), slow(1, 4, 1), (2, 2, 1), slow(2, 3, 0)],
)
def test_xla_keeps_single_micro_batches_in_loops_of_their_own(
    stage: Any, micro_batches: int, apart: int
) -> None:
    """The last one and one in between; outside of loops they would overlap with the first."""
    layout, batch = Layout(dp=2, zero=stage), 4 * micro_batches
    program = tiny.program(layout, micro_batches=micro_batches, batch=batch)
    computations, _ = parse(compile_to_read(program).as_text())
    every = [each for body in computations.values() for each in body if each.kind == "while"]
    assert [each.trip_count for each in every if scope_of(each) == APART] == [None] * apart


def test_an_evaluation_gathers_each_layer_once() -> None:
    program = tiny.program(Layout(dp=2, zero=3), **THREE)
    evaluate: Any = program.eval_step
    params = program.abstract_state["params"]
    jaxpr = evaluate.trace(params, program.abstract_batch).jaxpr
    every = comms.collectives_of(jaxpr, program.mesh)
    (gathered,) = [each.bytes for each in every if each.kind == ALL_GATHER]
    each_micro_batch = program.config.train.micro_batches
    assert gathered == sum(
        4 * math.prod(stored.stored_shape) * (each_micro_batch if stored.info.stack else 1)
        for stored in program.states.stored.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "first"), [(0, 1), (1, 2), (2, 1), (3, 1)])
def test_micro_batches_add_to_sums_and_stack_no_gradients(stage: int, first: int) -> None:
    """One more micro-batch takes little memory; with `first` there is one stack of gradients."""
    memory, choice = {}, {"num_layers": 16, "remat": "full"}
    for number in (first, first + 1):
        program = tiny.program(
            Layout(dp=2, zero=stage), **choice, batch=2 * number, micro_batches=number
        )
        memory[number] = compile_to_read(program).memory_analysis().temp_size_in_bytes
    stored = [each for each in program.states.stored.values() if each.info.stack]
    stack = sum(4 * math.prod(each.stored_shape) for each in stored) // (2 if stage > 1 else 1)
    assert memory[first + 1] - memory[first] < stack / 2


@pytest.mark.parametrize("stage", [1, slow(3)])
def test_sums_are_added_to_in_place(stage: int) -> None:
    """Sums grow one layer at a time: no add in a micro-batch's loop covers all layers."""
    program = tiny.program(Layout(dp=2, zero=stage), **THREE, micro_batches=2)
    stacks = {each.stored_shape for each in program.states.stored.values() if each.info.stack}
    local = {(n, shards // 2) for n, shards in stacks}
    loops = [each for each in equations(traced(program).jaxpr) if APART in scope(each)]
    added = [x for each in loops for x in inner(each, "add")]
    assert loops
    assert added
    assert not local & {each.outvars[0].aval.shape for each in added}


def scope(equation: Any) -> str:
    """An equation's innermost named scope."""
    return str(equation.source_info.name_stack).rpartition("/")[2]


def inner(equation: Any, name: str) -> list[Any]:
    """Equations of a primitive inside an equation."""
    every = (each for jaxpr in inside(equation) for each in equations(jaxpr))
    return [each for each in every if each.primitive.name == name]


# ---- one step -----------------------------------------------------------------------------------

MIXED = {"remat_layers": 1, "documents": "apart", "dropout": 0.1}  # loops of one and of two layers


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow(*case(THREE | {"remat": "dots"}, 2, dp=2, zero=1).values, id="dp=2 zero=1 m=2 dots"),
        case(THREE | {"remat": "full", "batch": 12}, 3, dp=2, zero=1),
        slow(*case(THREE | {"remat": "none"}, 1, dp=2, zero=2).values, id="dp=2 zero=2 m=1 none"),
        case(THREE | {"remat": "full", "dropout": 0.1}, 2, dp=2, ep=2, cp=2, zero=3),
        slow(
            *case(THREE | {"scan_layers": False}, 1, dp=2, zero=3).values, id="dp=2 zero=3 unrolled"
        ),
    ],
)
def test_a_step_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(THREE | MIXED | {"remat": "full"}, 2, dp=2, tp=2, zero=3),
        case(THREE | MIXED | {"remat": "dots"}, 1, dp=2, tp=2, zero=2),
        case(THREE | MIXED | {"remat": "dots", "batch": 12}, 3, dp=2, tp=2, zero=1),
    ],
)
def test_a_step_of_mixed_layers_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "attention", "dots", "full"])
@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 3), (2, 1), (3, 2)])
def test_both_stacks_of_an_encoder_decoder_equal_one_device(
    stage: int, micro_batches: int, remat: str
) -> None:
    layout = Layout(dp=2, tp=2, sequence_parallel=True, zero=stage)
    choice = {**tiny.T5, "dropout": 0.1, "remat": remat, "batch": 12}
    hold(layout, micro_batches=micro_batches, **choice)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 2), (2, 1), (3, 1)])
def test_a_loop_of_one_layer_equals_one_device(stage: int, micro_batches: int) -> None:
    hold(Layout(dp=2, zero=stage), num_layers=1, dropout=0.1, micro_batches=micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(THREE | {"optimizer": "muon"}, 2, dp=2, tp=2, zero=1),
        case(THREE | {"optimizer": "adafactor", "batch": 12}, 4, dp=3, zero=1),
        case(THREE | {"remat": "dots"}, 2, dp=2, zero=1, offload="optimizer"),
        case(THREE | {"remat": "dots"}, 2, dp=2, zero=1, offload=["optimizer", "activations"]),
        case(THREE | {"remat": "full"}, 2, dp=2, row=2, col=2, zero=1),
        case(THREE | {"remat": "none", "batch": 12}, 3, ep=2, cp=2, zero=1),
        case({"family": "swin-unet", "remat": "dots"}, 2, dp=2, zero=1),
        case(THREE | {"remat": "full", "remat_layers": 2}, 4, dp=2, zero=1),
        case(THREE | {"remat": "dots", "remat_layers": 1}, 2, dp=2, tp=2, zero=2),
        case(THREE | {"remat": "none", "optimizer": "muon"}, 4, ep=2, cp=2, zero=2),
        case(THREE | {"remat": "full", "batch": 12}, 3, dp=2, row=2, col=2, zero=2),
        case(THREE | {"remat": "dots"}, 2, dp=2, zero=2, offload=["optimizer", "activations"]),
        case({**tiny.T5, "remat": "attention"}, 4, dp=2, zero=2),
        case({"family": "swin-unet", "remat": "none"}, 2, dp=2, tp=2, zero=2),
    ],
)
def test_moves_beside_the_first_and_the_last_micro_batch_equal_one_device(
    layout: Layout, choice: dict
) -> None:
    assert layers_plan(tiny.config(layout, **choice)).gather == "first_microbatch"
    hold(layout, **choice)
