"""The schedules that have a name, for any number of stages and micro-batches.

`table.py` says what a schedule is; `executor.py` runs it. Pure numpy.

m micro-batches, p stages, V chunks; ticks, and the most that stage s holds, in micro-batches:

    gpipe        2(m+p-1)    m                          Huang et al., arXiv 1811.06965
    1f1b         2(m+p-1)    min(m, p-s)                Narayanan et al., arXiv 2104.04473
    interleaved  2(mV+p-1)   min(m, p + (p-2s-1)/V)     the same, section 2.2; p divides m
    zb-h1        3m+p-1      min(m, p), m >= p          Qi et al., arXiv 2401.10241, section 2
    zb-h2        3m+p-1      min(m, 2p-1), m >= p       the same
    zb-v         6m+p-1      min(m, p), m >= 2p-1       the same, and 2405.15362; V = 2

A tick is as long as one operation on one part. The zb schedules split off the weight gradient.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jaxptd.errors import UserError
from jaxptd.mesh import SCHEDULES
from jaxptd.pipeline.table import B, F, Operation, Placement, Schedule, W, check, read_csv, to_csv

__all__ = [
    "SCHEDULES",
    "Operation",
    "Placement",
    "Schedule",
    "check",
    "make_schedule",
    "read_csv",
    "to_csv",
]

Cell = tuple[int, int, int]  # operation, micro-batch, chunk

OWN_CHUNKS = {"interleaved": 2, "zb-v": 2}  # of the others 1
# Beyond it, laying a table out takes many seconds, and nobody's pipeline is as large.
MAX_CELLS = 2**19


def make_schedule(
    name: str, *, stages: int, micro_batches: int, virtual_stages: int | None = None
) -> Schedule:
    """The schedule of that name, or of a table: a path that ends in `.csv` (see `table.read_csv`).

    Args:
        name: one of `SCHEDULES`, or the path.
        stages: p, 1 or more.
        micro_batches: m, 1 or more; any number, also fewer than stages.
        virtual_stages: V, chunks a stage; default: the schedule's own.

    Raises:
        UserError: there is no such schedule, or not of these sizes.
    """
    sizes = {"stages": stages, "micro_batches": micro_batches, "virtual_stages": virtual_stages}
    for what, size in sizes.items():
        if size is not None and size < 1:
            raise UserError(f"{what}={size}: use 1 or more")
    if name.endswith(".csv"):
        return _from_file(name, sizes)
    if name not in SCHEDULES:
        raise UserError(f"schedule={name}: use one of {', '.join(SCHEDULES)}, or a .csv file")
    chunks = _chunks(name, virtual_stages)
    if stages * chunks * (stages + micro_batches) > MAX_CELLS:
        raise UserError(
            f"schedule={name} of stages={stages}, micro_batches={micro_batches} and {chunks} "
            "chunks a stage is too large to lay out; use fewer"
        )
    placement: Placement = "v" if name == "zb-v" else "loop"
    empty = np.zeros((0, stages, 3), np.int32)
    schedule = Schedule(name, stages, micro_batches, chunks, placement, empty)
    make = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "zb-v": _zero_bubble_v}
    return dataclasses.replace(schedule, table=make.get(name, _listed)(schedule))


def _chunks(name: str, virtual_stages: int | None) -> int:
    own = OWN_CHUNKS.get(name, 1)
    if virtual_stages is None or virtual_stages == own:
        return own
    if name != "interleaved":
        raise UserError(
            f"schedule={name} has virtual_stages={own}, not {virtual_stages}; "
            "leave virtual_stages out, or use schedule=interleaved"
        )
    if virtual_stages < 2:
        raise UserError(
            f"schedule=interleaved with virtual_stages={virtual_stages}: use 2 or more, "
            "or schedule=1f1b"
        )
    return virtual_stages


def _from_file(path: str, sizes: dict[str, int | None]) -> Schedule:
    schedule = read_csv(path)
    found = {
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "virtual_stages": schedule.chunks,
    }
    for what, size in sizes.items():
        if size is not None and size != found[what]:
            raise UserError(
                f"schedule={path} is a table for {what}={found[what]}, not {size}; "
                f"use {what}={found[what]} or another table"
            )
    return schedule


# ---- closed forms -------------------------------------------------------------------------------


def _gpipe(schedule: Schedule) -> np.ndarray:
    """All forwards, then all backwards, without a pause within either."""
    p, m = schedule.stages, schedule.micro_batches
    s, i = np.indices((p, m))
    return _table(schedule, forward=s + i, backward=m + 2 * (p - 1) - s + i)


def _one_forward_one_backward(schedule: Schedule) -> np.ndarray:
    """Every other tick of a stage is a forward's, from its first to its last.

    So at tick t stages s and s+1 can exchange values if s == t mod 2, and no others do.
    """
    p, m = schedule.stages, schedule.micro_batches
    s, i = np.indices((p, m))
    return _table(schedule, forward=s + 2 * i, backward=2 * p - 1 - s + 2 * i)


def _table(schedule: Schedule, *, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """The table of the ticks `[stages, micro_batches]` of F and B."""
    table = np.zeros((int(backward.max()) + 1, schedule.stages, 3), np.int32)
    s, i = np.indices(forward.shape)
    for operation, tick in ((F, forward), (B, backward)):
        table[tick, s, 0], table[tick, s, 1] = operation, i
    return table


def _zero_bubble_v(schedule: Schedule) -> np.ndarray:
    """Every stage works without a pause, the next one a tick later; see `_v_order`."""
    p, m = schedule.stages, schedule.micro_batches
    if m < 2 * p - 1:  # too few to fill the pipeline as the order has it
        return _listed(schedule)
    table = np.zeros((6 * m + p - 1, p, 3), np.int32)
    for s in range(p):
        order = np.array(_v_order(schedule, s))
        table[s : s + 6 * m, s, 0], table[s : s + 6 * m, s, 2] = order.T
        for operation, chunk in set(map(tuple, order.tolist())):
            mine = (order == (operation, chunk)).all(1)
            table[s + np.flatnonzero(mine), s, 1] = np.arange(m)
    return table


def _v_order(schedule: Schedule, s: int) -> list[tuple[Operation, int]]:
    """Operations and chunks of stage s: fill, a steady state of six operations, drain."""
    p, m = schedule.stages, schedule.micro_batches
    down, up = [(B, 0), (W, 0)], [(F, 1), (B, 1), (W, 1)]
    fill = [(F, 0)] * (2 * (p - s) - 1) + [(F, 1), (F, 0)] * s + up * (p - s)
    steady = [(F, 0), *down, *up] * (m - 2 * p + s + 1) + (down + up) * (p - 1 - s)
    drain = [(B, 0), (B, 1)] * s + down * (p - s) + [(W, 1)] * s + [(W, 0)] * s
    return fill + steady + drain


# ---- lists --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Limits:
    """When a stage may begin another forward.

    Args:
        ahead: of stage s: chunk forwards that may be done before their backward.
        held: chunk forwards whose weight gradient may be owed.
        group: micro-batches that go through a chunk before any goes through the next.
        waits: whether a stage waits for what is next, instead of doing what it already can.
    """

    ahead: Callable[[int], int]
    held: float
    group: int
    waits: bool = False


def _limits(schedule: Schedule) -> _Limits:
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    return {
        # Megatron's order: 2(p-s-1) + (V-1)p forwards, then a forward and a backward by turns.
        # A last group of fewer than p could come to wait for itself.
        "interleaved": _Limits(
            lambda s: 2 * (p - s - 1) + (V - 1) * p + 1, math.inf, p, waits=m % p == 0
        ),
        "zb-h1": _Limits(lambda s: p - s, p, m),
        "zb-h2": _Limits(lambda s: 2 * (p - s) - 1, 2 * p - 1, m),
        "zb-v": _Limits(lambda s: 2 * p, 2 * p, 1),  # with few micro-batches
    }[schedule.name]


def _listed(schedule: Schedule) -> np.ndarray:
    """At each tick each stage does the first it can of: forward within the limits, backward, W.

    The first group of micro-batches goes first, through one chunk after the other.
    """
    progress = _Progress(schedule)
    rows: list[list[Cell]] = []
    while not progress.complete:
        row = [progress.go(stage, len(rows)) for stage in range(schedule.stages)]
        assert any(operation for operation, *_ in row), f"{schedule.name} stands still"
        rows.append(row)
    return np.array(rows, np.int32)


class _Progress:
    """At which ticks each part did its micro-batches so far; it does them in order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.limits = schedule, _limits(schedule)
        self.kinds = (F, B, W) if schedule.name.startswith("zb") else (F, B)
        self.done: dict[tuple[Operation, int], list[int]] = {
            (operation, part): [] for operation in self.kinds for part in range(schedule.parts)
        }

    @property
    def complete(self) -> bool:
        return all(len(ticks) == self.schedule.micro_batches for ticks in self.done.values())

    def go(self, stage: int, tick: int) -> Cell:
        """What a stage does at a tick, as a cell of the table."""
        kinds = self.kinds if self._may_go_forward(stage) else self.kinds[1:]
        wanted = [
            (operation, part, chunk)
            for chunk in range(self.schedule.chunks)
            for part in [self.schedule.part(stage, chunk)]
            for operation in kinds
            if len(self.done[operation, part]) < self.schedule.micro_batches
        ]
        wanted.sort(key=self._urgency)
        if self.limits.waits:
            del wanted[1:]
        for operation, part, chunk in wanted:
            if self._is_ready(operation, part, tick):
                ticks = self.done[operation, part]
                ticks.append(tick)
                return operation, len(ticks) - 1, chunk
        return 0, 0, 0

    def _may_go_forward(self, stage: int) -> bool:
        parts = [self.schedule.part(stage, chunk) for chunk in range(self.schedule.chunks)]
        first, *_, last = (sum(len(self.done[k, q]) for q in parts) for k in self.kinds)
        back = sum(len(self.done[B, part]) for part in parts)
        return first - back < self.limits.ahead(stage) and first - last < self.limits.held

    def _is_ready(self, operation: Operation, part: int, tick: int) -> bool:
        i = len(self.done[operation, part])
        before = (self.done[need] for need in self.schedule.needs(operation, part))
        return all(len(ticks) > i and ticks[i] < tick for ticks in before)

    def _urgency(self, wanted: tuple[Operation, int, int]) -> tuple[int, int, int]:
        operation, part, chunk = wanted
        group = len(self.done[operation, part]) // self.limits.group
        return operation, group, chunk if operation == F else -chunk
