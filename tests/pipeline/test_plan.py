"""Plans, replayed tick by tick with values that say what they are."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_schedule, random_stacks
from turns import by_turns, slow

from jaxptd.pipeline.placement import of_stack
from jaxptd.pipeline.plan import Plan, layers_scope
from jaxptd.pipeline.schedules import SCHEDULES, Operation, Schedule, check, make_schedule

STAGES = [1, 2, 3, 4, 5, slow(8)]
F, B, W = Operation.F, Operation.B, Operation.W
NOTHING = ("nothing",)
LOOPS = ("embed", "forward", "head", "backward", "unembed", "weight")


@cache
def plans(name: str, p: int) -> list[Plan]:
    """Plans of 1 to 3p micro-batches, with and without recomputation."""
    found = []
    for m in range(1, 3 * p + 1):
        schedule = make_schedule(name, stages=p, micro_batches=m)
        stacks = random_stacks(schedule, m % 2)
        found += [Plan(schedule, stacks, recompute) for recompute in (False, True)]
    return found


# ---- the replay ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Stay:
    """A value in a slot, from its write to its last read."""

    pool: str
    stage: int
    value: tuple
    start: int
    end: int


class Replay:
    """Runs a plan on values that are tuples: (name, part, micro-batch).

    ("x", q, i) is the input of part q and ("dx", q, i) its gradient; q = V*p is the output of the
    last part. A tick has two times: when its operation runs, and when its result is stored.
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
        self.trips[f"hops/{hops.chosen[tick]}"] += self.schedule.stages
        assert hops.together[hops.chosen[tick]] == hops.at(tick)
        for name in [name for name in hops.pairs if hops.taken[name][tick]]:
            left = {s: self.slots["mail", s, row["keep"]].value for s, row in enumerate(rows)}
            assert left == dict(enumerate(results)), "overwritten before all hops were sent"
            source_of = {target: source for source, target in hops.pairs[name]}
            for s, row in enumerate(rows):
                arrived = left[source_of[s]] if s in source_of else NOTHING
                self.write("mail", (s, row[f"in_{name}"]), arrived)

    def work(self, s: int, row: dict[str, int], cell: np.ndarray) -> tuple:
        """Runs a stage's operation as the executor's loops do, and returns its result."""
        operation, i, chunk = Operation(cell[0]), int(cell[1]), int(cell[2])
        q, count = self.schedule.part(s, chunk), self.schedule.parts
        runs = {name for name in LOOPS if row[name]}
        assert all(row[name] == 1 for name in runs)
        self.trips.update(runs)
        switch = (W if self.schedule.splits else B, F)
        self.trips.update(f"operation/{n}" for n, each in enumerate(switch) if each == operation)
        assert runs == self.expected(operation, q)
        if not operation:
            return NOTHING
        self.done[operation, q, i] += 1
        assert row["micro"] == i
        self.check_rows(row, chunk, q)
        mail, recompute = (s, row["read"]), self.plan.recompute
        if operation == F:
            self.count("forward", q)
            if q == 0:
                self.write("mail", mail, ("x", 0, i))
            self.read("mail", mail, ("x", q, i))
            if self.plan.trains and not recompute:
                self.each(self.write, "saved", (s, row), (q, i))
            return ("x", q + 1, i) if self.plan.trains or q + 1 < count else NOTHING
        if operation == W:
            self.count("weight", q)
            self.each(self.read, "saved", (s, row), (q, i))
            self.each(self.read, "between", (s, row), (q, i))
            return ("unused",)
        self.count("backward", q)
        self.read("mail", mail, ("x", count, i) if q + 1 == count else ("dx", q + 1, i))
        if recompute:
            self.count("recompute", q)
            self.read("mail", (s, row["input"]), ("x", q, i))
            self.each(self.write, "saved", (s, row), (q, i))
        self.each(self.read, "saved", (s, row), (q, i))
        if self.schedule.splits:
            self.each(self.write, "between", (s, row), (q, i))
        return ("dx", q, i) if q else NOTHING

    def check_rows(self, row: dict[str, int], chunk: int, q: int) -> None:
        """Chunks of a stack follow each other; layer numbers continue through the stacks."""
        number = 0
        for stack, sizes in self.plan.stacks.items():
            used = {self.schedule.where(part)[1] for part, size in enumerate(sizes) if size}
            assert row[f"row_{stack}"] == max(sizes) * sum(c in used for c in range(chunk))
            assert row[f"layer_{stack}"] == number + sum(sizes[:q])
            assert row[f"layers_{stack}"] == sizes[q]
            number += sum(sizes)

    def count(self, name: str, q: int) -> None:
        """Counts iterations of the loops over the part's layers; each stack is one kind."""
        for kind, sizes in enumerate(self.plan.stacks.values()):
            self.trips[layers_scope(name, kind)] += sizes[q]

    def each(self, do: Callable, pool: str, place: tuple[int, dict], value: tuple) -> None:
        """Writes or reads what the part's layers save, for each stack with layers there."""
        s, row = place
        for stack, sizes in self.plan.stacks.items():
            if sizes[value[0]]:
                name = of_stack(pool, stack)
                do(name, (s, row[name]), (name, *value))

    def expected(self, operation: Operation, q: int) -> set[str]:
        """The loops that must run."""
        ends = {"head"} if q == self.schedule.parts - 1 else set()
        found = {
            Operation.IDLE: set(),
            F: {"forward"} | ({"embed"} if q == 0 else set()),
            B: {"backward"} | ({"unembed"} if q == 0 else set()) | ends,
            W: {"weight"},
        }[operation]
        return found if self.plan.trains or operation != F else found | ends

    def most(self, pool: str) -> int:
        """The largest number of values waiting in a pool at one time, over stages."""
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
    """Checks that every operation runs once, on its inputs, with as few slots as possible."""
    replay, schedule = Replay(plan), plan.schedule
    kinds = ([F, B] if plan.trains else [F]) + [W] * schedule.splits
    todo = np.ndindex(schedule.parts, schedule.micro_batches)
    assert replay.done == Counter((kind, *which) for which in todo for kind in kinds)
    for pool, slots in plan.slots.items():
        assert slots == replay.most(pool), pool
    none = ("embed_layers", "head_layers", "unembed_layers")  # without layers
    trips = {name: n for name, n in plan.trips.items() if n and not name.startswith(none)}
    assert trips == +replay.trips
    forms = {(column.dtype.name, column.shape) for column in plan.columns.values()}
    assert forms == {("int32", (schedule.ticks, schedule.stages))}


