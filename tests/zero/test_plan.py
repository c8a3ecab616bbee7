"""What a step does with parameters: a record per group, decided from the config alone."""

import dataclasses
from typing import Any

import pytest
import tiny

from jaxptd.layout import Layout
from jaxptd.models.stages import parameter_infos
from jaxptd.zero.plan import WHOLE, explained, layers_plan, plan_of

NARROW = {"dtype": "bfloat16"}


def handled(layout: Layout, **choice: Any) -> tuple[str, ...]:
    """(gather, reduce, accumulate, gradient precision) of the layers' matrices."""
    plan = layers_plan(tiny.config(layout, **choice))
    return plan.gather, plan.reduce, plan.accumulate, plan.grad_dtype


@pytest.mark.parametrize(
    ("layout", "micro_batches", "want"),
    [
        (Layout(dp=2), 1, ("never", "end", "after", "bfloat16")),
        (Layout(dp=2), 2, ("never", "end", "in_loop", "float32")),
        (Layout(dp=2, zero=1), 1, ("first_microbatch", "each_layer", "after", "float32")),
        (Layout(dp=2, zero=1), 2, ("first_microbatch", "last_microbatch", "after", "float32")),
        (Layout(dp=2, zero=1), 4, ("first_microbatch", "last_microbatch", "in_loop", "float32")),
        (Layout(dp=2, zero=2), 1, ("first_microbatch", "each_layer", "after", "float32")),
        (Layout(dp=2, zero=2), 2, ("first_microbatch", "each_layer", "in_loop", "float32")),
        (Layout(dp=2, zero=3), 2, ("layer", "each_layer", "in_loop", "float32")),
        (Layout(offload="parameters"), 1, ("layer", "end", "after", "bfloat16")),
        (Layout(offload="optimizer"), 1, ("step", "end", "after", "bfloat16")),
        (Layout(dp=2, zero=1, offload="parameters"), 4, ("layer", "end", "in_loop", "float32")),
        (Layout(pp=2, dp=2), 4, ("never", "end", "in_tick", "float32")),
        (Layout(pp=2, dp=2, zero=1), 4, ("step", "end", "in_tick", "bfloat16")),
        (Layout(pp=2, dp=2, zero=3), 4, ("layer", "each_layer", "in_tick", "float32")),
        (Layout(row=2, col=2), 1, ("never", "end", "after", "float32")),
    ],
    ids=str,
)
def test_what_a_step_does_with_the_layers_matrices(
    layout: Layout, micro_batches: int, want: tuple[str, ...]
) -> None:
    assert handled(layout, micro_batches=micro_batches, **NARROW) == want


@pytest.mark.parametrize(
    ("layout", "micro_batches", "beside"),
    [
        (Layout(replicas=2, dp=2), 1, False),
        (Layout(replicas=2, dp=2, zero=1), 1, True),
        (Layout(replicas=2, dp=2, zero=1), 3, True),  # the last one sends the sums
        (Layout(replicas=2, dp=2, zero=3), 1, True),
        (Layout(replicas=2, dp=2, zero=3), 2, False),  # else each micro-batch would send
        (Layout(replicas=2, pp=2, dp=2, zero=3), 1, False),
        (Layout(replicas=2, dp=2, zero=1, replica_state="split"), 1, False),  # at the end: parts
        (Layout(dp=2, zero=3), 1, False),
    ],
    ids=str,
)
def test_layers_add_up_replicas_where_they_send_once(
    layout: Layout, micro_batches: int, beside: bool
) -> None:
    config = tiny.config(layout, micro_batches=micro_batches, batch=24)
    assert layers_plan(config).sums_replicas == beside
    matrices = (info for info in parameter_infos(config).values() if info.stack and info.matrix)
    why = explained(config, next(matrices))[1]
    said = {True: "over replicas beside the layers", False: "over replicas at the end of the step"}
    assert (said[beside] in why.reduce) == bool(layout.zero and layout.replicas > 1)
    assert ("layout.replicas=2" in why.where) == bool(layout.zero and layout.replicas > 1)
    first = layers_plan(config).first
    assert first.sums_replicas == (beside and first.reduce != "end")


@pytest.mark.parametrize(
    ("stage", "micro_batches", "choice", "want"),
    [
        (0, 1, {}, 0),
        (1, 1, {}, 2),  # the same bytes, overlapped with the layers
        (1, 2, {}, 1),
        (1, 1, {"scan_layers": False}, 1),
        (2, 1, {}, 2),
        (3, 1, {}, 3),
    ],
)
def test_the_stage_is_that_which_a_step_runs(
    stage: Any, micro_batches: int, choice: dict, want: int
) -> None:
    config = tiny.config(Layout(dp=2, zero=stage), micro_batches=micro_batches, **choice)
    assert layers_plan(config).stage == want


def test_a_first_a_middle_and_a_last_micro_batch_of_stage_1() -> None:
    """The first gathers and keeps parameters; the last reduces the unsharded gradients."""
    plan = layers_plan(tiny.config(Layout(dp=2, zero=1), micro_batches=4, **NARROW))
    assert [each.moves for each in (plan.first, plan.middle, plan)] == [True, False, True]
    reduces = [each.reduce for each in (plan.first, plan.middle, plan)]
    assert reduces == ["end", "end", "last_microbatch"]
    two = layers_plan(tiny.config(Layout(dp=2, zero=1), micro_batches=2, **NARROW))
    assert (plan.first.grad_dtype, two.first.grad_dtype) == ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(dp=2, zero=3), NARROW),
        (Layout(row=2, col=2), NARROW),
        (Layout(pp=2, dp=2, zero=1), {**NARROW, "micro_batches": 4}),
        (Layout(dp=2, zero=1), {**tiny.T5, **NARROW, "micro_batches": 4}),
        (Layout(dp=2, zero=1), {"optimizer": "muon", "scan_layers": False}),
    ],
    ids=str,
)
def test_parameters_are_handled_in_a_few_groups(layout: Layout, choice: dict) -> None:
    """Layers share their matrices' plan except for precision and collectives; each has a reason."""
    config = tiny.config(layout, **choice)
    infos, layers = parameter_infos(config), layers_plan(config)
    plans = {name: plan_of(config, info) for name, info in infos.items()}
    assert 2 <= len(set(plans.values())) <= 4
    for name, info in infos.items():
        plan, why = explained(config, info)
        assert plan == plans[name]
        assert all(why)
        if info.stack is None:
            assert plan.runs == "outside"
            assert not plan.moves
            assert plan.grad_dtype == "float32"
        else:
            fields = ("gather_dtype", "own_collective", "grad_dtype")
            alike = dataclasses.replace(plan, **{name: getattr(layers, name) for name in fields})
            assert alike == layers
            assert plan == layers or not info.matrix


def test_parameters_that_are_there_are_whole_and_do_not_move() -> None:
    assert not WHOLE.moves
    assert not WHOLE.traces_layers
    assert WHOLE.stage == 0


def test_muon_has_shards_of_one_layer() -> None:
    shards = {
        name: layers_plan(
            tiny.config(Layout(dp=2, zero=1), optimizer=name, scan_layers=False)
        ).shards
        for name in ("adamw", "muon")
    }
    assert shards == {"adamw": "stack", "muon": "layer"}
