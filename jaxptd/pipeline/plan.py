"""Plans: schedules with a slot for every value, as numbers that the executor follows.

A schedule gives the tick of every operation. A plan adds the slots in which values wait, and the
hops that send them from stage to stage. There are three pools of slots:

    mail      activations and gradients, from the operation that computes them to the one that
              reads them
    saved     what layers save for backward
    between   what layers hold from B to W, where a schedule splits backward

A slot becomes free once its value is read, so a pool has as many slots as values wait at once on
the busiest stage. *saved* and *between* have separate slots for each stack of layers: a part
without layers of a stack uses none of its slots.

Letters: p stages, V chunks per stage, L layers.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from jaxptd.pipeline.placement import (
    Kind,
    Stacks,
    chunk_rows,
    layer_columns,
    layers_scope,
    of_stack,
)
from jaxptd.pipeline.table import B, F, Schedule, W

# ---- the hops of a schedule: the permutes over pp that send results from stage to stage ----------
# A permute synchronizes all devices that it joins. In 1F1B only every second pair of neighbours
# exchanges values at a tick, an activation one way and a gradient the other. With one permute
# within the even pairs of stages, (0, 1) (2, 3) ..., and one within the odd pairs, (1, 2) (3, 4)
# ..., no stage that runs forward waits for one that runs backward, which takes twice as long.
# Results that the pairs do not cover take a hop from every stage to the next, or back.

Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Hops:
    """The hops of a schedule.

    Args:
        stages: p.
        ticks: the number of ticks of the schedule.
        moved: (tick, source stage, target stage) for every result that an operation reads.
    """

    stages: int
    ticks: int
    moved: tuple[tuple[int, int, int], ...]

    @cached_property
    def pairs(self) -> dict[str, Pairs]:
        """(source, target) stages of each hop that any tick takes."""
        used = {hop for hops in self._at.values() for hop in hops}
        return {name: pairs for name, pairs in self._known.items() if name in used}

    @cached_property
    def taken(self) -> dict[str, np.ndarray]:
        """int32 `[ticks]` for each hop: 1 at the ticks that take it."""
        return {
            name: np.array([name in self.at(tick) for tick in range(self.ticks)], np.int32)
            for name in self.pairs
        }

    @cached_property
    def together(self) -> list[tuple[str, ...]]:
        """The sets of hops that some tick takes together; the first is empty."""
        return sorted({(), *self._at.values()}, key=lambda hops: (len(hops), hops))

    @cached_property
    def chosen(self) -> np.ndarray:
        """int32 `[ticks]`: the index in `together` of the hops that each tick takes."""
        numbers = {hops: number for number, hops in enumerate(self.together)}
        return np.array([numbers[self.at(tick)] for tick in range(self.ticks)], np.int32)

    def at(self, tick: int) -> tuple[str, ...]:
        """The hops at the end of a tick: none, one or two."""
        return self._at.get(tick, ())

    def column(self, tick: int, source: int, target: int) -> str:
        """The column of the plan for a result's slot on the target stage: `keep` or `in_<hop>`."""
        if source == target:
            return "keep"
        hop = next(hop for hop in self.at(tick) if (source, target) in self._known[hop])
        return f"in_{hop}"

    @cached_property
    def _at(self) -> dict[int, tuple[str, ...]]:
        moved: dict[int, set[tuple[int, int]]] = {}
        for tick, source, target in self.moved:
            if source != target:
                moved.setdefault(tick, set()).add((source, target))
        return {tick: self._choose(pairs) for tick, pairs in moved.items()}

    def _choose(self, pairs: set[tuple[int, int]]) -> tuple[str, ...]:
        """The fewest hops that cover all of these (source, target) pairs."""
        known = self._known
        one, two = ((name,) for name in known), itertools.combinations(known, 2)
        return next(
            names
            for names in itertools.chain(one, two)
            if pairs <= {pair for name in names for pair in known[name]}
        )

    @cached_property
    def _known(self) -> dict[str, Pairs]:
        """Every possible hop; those within pairs come first and are preferred."""
        p = self.stages
        closed = p > 2 and any({source, to} == {0, p - 1} for _, source, to in self.moved)
        onward = tuple((s, (s + 1) % p) for s in range(p if closed else p - 1))
        back = tuple((to, s) for s, to in onward)
        both = list(zip(onward, back, strict=True))
        even = tuple(itertools.chain(*both[0 : p - p % 2 : 2]))
        odd = tuple(itertools.chain(*both[1::2]))
        return {"even": even, "odd": odd, "onward": onward, "back": back}


