"""The named schedules, for any number of stages and micro-batches. Pure numpy.

For p stages, m micro-batches and V chunks, the columns give the number of ticks and the most
micro-batches whose activations stage s holds.

    gpipe        2(m+p-1)    m                          Huang et al., arXiv 1811.06965
    1f1b         2(m+p-1)    min(m, p-s)                Narayanan et al., arXiv 2104.04473
    interleaved  2(mV+p-1)   min(m, p + (p-2s-1)/V)     the same, section 2.2; p divides m
    zb-h1        3m+p-1      min(m, p), m >= p          Qi et al., arXiv 2401.10241, section 2
    zb-h2        3m+p-1      min(m, 2p-1), m >= p       the same
    zb-v         6m+p-1      min(m, p), m >= 2p-1       the same, and 2405.15362; V = 2

A tick lasts as long as one operation on one part. The zb schedules split backward into B and W.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxptd.errors import UserError, quoted
from jaxptd.fields import checked
from jaxptd.layout import SCHEDULES
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

DEFAULT_CHUNKS = {"interleaved": 2, "zb-v": 2}  # 1 for the others
# Limits stages * chunks * (stages + micro_batches * chunks), to which the time to build a table is
# proportional. A larger table would take over a minute, and no real pipeline is that large.
MAX_CELLS = 2**20


@checked("jaxptd.make_schedule")
def make_schedule(
    name: str | Path, *, stages: int, micro_batches: int, virtual_stages: int | None = None
) -> Schedule:
    """Makes a pipeline schedule by name, or reads one from a `.csv` file (see `table.read_csv`).

    >>> make_schedule("zb-h1", stages=4, micro_batches=8)
    Schedule zb-h1: 4 stages, 8 micro-batches, 1 chunks a stage, 27 ticks

    Args:
        name: one of `SCHEDULES`, or the path.
        stages: p, 1 or more.
        micro_batches: m, 1 or more; fewer than stages is allowed.
        virtual_stages: V, chunks per stage; None: the schedule's default.

    Raises:
        UserError: there is no such schedule, or not in these sizes.
    """
    schedule = outline(
        name, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    if schedule.ticks:
        return schedule
    make = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "zb-v": _zero_bubble_v}
    return dataclasses.replace(schedule, table=make.get(schedule.name, _listed)(schedule))


def outline(
    name: str | Path, *, stages: int, micro_batches: int, virtual_stages: int | None = None
) -> Schedule:
    """A schedule's parts on its stages, without a table unless it comes from a file.

    Takes the arguments of `make_schedule` and raises its errors, except for sizes that only a table
    shows to be impossible.
    """
    sizes = {"stages": stages, "micro_batches": micro_batches, "virtual_stages": virtual_stages}
    for what, size in sizes.items():
        if size is not None and size < 1:
            raise UserError(f"{what}={size}: use 1 or more")
    name = str(name)
    if name.endswith(".csv"):
        return _from_file(name, sizes)
    if name not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        raise UserError(f"schedule={quoted(name)}: use one of {names}, or a .csv file")
    chunks = _chunks(name, virtual_stages)
    if stages * chunks * (stages + micro_batches * chunks) > MAX_CELLS:
        raise UserError(
            f"schedule={name} with stages={stages}, micro_batches={micro_batches} and {chunks} "
            "chunks per stage is too large; use fewer"
        )
    placement: Placement = "v" if name == "zb-v" else "loop"
    empty = np.zeros((0, stages, 3), np.int32)
    return Schedule(name, stages, micro_batches, chunks, placement, empty)


def _chunks(name: str, virtual_stages: int | None) -> int:
    default = DEFAULT_CHUNKS.get(name, 1)
    if virtual_stages is None or virtual_stages == default:
        return default
    if name != "interleaved":
        raise UserError(
            f"schedule={name} has virtual_stages={default}, not {virtual_stages}; "
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
    entries = {
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "virtual_stages": schedule.chunks,
    }
    for what, size in sizes.items():
        if size is not None and size != entries[what]:
            raise UserError(
                f"schedule={path} is a table for {what}={entries[what]}, not {size}; "
                f"use {what}={entries[what]} or another table"
            )
    return schedule


# ---- closed forms -------------------------------------------------------------------------------


def _gpipe(schedule: Schedule) -> np.ndarray:
    """All forwards, then all backwards, each without idle ticks in between."""
    p, m = schedule.stages, schedule.micro_batches
    s, i = np.indices((p, m))
    return _table(schedule, forward=s + i, backward=m + 2 * (p - 1) - s + i)


def _one_forward_one_backward(schedule: Schedule) -> np.ndarray:
    """Each stage runs a forward at every second tick, from its first forward to its last.

    So at tick t only stages s and s+1 with s == t mod 2 exchange values.
    """
    p, m = schedule.stages, schedule.micro_batches
    s, i = np.indices((p, m))
    return _table(schedule, forward=s + 2 * i, backward=2 * p - 1 - s + 2 * i)


def _table(schedule: Schedule, *, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Builds the table from the ticks `[stages, micro_batches]` of F and of B."""
    table = np.zeros((int(backward.max()) + 1, schedule.stages, 3), np.int32)
    s, i = np.indices(forward.shape)
    for operation, tick in ((F, forward), (B, backward)):
        table[tick, s, 0], table[tick, s, 1] = operation, i
    return table


