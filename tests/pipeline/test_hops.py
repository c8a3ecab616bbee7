"""Hops of schedules: between neighbours only, and as few as deliver all results."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_schedule

from jaxptd.pipeline.plan import Hops, Plan
from jaxptd.pipeline.schedules import SCHEDULES, Operation, Schedule, make_schedule

STAGES = [1, 2, 3, 4, 5, 7, 8]
F, B, W = Operation.F, Operation.B, Operation.W


def moved(schedule: Schedule) -> dict[int, set[tuple[int, int]]]:
    """The (source, target) of every result that another stage reads, by tick."""
    found = defaultdict(set)
    for tick, s, kind, _, chunk in schedule.operations():
        q = schedule.part(s, chunk) + {F: 1, B: -1, W: 0}[kind]
        if kind != W and 0 <= q < schedule.parts and schedule.where(q)[0] != s:
            found[tick].add((s, schedule.where(q)[0]))
    return found


def known(p: int, *, closed: bool) -> dict[str, set[tuple[int, int]]]:
    """Every hop on a line or a closed ring; the last edge of an odd ring belongs to no pair."""
    edges = [(s, s + 1) for s in range(p - 1)] + ([(p - 1, 0)] if closed else [])
    paired = edges[:-1] if closed and p % 2 else edges
    both = {
        parity: {way for s, to in paired if s % 2 == parity for way in ((s, to), (to, s))}
        for parity in (0, 1)
    }
    back = {(to, s) for s, to in edges}
    return {"even": both[0], "odd": both[1], "onward": set(edges), "back": back}


def hold(schedule: Schedule) -> None:
    hops, p, needed = hops_of(schedule), schedule.stages, moved(schedule)
    every = {pair for pairs in needed.values() for pair in pairs}
    ways = known(p, closed=p > 2 and bool(every & {(0, p - 1), (p - 1, 0)}))
    for name, pairs in hops.pairs.items():
        assert sorted(pairs) == sorted(ways[name])
        assert len({s for s, _ in pairs}) == len({to for _, to in pairs}) == len(pairs)
        assert all((to - s) % p in (1, p - 1) for s, to in pairs)
        assert hops.taken[name].any()
    assert hops.together[0] == ()
    assert len(set(hops.together)) == len(hops.together) == max(hops.chosen, default=0) + 1
    for tick in range(schedule.ticks):
        names = hops.at(tick)
        assert names == tuple(name for name in hops.pairs if hops.taken[name][tick])
        assert names == hops.together[hops.chosen[tick]]
        assert needed[tick] <= {pair for name in names for pair in hops.pairs[name]}
        fewest = min(
            count
            for count in range(3)
            for some in itertools.combinations(ways.values(), count)
            if needed[tick] <= set().union(*some)
        )
        assert len(names) == fewest
        for source, target in needed[tick]:
            column = hops.column(tick, source, target)
            assert column.startswith("in_")
            assert (source, target) in hops.pairs[column[3:]]
        assert all(hops.column(tick, s, s) == "keep" for s in range(p))


def hops_of(schedule: Schedule) -> Hops:
    return Plan(schedule, {"blocks": (1,) * schedule.parts}).hops


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_hops_cover_all_results_and_are_as_few_as_possible(name: str, p: int) -> None:
    for m in (1, 2, p, p + 1, 2 * p, 3 * p):
        hold(make_schedule(name, stages=p, micro_batches=m))


@given(st.integers(0, 10**6))
@settings(max_examples=100)
def test_hops_of_a_random_schedule_too(seed: int) -> None:
    hold(random_schedule(seed))


@pytest.mark.parametrize("p", STAGES)
def test_1f1b_alternates_between_even_and_odd_pairs(p: int) -> None:
    """No tick has two hops."""
    for m in (1, p, 3 * p):
        hops = hops_of(make_schedule("1f1b", stages=p, micro_batches=m))
        assert set(hops.pairs) == {"even", "odd"} if p > 2 else set(hops.pairs) <= {"even"}
        for tick in range(hops.ticks):
            names = ("even", "odd")[tick % 2] if p > 1 else None
            assert hops.at(tick) in ((), (names,))


@pytest.mark.parametrize("p", STAGES)
def test_gpipe_has_hops_onward_and_then_back(p: int) -> None:
    """No tick has two hops; checked where all stages are busy."""
    hops = hops_of(make_schedule("gpipe", stages=p, micro_batches=2 * p))
    assert all(len(hops.at(tick)) <= 1 for tick in range(hops.ticks))
    if p > 2:
        assert {hops.at(tick) for tick in range(p - 1, 2 * p)} == {("onward",)}
        assert {hops.at(hops.ticks - 1 - tick) for tick in range(p, 2 * p)} == {("back",)}


@pytest.mark.parametrize("p", STAGES[2:])  # two stages are neighbours both ways
@pytest.mark.parametrize("virtual_stages", [2, 3])
def test_interleaved_has_a_hop_onward_after_f_and_back_after_b(p: int, virtual_stages: int) -> None:
    """No stage at F exchanges values with one at B; checked where all stages are busy."""
    for m in (p, p + 1, 3 * p):
        schedule = make_schedule(
            "interleaved", stages=p, micro_batches=m, virtual_stages=virtual_stages
        )
        hops, kinds = hops_of(schedule), schedule.table[..., 0]
        for tick, row in enumerate(kinds):
            assert len({*row.tolist()} - {0}) == 1
            if row.all() and tick + 1 < schedule.ticks:
                assert hops.at(tick) == ("onward" if row[0] == F else "back",)


def test_one_stage_has_no_hops() -> None:
    for name in SCHEDULES:
        hops = hops_of(make_schedule(name, stages=1, micro_batches=3))
        assert hops.pairs == hops.taken == {}
        assert hops.together == [()]


@pytest.mark.parametrize(
    ("p", "last"),
    [
        (2, {}),  # two stages are neighbours both ways
        (3, {"onward": (2, 0), "back": (0, 2)}),
        (4, {"odd": (0, 3), "onward": (3, 0), "back": (0, 3)}),
        (5, {"onward": (4, 0), "back": (0, 4)}),  # an odd ring cannot be paired
    ],
)
def test_chunks_close_the_ring(p: int, last: dict) -> None:
    """Hops of schedules with chunks also join the last stage and the first."""
    onward = [(s, (s + 1) % p) for s in range(p)]
    back = [(to, s) for s, to in onward]
    ticks = [onward[:1] + back[:1], onward[1:2] + back[1:2], onward, back]
    moved = tuple((tick, *pair) for tick, pairs in enumerate(ticks) for pair in pairs)
    closed, line = Hops(p, len(ticks), moved).pairs, known(p, closed=False)
    assert set(closed) == ({"even"} if p == 2 else set(line))
    more = {name: set(pairs) - line[name] for name, pairs in closed.items()}
    both = {name: {pair, pair[::-1]} if name == "odd" else {pair} for name, pair in last.items()}
    assert {name: pairs for name, pairs in more.items() if pairs} == both


def test_a_v_does_not_close_the_ring() -> None:
    for p in STAGES:
        for pairs in hops_of(make_schedule("zb-v", stages=p, micro_batches=2 * p)).pairs.values():
            assert all(abs(source - target) == 1 for source, target in pairs)