# ---- the plan of a schedule ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that waits in a slot of a pool.

    start, end: times. Tick t has two: 2t when its operation runs, and 2t + 1 when results are
        stored in the mail.
    cells: (column, tick) pairs of the plan where its slot is written.
    """

    pool: str
    stage: int
    start: int
    end: int
    cells: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A schedule with a slot for every value.

    Args:
        schedule: the tick of every operation; without B it is a forward pass.
        stacks: for each stack of layers, in the order in which x passes them, the number of its
            layers in each of the p*V parts.
        recompute: whether backward starts from the part's input and runs its layers forward again.
        first: how many of a stack's first layers in each part are of its first kind, see `kinds`;
            None: all are of one kind.
    """

    schedule: Schedule
    stacks: Stacks
    recompute: bool = False
    first: int | None = None

    @property
    def splits(self) -> bool:
        """True if backward is split into B and W."""
        return self.schedule.splits

    def depth(self, stack: str) -> int:
        """Rows of each part in its stage's stack: the number of layers of the largest part."""
        return max(self.stacks[stack])

    def even(self, stack: str) -> bool:
        """True if all parts have the same number of the stack's layers."""
        return min(self.stacks[stack]) == self.depth(stack)

    @property
    def rows(self) -> int:
        """The number of rows of layers on all stages, including unused ones."""
        rows = (chunk_rows(self.schedule, sizes)[-1] for sizes in self.stacks.values())
        return self.schedule.stages * sum(rows)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of layers, stack by stack."""
        every = []
        for stack in self.stacks:
            depth = self.depth(stack)
            first = depth if self.first is None else min(self.first, depth)
            every += [Kind(stack, 0, first), Kind(stack, first, depth)]
        return tuple(kind for kind in every if kind.begin < kind.end)

    @cached_property
    def trains(self) -> bool:
        """True if the schedule has any backward."""
        return bool((self.schedule.table[..., 0] == B).any())

    def forward_only(self, micro_batches: int | None = None) -> "Plan":
        """The plan of only the forward operations, in the same order and as early as possible.

        micro_batches: the number of micro-batches to run; None: all.
        """
        schedule, done, rows = self.schedule, {}, []  # type: ignore[var-annotated]
        count = schedule.micro_batches if micro_batches is None else micro_batches
        table = schedule.table
        queues = [
            [(int(i), int(chunk)) for operation, i, chunk in cells if operation == F and i < count]
            for cells in table.swapaxes(0, 1)
        ]
        while any(queues):
            row = [(0, 0, 0)] * schedule.stages
            for stage, queue in enumerate(queues):
                i, chunk = queue[0] if queue else (0, 0)
                part = schedule.part(stage, chunk)
                if queue and (part == 0 or done.get((part - 1, i), len(rows)) < len(rows)):
                    row[stage], done[part, i] = (int(F), i, chunk), len(rows)
                    queue.pop(0)
            rows.append(row)
        schedule = dataclasses.replace(
            schedule, micro_batches=count, table=np.array(rows, np.int32)
        )
        return Plan(schedule, self.stacks)

    @property
    def switched(self) -> tuple[str, str]:
        """The operations that share a switch: one reads, F writes; B does both if W follows."""
        return ("weight" if self.splits else "backward"), "forward"

    @cached_property
    def trips(self) -> dict[str, int]:
        """Executions over all ticks and stages, by scope; for a switch's branch by SCOPE/NUMBER."""
        micro_batches, stages = self.schedule.micro_batches, self.schedule.stages
        taken = enumerate(np.bincount(self.hops.chosen))
        trips = {f"hops/{number}": stages * int(ticks) for number, ticks in taken}
        for number, name in enumerate(self.switched):
            trips[f"operation/{number}"] = int(self.columns[name].sum())
        for name in ("embed", "forward", "head", "backward", "unembed", "weight"):
            trips[name] = int(self.columns[name].sum())
            for kind, (stack, begin, end) in enumerate(self.kinds):
                sizes = self.stacks[stack]
                layers = sum(min(size, end) - min(size, begin) for size in sizes)
                trips[layers_scope(name, kind)] = micro_batches * layers if trips[name] else 0
        for kind, _ in enumerate(self.kinds):
            backward = trips[layers_scope("backward", kind)]
            trips[layers_scope("recompute", kind)] = backward if self.recompute else 0
        return trips

    @cached_property
    def hops(self) -> Hops:
        moved = [(t, self._stage(q), self._stage(to)) for t, q, to, _ in self._results()]
        return Hops(self.schedule.stages, self.schedule.ticks, tuple(moved))

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The numbers for each stage and tick, int32 `[ticks, p]` per name.

        micro: the micro-batch.
        row, layer, layers, all `of_stack`: the part's first row in the stage's stack, the model's
            number of its first layer there, and how many layers it has.
        embed, forward, head, backward, unembed, weight: 1 where that runs.
        read, input: mail slots of the operation's x, and of the part's input for recomputation.
        keep, in_<hop>: mail slots for the result, and for what arrives by a hop.
        saved, between, both `of_stack`: slots of these pools.
        """
        operation, micro, chunk = np.moveaxis(self.schedule.table, -1, 0)
        part = self._parts[np.arange(self.schedule.stages), chunk]
        last = part == self.schedule.parts - 1
        columns = {"micro": micro} | layer_columns(
            self.schedule, self.stacks, part=part, chunk=chunk
        )
        columns |= {
            "embed": (operation == F) & (part == 0),
            "forward": operation == F,
            "head": (operation == (B if self.trains else F)) & last,
            "backward": operation == B,
            "unembed": (operation == B) & (part == 0),
            "weight": operation == W,
        }
        columns = {name: column.astype(np.int32) for name, column in columns.items()}
        return columns | self._slots[0]

    @property
    def slots(self) -> dict[str, int]:
        """The number of slots of each pool: *mail*, and *saved* and *between* `of_stack`."""
        return self._slots[1]

    # ---- values and their slots ---------------------------------------------------------------

    @cached_property
    def _parts(self) -> np.ndarray:
        """The part of each stage's chunk, `[p, V]`."""
        stages, chunks = range(self.schedule.stages), range(self.schedule.chunks)
        return np.array([[self.schedule.part(s, c) for c in chunks] for s in stages])

    def _stage(self, part: int) -> int:
        return self.schedule.where(part)[0]

    @cached_property
    def _when(self) -> dict[tuple[int, int, int], int]:
        """The tick of every (operation, part, micro-batch)."""
        table = self.schedule.table
        return {
            (int(table[t, s, 0]), int(self._parts[s, table[t, s, 2]]), int(table[t, s, 1])): int(t)
            for t, s in np.argwhere(table[..., 0] > 0)
        }

    def _results(self) -> Iterator[tuple[int, int, int, int]]:
        """(tick, part, reading part, reading tick) of every result."""
        for (operation, part, micro), tick in self._when.items():
            to = part + (operation == F) - (operation == B)
            if to != part and 0 <= to < self.schedule.parts:
                yield tick, part, to, self._when[operation, to, micro]
            elif operation == F and self.trains and to != part:
                yield tick, part, part, self._when[B, part, micro]  # for the head

    def _values(self) -> Iterator[Value]:
        """Every value that an operation reads later."""
        when, hops = self._when, self.hops
        for tick, source, target, read in self._results():
            stage, end = self._stage(target), read
            cells = [(hops.column(tick, self._stage(source), stage), tick), ("read", read)]
            micro = int(self.schedule.table[tick, self._stage(source), 1])
            forward = self.schedule.table[read, stage, 0] == F
            if self.recompute and forward:
                end = when[B, target, micro]
                cells.append(("input", end))
            yield Value("mail", stage, 2 * tick + 1, 2 * end, tuple(cells))
        for (operation, part, micro), tick in when.items():
            if operation == F and part == 0:  # the embedding's result
                end = when[B, 0, micro] if self.recompute else tick
                inputs = (("input", end),) if self.recompute else ()
                yield Value("mail", self._stage(0), 2 * tick, 2 * end, (("read", tick), *inputs))
            if operation == B:
                yield from self._saved(part, micro)

    def _saved(self, part: int, micro: int) -> Iterator[Value]:
        """Values that a part's layers save for B, and hold from B to W, by stack."""
        stage, backward = self._stage(part), self._when[B, part, micro]
        start = backward if self.recompute else self._when[F, part, micro]
        end = self._when.get((W, part, micro), backward)
        ticks = sorted({start, backward, end})
        for stack in (stack for stack, sizes in self.stacks.items() if sizes[part]):
            saved, between = of_stack("saved", stack), of_stack("between", stack)
            yield Value(saved, stage, 2 * start, 2 * end, tuple((saved, t) for t in ticks))
            if end > backward:
                cells = ((between, backward), (between, end))
                yield Value(between, stage, 2 * backward, 2 * end, cells)

    def _unread(self, named: set[tuple[str, int, int]]) -> Iterator[Value]:
        """Values that are stored but not read here: a result to send, a hop without a source."""
        for tick, stage in np.ndindex(self.schedule.table.shape[:2]):
            for column in ("keep", *(f"in_{hop}" for hop in self.hops.at(tick))):
                if (column, tick, stage) not in named:
                    yield Value("mail", stage, 2 * tick + 1, 2 * tick + 1, ((column, tick),))

    @cached_property
    def _slots(self) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Returns (the columns with slots, the number of slots of each pool)."""
        values = list(self._values())
        named = {(column, tick, value.stage) for value in values for column, tick in value.cells}
        values += self._unread(named)
        kept = itertools.product(("saved", "between"), self.stacks)
        pools = [of_stack(*each) for each in kept]
        names = ("read", "input", "keep", *pools, *(f"in_{h}" for h in self.hops.pairs))
        shape = self.schedule.table.shape[:2]
        columns = {name: np.zeros(shape, np.int32) for name in names}
        slots = dict.fromkeys(["mail", *pools], 0)
        for value, slot in _assign_slots(values):
            slots[value.pool] = max(slots[value.pool], slot + 1)
            for column, tick in value.cells:
                columns[column][tick, value.stage] = slot
        return columns, slots


def _assign_slots(values: list[Value]) -> Iterator[tuple[Value, int]]:
    """Assigns each value a slot; a stage uses only as many slots as values wait at once."""
    free: dict[tuple[str, int], list[int]] = {}
    taken: dict[tuple[str, int], list[tuple[int, int]]] = {}  # (end, slot)
    count: dict[tuple[str, int], int] = {}
    for value in sorted(values, key=lambda v: v.start):
        pool = value.pool, value.stage
        slots, busy = free.setdefault(pool, []), taken.setdefault(pool, [])
        while busy and busy[0][0] < value.start:
            heapq.heappush(slots, heapq.heappop(busy)[1])
        if not slots:
            heapq.heappush(slots, count.setdefault(pool, 0))
            count[pool] += 1
        slot = heapq.heappop(slots)
        heapq.heappush(busy, (value.end, slot))
        yield value, slot