# ---- the schedules ------------------------------------------------------------------------------


BY_TURNS = by_turns(STAGES[:-1], list(SCHEDULES), first=2)


@pytest.mark.parametrize(("p", "name"), [*BY_TURNS, *(slow(8, name) for name in SCHEDULES)])
def test_every_plan_can_run_in_as_few_slots_as_possible(name: str, p: int) -> None:
    for plan in plans(name, p):
        hold(plan)


def held(schedule: Schedule, sizes: Sequence[int]) -> int:
    """The most activations of a stack on any stage, each held from F to its last operation."""
    operation, _, chunk = np.moveaxis(schedule.table, -1, 0)
    stage = np.broadcast_to(np.arange(schedule.stages), chunk.shape)
    has = np.array(sizes)[np.vectorize(schedule.part)(stage, chunk)] > 0
    last = W if schedule.splits else B
    return int((has * ((operation == F).astype(int) - (operation == last))).cumsum(0).max())


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_as_many_slots_are_saved_as_the_schedule_holds(name: str, p: int) -> None:
    """Recomputation needs one slot, unless a split backward holds activations until W."""
    for plan in plans(name, p):
        m, schedule = plan.schedule.micro_batches, plan.schedule
        for stack, sizes in plan.stacks.items():
            saved = plan.slots[of_stack("saved", stack)]
            if not plan.recompute:
                assert saved == held(schedule, sizes)
            elif not schedule.splits:
                assert saved == 1
            assert (plan.slots[of_stack("between", stack)] > 0) == schedule.splits
        known = {"1f1b": min(m, p), "gpipe": m, "zb-h1": min(m, p), "zb-h2": min(m, 2 * p - 1)}
        if name in known and "blocks" in plan.stacks and not plan.recompute:
            assert saved == known[name]


@pytest.mark.parametrize("recompute", [False, True])
def test_1f1b_needs_no_more_slots_for_more_micro_batches(recompute: bool) -> None:
    for p in (1, 2, 3, 4, 5, 8):
        sizes = [{"stages": p, "micro_batches": m} for m in (p, p + 1, 4 * p, 8 * p)]
        one = {"blocks": (1,) * p}
        slots = [Plan(make_schedule("1f1b", **size), one, recompute).slots for size in sizes]
        assert slots == slots[:1] * 4


# ---- forward only -------------------------------------------------------------------------------


def orders(schedule: Schedule, count: int) -> list[list[tuple[int, int]]]:
    """The (part, micro-batch)s of each stage's forward operations, in order."""
    return [
        [(schedule.part(s, c), i) for kind, i, c in column if kind == F and i < count]
        for s, column in enumerate(schedule.table.swapaxes(0, 1).tolist())
    ]


def shortest(of_stages: list[list[tuple[int, int]]]) -> int:
    """The fewest possible ticks in this order: the longest chain of dependences."""
    before = {b: a for order in of_stages for a, b in itertools.pairwise(order)}

    @cache
    def end(q: int, i: int) -> int:
        others = [before[q, i]] if (q, i) in before else []
        others += [(q - 1, i)] if q else []
        return 1 + max((end(*other) for other in others), default=0)

    return max(end(*cell) for order in of_stages for cell in order)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_forward_pass_keeps_the_order_and_is_as_short_as_possible(name: str, p: int) -> None:
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


@given(st.integers(0, 10**6), st.integers(0, 3), st.booleans())
@settings(max_examples=50)
def test_the_plan_of_a_random_schedule_can_run(seed: int, sizes: int, recompute: bool) -> None:
    schedule = random_schedule(seed)
    check(schedule)
    plan = Plan(schedule, random_stacks(schedule, sizes), recompute)
    hold(plan)
    hold(plan.forward_only())
