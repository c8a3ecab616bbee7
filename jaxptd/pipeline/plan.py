"""What each stage does at each tick of a schedule, as numbers that an executor can follow.

A schedule says which operation runs when; a plan adds where its values wait, and on which way they
go from stage to stage (`hops.py`). What waits lies in pools of slots: in *mail* activations and
gradients for their operation, in *saved* what layers keep for backward, in *between* what they keep
between the two halves of a backward that is split. A slot is taken again once its value was read,
so a pool has as many as values wait at the same time on the busiest stage.

Letters: p stages, V parts of the model a stage, L layers.
"""

import dataclasses
import heapq
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from jaxptd.pipeline.hops import Hops
from jaxptd.pipeline.table import B, F, Schedule, W


@dataclasses.dataclass(frozen=True)
class Value:
    """Something that waits in a slot of a pool, on a stage, for a while.

    start, end: moments, two a tick: 2t while its operation runs, 2t + 1 when results are put away.
    cells: (column, tick) of the plan that must name the slot.
    """

    pool: str
    stage: int
    start: int
    end: int
    cells: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A schedule with a place for every value.

    Args:
        schedule: which operation runs when; without any B a forward pass only.
        sizes: layers of each of the p*V parts, in the order of the model.
        recompute: backward starts from a part's input: its layers run forward again.
        first: the first so many layers of each part keep something else than the others; None: all
            keep the same.
    """

    schedule: Schedule
    sizes: tuple[int, ...]
    recompute: bool = False
    first: int | None = None

    @property
    def depth(self) -> int:
        """Rows of a part in its stage's stack of layers: what the largest needs."""
        return max(self.sizes)

    @property
    def even(self) -> bool:
        """Whether all parts have as many layers."""
        return min(self.sizes) == self.depth

    @property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """Rows of a part, from and up to, whose layers keep the same."""
        first = self.depth if self.first is None else min(self.first, self.depth)
        return tuple((a, b) for a, b in ((0, first), (first, self.depth)) if a < b)

    @cached_property
    def trains(self) -> bool:
        return bool((self.schedule.table[..., 0] == B).any())

    def forward_only(self, micro_batches: int | None = None) -> "Plan":
        """The forward operations of this plan, each stage's in their order, as soon as they can.

        micro_batches: only so many.
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
        return Plan(schedule, self.sizes)

    @cached_property
    def trips(self) -> dict[str, int]:
        """How often each loop of the executor runs, by its scope, over all ticks and all stages."""
        micro_batches = self.schedule.micro_batches
        stages, hops = self.schedule.stages, self.hops.taken
        trips = {f"hop_{name}": stages * int(taken.sum()) for name, taken in hops.items()}
        for name in ("embed", "forward", "head", "backward", "unembed", "weight"):
            trips[name] = int(self.columns[name].sum())
            for kind, (begin, end) in enumerate(self.kinds):
                layers = sum(min(size, end) - min(size, begin) for size in self.sizes)
                trips[layers_scope(name, kind)] = micro_batches * layers if trips[name] else 0
        trips["again_layers"] = trips["backward_layers"] if self.recompute else 0
        return trips

    @cached_property
    def hops(self) -> Hops:
        moved = [(t, self._stage(q), self._stage(to)) for t, q, to, _ in self._results()]
        return Hops(self.schedule.stages, self.schedule.ticks, tuple(moved))

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """int32 `[ticks, p]` of each: what runs, on what, and where that lies.

        micro: the micro-batch. row, layer, layers: the part's first row in the stack, its first
        layer's number, how many. embed ... weight: 1 where that runs. read: slot of the mail to
        begin with; input: of the part's input, for running it again; keep: where the result stays;
        in_<hop>: where what arrives lies. saved, between: slots there.
        """
        operation, micro, chunk = np.moveaxis(self.schedule.table, -1, 0)
        part = self._parts[np.arange(self.schedule.stages), chunk]
        sizes, last = np.array(self.sizes), part == len(self.sizes) - 1
        columns = {
            "micro": micro,
            "row": chunk * self.depth,
            "layer": (np.cumsum(sizes) - sizes)[part],
            "layers": sizes[part],
            "embed": (operation == F) & (part == 0),
            "forward": operation == F,
            "head": (operation == (B if self.trains else F)) & last,
            "backward": operation == B,
            "unembed": (operation == B) & (part == 0),
            "weight": operation == W,
        }
        columns = {name: column.astype(np.int32) for name, column in columns.items()}
        return columns | self._places[0]

    @property
    def slots(self) -> dict[str, int]:
        """How many slots each pool has."""
        return self._places[1]

    # ---- where values wait --------------------------------------------------------------------

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
        """(tick, part, part that goes on with it, tick at which it does) of every result."""
        for (operation, part, micro), tick in self._when.items():
            to = part + (operation == F) - (operation == B)
            if to != part and 0 <= to < len(self.sizes):
                yield tick, part, to, self._when[operation, to, micro]
            elif operation == F and self.trains and to != part:
                yield tick, part, part, self._when[B, part, micro]  # for the head

    def _values(self) -> Iterator[Value]:
        """Everything that waits."""
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
            if operation == F and part == 0:  # what the embedding makes
                end = when[B, 0, micro] if self.recompute else tick
                again = (("input", end),) if self.recompute else ()
                yield Value("mail", self._stage(0), 2 * tick, 2 * end, (("read", tick), *again))
            if operation == B:
                yield from self._kept(part, micro)

    def _kept(self, part: int, micro: int) -> Iterator[Value]:
        """What the layers of a part keep."""
        stage, backward = self._stage(part), self._when[B, part, micro]
        start = backward if self.recompute else self._when[F, part, micro]
        end = self._when.get((W, part, micro), backward)
        ticks = sorted({start, backward, end})
        yield Value("saved", stage, 2 * start, 2 * end, tuple(("saved", t) for t in ticks))
        if end > backward:
            cells = (("between", backward), ("between", end))
            yield Value("between", stage, 2 * backward, 2 * end, cells)

    def _nothing(self, named: set[tuple[str, int, int]]) -> Iterator[Value]:
        """What is put away though nobody reads it: a result that left, an arrival of nothing."""
        for tick, stage in np.ndindex(self.schedule.table.shape[:2]):
            for column in ("keep", *(f"in_{hop}" for hop in self.hops.at(tick))):
                if (column, tick, stage) not in named:
                    yield Value("mail", stage, 2 * tick + 1, 2 * tick + 1, ((column, tick),))

    @cached_property
    def _places(self) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """The columns that name slots, and how many slots the pools have."""
        values = list(self._values())
        named = {(column, tick, value.stage) for value in values for column, tick in value.cells}
        values += self._nothing(named)
        names = ("read", "input", "keep", "saved", "between", *(f"in_{h}" for h in self.hops.pairs))
        shape = self.schedule.table.shape[:2]
        columns = {name: np.zeros(shape, np.int32) for name in names}
        slots = {"mail": 0, "saved": 0, "between": 0}
        for value, slot in _place(values):
            slots[value.pool] = max(slots[value.pool], slot + 1)
            for column, tick in value.cells:
                columns[column][tick, value.stage] = slot
        return columns, slots


def layers_scope(name: str, kind: int) -> str:
    """The scope of a loop over the layers of a part that are of one kind."""
    return f"{name}_layers_{kind}" if kind else f"{name}_layers"


def _place(values: list[Value]) -> Iterator[tuple[Value, int]]:
    """Each value with a slot; on each stage no more slots than values that wait at once."""
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
