"""Every plan replayed, tick by tick, with values that say what they are."""

import dataclasses
import itertools
import random
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import SCHEDULES, Operation, Schedule, check, make_schedule

STAGES = [1, 2, 3, 4, 5, 8]
F, B, W = Operation.F, Operation.B, Operation.W
NOTHING = ("nothing",)
LOOPS = ("embed", "forward", "head", "backward", "unembed", "weight")


def sizes_of(schedule: Schedule, seed: int = 0) -> tuple[int, ...]:
    """Layers of each part: of seed 0 as many everywhere, else different ones, some of them none."""
    draw = random.Random(f"{seed} {schedule.parts}")
    sizes = [2 if seed == 0 else draw.randrange(4) for _ in range(schedule.parts)]
    return (*sizes[:-1], max(1, sizes[-1]))


@cache
def plans(name: str, p: int) -> list[Plan]:
    """Of 1 to 3p micro-batches, with and without running layers again."""
    found = []
    for m in range(1, 3 * p + 1):
        schedule = make_schedule(name, stages=p, micro_batches=m)
        found += [Plan(schedule, sizes_of(schedule, m % 2), again) for again in (False, True)]
    return found


# ---- the replay ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Stay:
    """A value in a slot, from the moment it is written to when it is last read."""

    pool: str
    stage: int
    value: tuple
    start: int
    end: int


