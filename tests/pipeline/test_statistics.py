"""Bubble, memory, messages and time: simulations against formulas and published numbers."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxptd.errors import UserError
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import SCHEDULES, Schedule, make_schedule, read_csv
from jaxptd.pipeline.statistics import (
    Durations,
    bubble,
    expected_bubble,
    expected_peak,
    held,
    makespan,
    messages,
    peak,
    simulate,
)
from tests.pipeline.test_schedules import STAGES, all_sizes

# Equal; W < F < B, as in transformers; a very short W.
DURATIONS = [Durations(), Durations(1.0, 1.25, 0.75), Durations(3, 2, 2), Durations(1, 1, 0.125)]


def from_text(tmp_path, text: str) -> Schedule:
    path = tmp_path / "table.csv"
    path.write_text(text)
    return read_csv(path)


# ---- the simulation -----------------------------------------------------------------------------


def test_an_operation_starts_when_its_stage_and_its_inputs_are_ready(tmp_path):
    schedule = from_text(tmp_path, "F0,F1,,B0,,B1\n,F0,B0,F1,B1,\n")
    timing = simulate(schedule, Durations(1, 2, 1))  # a backward takes 2 + 1
    assert timing.start.T.tolist() == [[0, 1, 0, 5, 0, 9], [0, 1, 2, 5, 6, 0]]
    assert timing.end.T.tolist() == [[1, 2, 0, 8, 0, 12], [0, 2, 5, 6, 9, 0]]
    assert timing.makespan == 12
    assert timing.busy.tolist() == [8, 8]
    assert timing.bubble == 4 / 8
    assert timing.idle == 1 - 8 / 12


def test_a_chunk_takes_its_share_and_b_and_w_their_own_times(tmp_path):
    schedule = from_text(tmp_path, "placement,v\nF0.0,F0.1,B0.1,W0.1,B0.0,W0.0\n")
    timing = simulate(schedule, Durations(2, 4, 8))
    assert timing.end[:, 0].tolist() == [1, 2, 4, 8, 10, 14]


def test_the_bubble_is_the_largest_of_all_stages(tmp_path):
    schedule = from_text(tmp_path, "F0,,,B0\n,F0,B0,\n")
    assert bubble(schedule) == pytest.approx(3 / 3)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("durations", DURATIONS)
def test_the_time_of_a_step(durations, p):
    whole = sum(durations)
    for name in ("gpipe", "1f1b", "interleaved"):
        for schedule in all_sizes(name, p):
            m, V = schedule.micro_batches, schedule.chunks
            time = simulate(schedule, durations).makespan
            if m % p == 0 or V == 1:
                assert time == pytest.approx((m + (p - 1) / V) * whole)
            else:
                assert time > (m + (p - 1) / V) * whole


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, -1, 1), (1, 1, float("nan")), (float("inf"), 1, 1)])
def test_other_durations_than_positive_numbers_are_refused(bad):
    with pytest.raises(UserError, match="durations F, B, W = .*: use numbers from 1e-9 to 1e9"):
        simulate(make_schedule("1f1b", stages=2, micro_batches=2), Durations(*bad))


# ---- the bubble ---------------------------------------------------------------------------------


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_equals_its_formula(name, p):
    enough = {"zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p - 1}.get(name, 1)
    for schedule in all_sizes(name, p):
        m = schedule.micro_batches
        for durations in DURATIONS:
            known = m >= enough and not (name == "interleaved" and m % p)
            known &= name != "zb-v" or durations == Durations()
            expected = expected_bubble(schedule, durations)
            assert (expected is not None) == known
            if known:
                assert bubble(schedule, durations) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        ("gpipe", None, 3 / 8),
        ("1f1b", None, 3 / 8),
        ("interleaved", 2, 3 / 16),
        ("interleaved", 3, 3 / 24),
        ("zb-h1", None, 3 * (1 + 1.25 - 0.75) / (8 * 3)),
        ("zb-h2", None, 3 * (1 + 1.25 - 1.5) / (8 * 3)),
    ],
)
def test_the_bubble_of_4_stages_and_8_micro_batches(name, chunks, expected):
    """Narayanan et al., section 2.2; Qi et al., table 1."""
    schedule = make_schedule(name, stages=4, micro_batches=8, virtual_stages=chunks)
    durations = Durations(1, 1.25, 0.75)
    assert expected_bubble(schedule, durations) == pytest.approx(expected)
    assert bubble(schedule, durations) == pytest.approx(expected)


def test_there_is_no_formula_if_w_takes_longer_than_f_or_b():
    for name, durations in itertools.product(("zb-h1", "zb-h2"), ((1, 1, 1.5), (1, 2, 1.5))):
        schedule = make_schedule(name, stages=4, micro_batches=8)
        assert expected_bubble(schedule, Durations(*durations)) is None


def test_there_is_no_formula_for_a_table_from_a_file():
    schedule = make_schedule("1f1b", stages=2, micro_batches=2)
    mine = dataclasses.replace(schedule, name="mine.csv")
    assert expected_bubble(mine) is None
    assert expected_peak(mine) is None
    assert bubble(mine) == bubble(schedule)


def test_the_times_of_a_step_are_in_the_order_of_the_papers():
    times = {
        name: simulate(make_schedule(name, stages=4, micro_batches=8)).makespan
        for name in SCHEDULES
    }
    assert times == {
        "gpipe": 33,
        "1f1b": 33,
        "interleaved": 28.5,
        "zb-h1": 27,
        "zb-h2": 27,  # no stage pauses, but stages finish one after another
        "zb-v": 25.5,
    }


# ---- memory -------------------------------------------------------------------------------------


def test_activations_are_held_from_f_to_b(tmp_path):
    schedule = from_text(tmp_path, "F0,F1,,B0,,B1\n,F0,B0,F1,B1,\n")
    assert held(schedule).T.tolist() == [[1, 2, 2, 2, 1, 1], [0, 1, 1, 1, 1, 0]]
    assert peak(schedule).tolist() == [2, 1]


def test_activations_are_held_from_f_to_w_if_backward_is_split(tmp_path):
    schedule = from_text(tmp_path, "placement,v\nF0.0,F0.1,B0.1,W0.1,B0.0,W0.0\n")
    assert held(schedule)[:, 0].tolist() == [1, 2, 2, 2, 1, 1]
    assert peak(schedule).tolist() == [1]


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peak_equals_its_formula(name, p):
    for schedule in all_sizes(name, p):
        expected = expected_peak(schedule)
        if name == "interleaved" and schedule.micro_batches % p:
            assert expected is None
        else:
            np.testing.assert_allclose(peak(schedule), expected, rtol=1e-15)


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        ("gpipe", None, [8, 8, 8, 8]),
        ("1f1b", None, [4, 3, 2, 1]),
        ("interleaved", 2, [5.5, 4.5, 3.5, 2.5]),
        ("zb-h1", None, [4, 4, 4, 4]),
        ("zb-h2", None, [7, 7, 7, 7]),
        ("zb-v", None, [4, 4, 4, 4]),
    ],
)
def test_the_peak_of_4_stages_and_8_micro_batches(name, chunks, expected):
    schedule = make_schedule(name, stages=4, micro_batches=8, virtual_stages=chunks)
    assert peak(schedule).tolist() == expected


@pytest.mark.parametrize(("p", "V"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_interleaving_takes_more_memory_by_the_factor_of_the_paper(p, V):
    """Narayanan et al.: the first stage needs 1 + (p-1)/(pV) times the memory of 1F1B."""
    schedule = make_schedule("interleaved", stages=p, micro_batches=4 * p, virtual_stages=V)
    assert peak(schedule)[0] == pytest.approx(p * (1 + (p - 1) / (p * V)))


# ---- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_number_of_messages(name, p):
    for schedule in all_sizes(name, p):
        m, V = schedule.micro_batches, schedule.chunks
        crossings = (
            2 * p - 2 if name == "zb-v" else p * V - 1
        )  # a v saves one message where it turns
        assert messages(schedule) == (2 * m * crossings if p > 1 else 0)


# ---- stages that wait for each other at hops ----------------------------------------------------

RUN_SIZES = [(2, 4), (4, 8), (5, 10), (8, 32)]


def plan(name: str, stages: int, micro_batches: int) -> Plan:
    schedule = make_schedule(name, stages=stages, micro_batches=micro_batches)
    return Plan(schedule, {"blocks": (1,) * schedule.parts})


@pytest.mark.parametrize(("stages", "micro_batches"), RUN_SIZES)
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v"])
def test_waiting_at_hops_takes_no_time(name: str, stages: int, micro_batches: int) -> None:
    each = plan(name, stages, micro_batches)
    assert makespan(each) == pytest.approx(simulate(each.schedule).makespan)


@pytest.mark.parametrize(("stages", "micro_batches"), RUN_SIZES)
def test_with_1f1b_waiting_takes_no_time_whatever_backward_takes(stages, micro_batches) -> None:
    each, durations = plan("1f1b", stages, micro_batches), Durations(1.0, 1.7, 0.6)
    want = (micro_batches + stages - 1) * sum(durations)
    assert makespan(each, durations) == pytest.approx(want)


@pytest.mark.parametrize(("stages", "micro_batches"), [*RUN_SIZES, (3, 6), (16, 32)])
@pytest.mark.parametrize("virtual_stages", [2, 3, 5])
def test_interleaved_does_not_wait_either(stages, micro_batches, virtual_stages) -> None:
    sizes = {"stages": stages, "micro_batches": micro_batches, "virtual_stages": virtual_stages}
    schedule, durations = make_schedule("interleaved", **sizes), Durations(1.0, 1.7, 0.6)
    each = Plan(schedule, {"blocks": (1,) * schedule.parts})
    want = (micro_batches + (stages - 1) / virtual_stages) * sum(durations)
    assert makespan(each, durations) == pytest.approx(want)


def test_a_stage_at_f_waits_for_one_at_b_if_a_hop_joins_them(tmp_path) -> None:
    """Two stages in a ring run F and B at the same ticks, and exchange values after each."""
    first = "F0.0,F1.0,F0.1,F1.1,,B0.1,,B1.1,B0.0,B1.0\n"
    second = ",F0.0,F1.0,F0.1,B0.1,F1.1,B1.1,B0.0,B1.0,\n"
    schedule = from_text(tmp_path, first + second)
    each = Plan(schedule, {"blocks": (1,) * schedule.parts})
    assert (simulate(schedule).makespan, makespan(each)) == (7.5, 8.0)
    alike = Durations(1.0, 0.5, 0.5)  # a forward takes as long as a backward: no waiting
    assert makespan(each, alike) == simulate(schedule, alike).makespan


def test_one_stage_does_not_wait() -> None:
    assert makespan(plan("1f1b", 1, 3), Durations(1, 2, 3)) == 18