def _zero_bubble_v(schedule: Schedule) -> np.ndarray:
    """Stages without idle ticks, each beginning a tick after the previous one; see `_v_order`."""
    p, m = schedule.stages, schedule.micro_batches
    if m < 2 * p - 1:  # too few to fill the pipeline in that order
        return _listed(schedule)
    table = np.zeros((6 * m + p - 1, p, 3), np.int32)
    for s in range(p):
        order = np.array(_v_order(schedule, s))
        table[s : s + 6 * m, s, 0], table[s : s + 6 * m, s, 2] = order.T
        for operation, chunk in set(map(tuple, order.tolist())):
            these = (order == (operation, chunk)).all(1)
            table[s + np.flatnonzero(these), s, 1] = np.arange(m)
    return table


def _v_order(schedule: Schedule, s: int) -> list[tuple[Operation, int]]:
    """(operation, chunk) of stage s in order: fill, a steady state of six operations, drain."""
    p, m = schedule.stages, schedule.micro_batches
    down, up = [(B, 0), (W, 0)], [(F, 1), (B, 1), (W, 1)]
    fill = [(F, 0)] * (2 * (p - s) - 1) + [(F, 1), (F, 0)] * s + up * (p - s)
    steady = [(F, 0), *down, *up] * (m - 2 * p + s + 1) + (down + up) * (p - 1 - s)
    drain = [(B, 0), (B, 1)] * s + down * (p - s) + [(W, 1)] * s + [(W, 0)] * s
    return fill + steady + drain


# ---- lists --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Limits:
    """The limits within which a stage may run another forward.

    Args:
        ahead: stage s -> the most forwards of its chunks whose backward has not run.
        held: the most forwards of its chunks whose last operation has not run.
        group: micro-batches that pass a chunk before any passes the next.
        waits: whether a stage waits for its most urgent operation instead of running the first one
            that is ready.
        alternates: whether all stages run F at one tick and B at the next.
    """

    ahead: Callable[[int], int]
    held: float
    group: int
    waits: bool = False
    alternates: bool = False


def _limits(schedule: Schedule) -> _Limits:
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    return {
        # Megatron's order: 2(p-s-1) + (V-1)p forwards, then a forward and a backward in turn.
        # With a last group of fewer than p micro-batches, waiting for that order could deadlock.
        "interleaved": _Limits(
            lambda s: 2 * (p - s - 1) + (V - 1) * p + 1,
            math.inf,
            p,
            waits=m % p == 0,
            alternates=True,
        ),
        "zb-h1": _Limits(lambda s: p - s, p, m),
        "zb-h2": _Limits(lambda s: 2 * (p - s) - 1, 2 * p - 1, m),
        "zb-v": _Limits(lambda s: 2 * p, 2 * p, 1),  # with few micro-batches
    }[schedule.name]


def _listed(schedule: Schedule) -> np.ndarray:
    """The table in which each stage runs the most urgent of its ready operations.

    F, if the limits allow it, is more urgent than B, and B than W. Within an operation earlier
    groups of micro-batches come first, then earlier chunks (later ones for B and W).
    """
    progress = _Progress(schedule)
    rows: list[list[Cell]] = []
    while not progress.complete:
        begun = len(rows)
        for kinds in progress.turns:
            row = [progress.step(stage, len(rows), kinds) for stage in range(schedule.stages)]
            rows += [row] if any(operation for operation, *_ in row) else []
        assert len(rows) > begun, f"{schedule.name} is deadlocked"
    return np.array(rows, np.int32)


class _Progress:
    """The ticks of each part's operations so far; each runs the micro-batches in order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.limits = schedule, _limits(schedule)
        self.kinds = (F, B, W) if schedule.name.startswith("zb") else (F, B)
        self.turns = [(kind,) for kind in self.kinds] if self.limits.alternates else [self.kinds]
        self.done: dict[tuple[Operation, int], list[int]] = {
            (operation, part): [] for operation in self.kinds for part in range(schedule.parts)
        }

    @property
    def complete(self) -> bool:
        return all(len(ticks) == self.schedule.micro_batches for ticks in self.done.values())

    def step(self, stage: int, tick: int, turn: Sequence[Operation]) -> Cell:
        """Chooses a stage's operation at a tick; idle if none that has its turn is ready."""
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
            if operation in turn and self._is_ready(operation, part, tick):
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