class Replay:
    """Carries a plan out on values that are words: which, of which part and micro-batch.

    ("x", q, i) goes into part q, ("dx", q, i) is its gradient, those of part V*p what comes out of
    the last. Moments are two a tick: while it runs, and while its results are put away.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.schedule = plan, plan.schedule
        self.slots: dict[tuple[str, int, int], Stay] = {}
        self.stays: list[Stay] = []
        self.done, self.trips, self.moment = Counter(), Counter(), 0
        for tick in range(self.schedule.ticks):
            self.tick(tick)

    def write(self, pool: str, place: tuple[int, int], value: tuple) -> None:
        assert 0 <= place[1] < self.plan.slots[pool]
        stay = Stay(pool, place[0], value, self.moment, self.moment)
        self.slots[pool, *place] = stay
        self.stays.append(stay)

    def read(self, pool: str, place: tuple[int, int], wanted: tuple) -> None:
        stay = self.slots[pool, *place]
        assert stay.value == wanted
        stay.end = self.moment

    def tick(self, tick: int) -> None:
        columns, hops = self.plan.columns, self.plan.hops
        rows = [
            {name: int(column[tick, s]) for name, column in columns.items()}
            for s in range(self.schedule.stages)
        ]
        self.moment = 2 * tick
        results = [self.work(s, row, self.schedule.table[tick, s]) for s, row in enumerate(rows)]
        self.moment += 1
        for s, (row, result) in enumerate(zip(rows, results, strict=True)):
            self.write("mail", (s, row["keep"]), result)
        for name in [name for name in hops.pairs if hops.taken[name][tick]]:
            left = {s: self.slots["mail", s, row["keep"]].value for s, row in enumerate(rows)}
            assert left == dict(enumerate(results)), "overwritten before all hops have taken it"
            source_of = {target: source for source, target in hops.pairs[name]}
            for s, row in enumerate(rows):
                self.trips[f"hop_{name}"] += 1
                arrived = left[source_of[s]] if s in source_of else NOTHING
                self.write("mail", (s, row[f"in_{name}"]), arrived)

    def work(self, s: int, row: dict[str, int], cell: np.ndarray) -> tuple:
        """What a stage does, as the loops of the executor do it; -> what it puts away."""
        operation, i, chunk = Operation(cell[0]), int(cell[1]), int(cell[2])
        q, count = self.schedule.part(s, chunk), self.schedule.parts
        runs = {name for name in LOOPS if row[name]}
        assert all(row[name] == 1 for name in runs)
        self.trips.update(runs)
        assert runs == self.expected(operation, q)
        if not operation:
            return NOTHING
        self.done[operation, q, i] += 1
        assert row["micro"] == i
        assert row["row"] == chunk * max(self.plan.sizes)
        assert row["layer"] == sum(self.plan.sizes[:q])
        assert row["layers"] == self.plan.sizes[q]
        mail, saved, between = ((s, row[name]) for name in ("read", "saved", "between"))
        layers, again = self.plan.sizes[q], self.plan.recompute
        if operation == F:
            self.trips["forward_layers"] += layers
            if q == 0:
                self.write("mail", mail, ("x", 0, i))
            self.read("mail", mail, ("x", q, i))
            if self.plan.trains and not again:
                self.write("saved", saved, ("kept", q, i))
            return ("x", q + 1, i) if self.plan.trains or q + 1 < count else NOTHING
        if operation == W:
            self.trips["weight_layers"] += layers
            self.read("saved", saved, ("kept", q, i))
            self.read("between", between, ("between", q, i))
            return ("unused",)
        self.trips["backward_layers"] += layers
        self.read("mail", mail, ("x", count, i) if q + 1 == count else ("dx", q + 1, i))
        if again:
            self.trips["recompute_layers"] += layers
            self.read("mail", (s, row["input"]), ("x", q, i))
            self.write("saved", saved, ("kept", q, i))
        self.read("saved", saved, ("kept", q, i))
        if self.schedule.splits:
            self.write("between", between, ("between", q, i))
        return ("dx", q, i) if q else NOTHING

    def expected(self, operation: Operation, q: int) -> set[str]:
        """The loops that have to run."""
        ends = {"head"} if q == self.schedule.parts - 1 else set()
        found = {
            Operation.IDLE: set(),
            F: {"forward"} | ({"embed"} if q == 0 else set()),
            B: {"backward"} | ({"unembed"} if q == 0 else set()) | ends,
            W: {"weight"},
        }[operation]
        return found if self.plan.trains or operation != F else found | ends

    def crowd(self, pool: str) -> int:
        """The most that is there at one moment on a stage."""
        most = 0
        for s in range(self.schedule.stages):
            come, go = Counter(), Counter()
            for stay in self.stays:
                if (stay.pool, stay.stage) == (pool, s):
                    come[stay.start] += 1
                    go[stay.end + 1] += 1
            change = [come[t] - go[t] for t in range(self.moment + 2)]
            most = max(most, int(np.cumsum(change).max()))
        return most


def hold(plan: Plan) -> None:
    """All is done once on what it needs, in no more slots than values wait at once."""
    replay, schedule = Replay(plan), plan.schedule
    kinds = ([F, B] if plan.trains else [F]) + [W] * schedule.splits
    todo = np.ndindex(schedule.parts, schedule.micro_batches)
    assert replay.done == Counter((kind, *which) for which in todo for kind in kinds)
    for pool in ("mail", "saved", "between"):
        assert plan.slots[pool] == replay.crowd(pool), pool
    none = {f"{name}_layers" for name in ("embed", "head", "unembed")}  # they have no layers
    trips = {name: n for name, n in plan.trips.items() if n and name not in none}
    assert trips == +replay.trips
    forms = {(column.dtype.name, column.shape) for column in plan.columns.values()}
    assert forms == {("int32", (schedule.ticks, schedule.stages))}


# ---- the schedules ------------------------------------------------------------------------------


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_plan_can_be_carried_out_in_as_few_slots_as_can_be(name: str, p: int) -> None:
    for plan in plans(name, p):
        hold(plan)


def held(schedule: Schedule) -> int:
    """The most that a stage holds, in parts: from F to its last operation."""
    operation = schedule.table[..., 0]
    last = W if schedule.splits else B
    return int(((operation == F).astype(int) - (operation == last)).cumsum(0).max())


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_kept_is_what_the_schedule_holds(name: str, p: int) -> None:
    """Where layers run again, of one part only, but until its W where backward is split."""
    for plan in plans(name, p):
        m, schedule = plan.schedule.micro_batches, plan.schedule
        if not plan.recompute:
            assert plan.slots["saved"] == held(schedule)
            known = {"1f1b": min(m, p), "gpipe": m, "zb-h1": min(m, p), "zb-h2": min(m, 2 * p - 1)}
            assert plan.slots["saved"] == known.get(name, plan.slots["saved"])
        elif not schedule.splits:
            assert plan.slots["saved"] == 1
        assert (plan.slots["between"] > 0) == schedule.splits


@pytest.mark.parametrize("again", [False, True])
def test_1f1b_needs_no_more_slots_for_more_micro_batches(again: bool) -> None:
    for p in STAGES:
        sizes = [{"stages": p, "micro_batches": m} for m in (p, p + 1, 4 * p, 8 * p)]
        slots = [Plan(make_schedule("1f1b", **size), (1,) * p, again).slots for size in sizes]
        assert slots == slots[:1] * 4


# ---- forward only -------------------------------------------------------------------------------


def orders(schedule: Schedule, count: int) -> list[list[tuple[int, int]]]:
    """(part, micro-batch) of each stage's forward operations."""
    return [
        [(schedule.part(s, c), i) for kind, i, c in column if kind == F and i < count]
        for s, column in enumerate(schedule.table.swapaxes(0, 1).tolist())
    ]


