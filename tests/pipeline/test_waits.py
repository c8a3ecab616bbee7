"""What a step takes where stages wait for each other at hops."""

import pytest

from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.statistics import Durations, makespan, simulate

SIZES = [(2, 4), (4, 8), (5, 10), (8, 32)]


def plan(name: str, stages: int, micro_batches: int) -> Plan:
    schedule = make_schedule(name, stages=stages, micro_batches=micro_batches)
    return Plan(schedule, (1,) * schedule.parts)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v"])
def test_hops_cost_these_nothing(name: str, stages: int, micro_batches: int) -> None:
    each = plan(name, stages, micro_batches)
    assert makespan(each) == pytest.approx(simulate(each.schedule).makespan)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_pairs_keep_1f1b_from_waiting_whatever_backward_takes(stages, micro_batches) -> None:
    each, durations = plan("1f1b", stages, micro_batches), Durations(1.0, 1.7, 0.6)
    want = (micro_batches + stages - 1) * sum(durations)
    assert makespan(each, durations) == pytest.approx(want)


def test_a_closed_ring_waits_for_the_longest_operation() -> None:
    """Interleaved: nearly a tick of backward's length for every tick, where half are forwards."""
    each = plan("interleaved", 4, 8)
    assert simulate(each.schedule).makespan == 28.5
    assert makespan(each) == 34.0
    alike = Durations(1.0, 0.5, 0.5)  # forward as long as backward: nothing to wait for
    assert makespan(each, alike) == pytest.approx(simulate(each.schedule, alike).makespan)


def test_one_stage_waits_for_none() -> None:
    assert makespan(plan("1f1b", 1, 3), Durations(1, 2, 3)) == 18
