"""The formula for a pipeline's time agrees with the project's tables."""

import pytest

from jaxptd.errors import UserError
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.statistics import Durations, makespan, simulate, simulate_stages
from jaxptd.planner.cost.description import pipelined, scheduled, stage_layers


def stages(*scales: float) -> list[Durations]:
    return [Durations(1.0 * x, 1.1 * x, 0.9 * x) for x in scales]


def table_time(name: str, each: list[Durations], m: int, chunks: int | None = None) -> float:
    schedule = make_schedule(name, stages=len(each), micro_batches=m, virtual_stages=chunks)
    return simulate_stages(schedule, each).makespan


@pytest.mark.parametrize("m", [4, 8, 9])
@pytest.mark.parametrize("scales", [(1, 1, 1, 1), (1, 1, 1, 1.3), (1.1, 1, 0.9, 1.2)], ids=str)
def test_1f1b(m: int, scales: tuple[float, ...]) -> None:
    each = stages(*scales)
    formula = pipelined([sum(stage) for stage in each], m)
    assert formula == pytest.approx(table_time("1f1b", each, m), rel=1e-9)
    assert scheduled("1f1b", each, m) == formula


@pytest.mark.parametrize("m", [4, 8, 9, 32])
@pytest.mark.parametrize("scales", [(1.3, 1, 1, 1), (1, 1.3, 1, 1), (1.2, 1, 1, 1.1)], ids=str)
def test_an_early_slow_stage_is_faster_than_the_formula(m: int, scales: tuple[float, ...]) -> None:
    each = stages(*scales)
    formula = pipelined([sum(stage) for stage in each], m)
    assert scheduled("1f1b", each, m) == table_time("1f1b", each, m)
    most = (len(each) - 1) * 3 * (max(scales) - min(scales))
    assert 0 < formula - scheduled("1f1b", each, m) <= most + 1e-9


@pytest.mark.parametrize(("p", "m", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 4, 3), (8, 16, 2)])
def test_interleaved(p: int, m: int, chunks: int) -> None:
    each = stages(*[1.0] * p)
    table = table_time("interleaved", each, m, chunks)
    assert scheduled("interleaved", each, m, chunks=chunks) == pytest.approx(table, rel=1e-9)
    schedule = make_schedule("interleaved", stages=p, micro_batches=m, virtual_stages=chunks)
    plan = Plan(schedule, {"blocks": (1,) * schedule.parts})
    assert makespan(plan, each[0]) == pytest.approx(table, rel=1e-9)  # including waits at hops
    # a last stage slowed by the loss: other stages do not wait exactly as in the formula
    each = stages(*[1.0] * (p - 1), 1.1)
    table = table_time("interleaved", each, m, chunks)
    assert scheduled("interleaved", each, m, chunks=chunks) == pytest.approx(table, rel=0.015)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "zb-h2", "zb-v"])
def test_others_are_simulated(name: str) -> None:
    each = stages(1, 1, 1, 1.2)
    assert scheduled(name, each, 8) == table_time(name, each, 8)
    schedule = make_schedule(name, stages=4, micro_batches=8)
    assert simulate_stages(schedule, stages(1, 1, 1, 1)).makespan == pytest.approx(
        simulate(schedule, Durations(1.0, 1.1, 0.9)).makespan
    )


def test_interleaved_that_does_not_divide_is_simulated() -> None:
    each = stages(1, 1, 1, 1)
    assert scheduled("interleaved", each, 6) == table_time("interleaved", each, 6)
    assert scheduled("interleaved", each, 6) > pipelined([3.0] * 4, 6, 2)


def test_no_such_schedule() -> None:
    with pytest.raises(UserError, match="use one of 1f1b"):
        scheduled("2f", stages(1, 1), 4)


def test_layers_that_do_not_divide_are_missing_at_the_ends() -> None:
    assert stage_layers(8, 4) == [2, 2, 2, 2]
    assert stage_layers(7, 4) == [2, 2, 2, 1]
    assert stage_layers(6, 4) == [1, 2, 2, 1]
    assert stage_layers(5, 4) == [1, 2, 1, 1]
    assert stage_layers(5, 1) == [5]