def shortest(of_stages: list[list[tuple[int, int]]]) -> int:
    """Ticks: the longest way through what waits for what."""
    before = {b: a for order in of_stages for a, b in itertools.pairwise(order)}

    @cache
    def end(q: int, i: int) -> int:
        others = [before[q, i]] if (q, i) in before else []
        others += [(q - 1, i)] if q else []
        return 1 + max((end(*other) for other in others), default=0)

    return max(end(*cell) for order in of_stages for cell in order)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_forward_pass_keeps_the_order_and_is_as_short_as_can_be(name: str, p: int) -> None:
    for plan in plans(name, p)[:: 2 if p < 8 else 6]:
        every = plan.schedule.micro_batches
        for count in sorted({1, (every + 1) // 2, every}):
            only = plan.forward_only(None if count == every else count)
            wanted = orders(plan.schedule, count)
            assert only.schedule.micro_batches == count
            assert orders(only.schedule, count) == wanted
            assert only.schedule.ticks == shortest(wanted)
            assert not (only.trains or only.recompute)
            hold(only)
            if name in ("gpipe", "1f1b"):
                assert only.schedule.ticks == count + p - 1


# ---- any schedule -------------------------------------------------------------------------------


def random_schedule(seed: int) -> Schedule:
    """Of random sizes: at each tick each stage does something that it can, or nothing."""
    draw = random.Random(seed)
    placement: Any = draw.choice(["loop", "v"])
    p, m = draw.randint(1, 5), draw.randint(1, 5)
    chunks = 2 if placement == "v" else draw.randint(1, 3)
    empty = Schedule("random", p, m, chunks, placement, np.zeros((0, p, 3), np.int32))
    kinds = draw.choice([[F, B], [F, B, W]])
    lazy, prefer = draw.choice([0.0, 0.3, 0.7]), {kind: draw.random() for kind in kinds}
    todo = {(kind, q, i) for kind in kinds for q in range(empty.parts) for i in range(m)}
    done: set[tuple[Operation, int, int]] = set()
    rows = []
    while todo:
        row, now = [(0, 0, 0)] * p, []
        for s in range(p):
            mine = [cell for cell in sorted(todo) if empty.where(cell[1])[0] == s]
            able = [c for c in mine if {(*n, c[2]) for n in empty.needs(*c[:2])} <= done]
            if able and draw.random() >= lazy:
                kind, q, i = max(able, key=lambda cell: prefer[cell[0]] + draw.random() / 2)
                row[s] = (int(kind), i, empty.where(q)[1])
                now.append((kind, q, i))
        todo -= set(now)
        done |= set(now)
        rows.append(row)
    return dataclasses.replace(empty, table=np.array(rows, np.int32))


@given(st.integers(0, 10**6), st.integers(0, 3), st.booleans())
@settings(max_examples=150)
def test_the_plan_of_any_schedule_can_be_carried_out(seed: int, sizes: int, again: bool) -> None:
    schedule = random_schedule(seed)
    check(schedule)
    plan = Plan(schedule, sizes_of(schedule, sizes), again)
    hold(plan)
    hold(plan.forward_only())
