"""Schedules as tables of each stage's operation at each tick, with a check and CSV files.

The model is divided into stages * chunks consecutive *parts*. A value that a stage sends at the end
of tick t can be read from tick t+1 on. Pure numpy.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from jaxptd.errors import UserError, quoted, read_small
from jaxptd.fields import check_fields


class Operation(IntEnum):
    """A stage's operation at a tick."""

    IDLE = 0
    F = 1  # forward
    B = 2  # backward; if the schedule has W, only the gradient of the input
    W = 3  # the gradients of the weights


Placement = Literal["loop", "v"]
Need = tuple[Operation, int]
F, B, W = Operation.F, Operation.B, Operation.W


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A pipeline schedule: which stage does what at which tick.

    Args:
        name: one of `SCHEDULES`, or the path of its file.
        stages: p.
        micro_batches: m per step.
        chunks: V, parts of the model on each stage.
        placement: `loop`: part c*p + s is chunk c of stage s. `v`, with two chunks: part s is
            chunk 0 of stage s, and part 2p - 1 - s its chunk 1.
        table: int32 `[ticks, stages, 3]`: operation, micro-batch, chunk; zeros where idle.

    Raises:
        UserError: a field has the wrong type. `check` checks the table.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    placement: Placement
    table: np.ndarray

    def __post_init__(self) -> None:
        check_fields(self, "schedule")

    def __repr__(self) -> str:
        sizes = f"{self.stages} stages, {self.micro_batches} micro-batches, {self.chunks} chunks"
        return f"Schedule {self.name}: {sizes} a stage, {self.ticks} ticks"

    @property
    def ticks(self) -> int:
        return len(self.table)

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    @property
    def splits(self) -> bool:
        """True if backward is split into B and W."""
        return bool((self.table[..., 0] == W).any())

    def part(self, stage: int, chunk: int) -> int:
        """The part of the model in a stage's chunk."""
        if self.placement == "v" and chunk == 1:
            return 2 * self.stages - 1 - stage
        return chunk * self.stages + stage

    def where(self, part: int) -> tuple[int, int]:
        """(stage, chunk) of a part."""
        chunk, stage = divmod(part, self.stages)
        if self.placement == "v" and chunk == 1:
            stage = self.stages - 1 - stage
        return stage, chunk

    def operations(self) -> Iterator[tuple[int, int, Operation, int, int]]:
        """(tick, stage, operation, micro-batch, chunk) of each cell that is not idle, by tick."""
        for tick, stage in np.argwhere(self.table[..., 0] != 0).tolist():
            operation, micro_batch, chunk = self.table[tick, stage].tolist()
            yield tick, stage, Operation(operation), micro_batch, chunk

    def needs(self, operation: Operation, part: int) -> list[Need]:
        """The (operation, part)s of the same micro-batch that must run at an earlier tick."""
        if operation == F:
            return [(F, part - 1)] if part else []
        if operation == B:
            return [(F, part), (B, part + 1)] if part + 1 < self.parts else [(F, part)]
        return [(B, part)]


# ---- the check ----------------------------------------------------------------------------------


def check(schedule: Schedule) -> None:
    """Raises UserError with the first error in a table.

    Every micro-batch needs one F and one B (and one W, if any has one) on each part, each at a
    later tick than all operations that it depends on (`Schedule.needs`).
    """
    _check_form(schedule)
    when: dict[tuple[Operation, int, int], int] = {}
    for tick, stage, operation, i, chunk in schedule.operations():
        _check_cell(schedule, (tick, stage, i, chunk))
        key = operation, schedule.part(stage, chunk), i
        if key in when:
            raise _impossible(schedule, key, f"done twice, at ticks {when[key]} and {tick}")
        when[key] = tick
    kinds = (F, B, W) if schedule.splits else (F, B)
    for part, i in np.ndindex(schedule.parts, schedule.micro_batches):
        for operation in kinds:
            if (operation, part, i) not in when:
                raise _impossible(schedule, (operation, part, i), "missing; add it")
    for key in sorted(when, key=lambda key: when[key]):
        _check_order(schedule, key, when)


def _check_form(schedule: Schedule) -> None:
    for what in ("stages", "micro_batches", "chunks"):
        if getattr(schedule, what) < 1:
            raise UserError(f"schedule.{what}={getattr(schedule, what)}: use 1 or more")
    if schedule.placement == "v" and schedule.chunks != 2:
        raise UserError(
            f"schedule {schedule.name}: placement=v has 2 chunks per stage, not {schedule.chunks}; "
            "use placement=loop"
        )
    shape = schedule.table.shape
    if len(shape) != 3 or shape[1:] != (schedule.stages, 3):
        raise UserError(
            f"schedule {schedule.name}: a table of shape {list(shape)}; use [ticks, "
            f"{schedule.stages}, 3], with operation, micro-batch and chunk in each cell"
        )
    if not np.issubdtype(schedule.table.dtype, np.integer):
        raise UserError(f"schedule {schedule.name}: a table of {schedule.table.dtype}; use int32")
    operations = schedule.table[..., 0]
    strange = operations[(operations < 0) | (operations > max(Operation))]
    if strange.size:
        raise UserError(
            f"schedule {schedule.name}: there is no operation {strange[0]}; use 0 (idle), 1 (F), "
            "2 (B) or 3 (W)"
        )


def _check_cell(schedule: Schedule, cell: tuple[int, int, int, int]) -> None:
    tick, stage, i, chunk = cell
    for what, number, count in (
        ("micro-batch", i, schedule.micro_batches),
        ("chunk", chunk, schedule.chunks),
    ):
        if not 0 <= number < count:
            raise UserError(
                f"schedule {schedule.name}: stage {stage} at tick {tick} has {what} {number}; "
                f"there are {count}, use 0 to {count - 1}"
            )


def _check_order(
    schedule: Schedule,
    key: tuple[Operation, int, int],
    when: dict[tuple[Operation, int, int], int],
) -> None:
    operation, part, i = key
    for need, before in schedule.needs(operation, part):
        if when[need, before, i] >= when[key]:
            stage, chunk = schedule.where(before)
            raise _impossible(
                schedule,
                key,
                f"at tick {when[key]}, but {need.name}{i} of stage {stage}, chunk {chunk}, which "
                f"it needs, is at tick {when[need, before, i]}; move it to a later tick than that",
            )


def _impossible(schedule: Schedule, key: tuple[Operation, int, int], what: str) -> UserError:
    operation, part, i = key
    stage, chunk = schedule.where(part)
    return UserError(
        f"schedule {schedule.name}: {operation.name}{i} of stage {stage}, chunk {chunk}, is {what}"
    )


# ---- the file -----------------------------------------------------------------------------------

CELL = re.compile(r"([FBW])([0-9]{1,6})(?:\.([0-9]{1,6}))?")  # F3, for chunk 1 F3.1


def to_csv(schedule: Schedule) -> str:
    """The table as CSV: a line per stage, a cell per tick such as F0, or with chunks F0.1.

    An idle cell is empty. If the placement is not `loop`, the first line is `placement,v`.
    """
    rows = [["placement", "v"]] if schedule.placement == "v" else []
    for column in schedule.table.swapaxes(0, 1).tolist():
        rows.append([cell_text(schedule, cell) for cell in column])
    return "".join(",".join(row) + "\n" for row in rows)


def cell_text(schedule: Schedule, cell: Sequence[int]) -> str:
    """A cell of the table as in a file: F0, or with several chunks F0.1; empty if idle."""
    operation, i, chunk = cell
    if operation == Operation.IDLE:
        return ""
    return f"{Operation(operation).name}{i}" + (f".{chunk}" if schedule.chunks > 1 else "")


def read_csv(path: str | Path) -> Schedule:
    """Reads a schedule from a file that `to_csv` wrote; its sizes follow from its cells.

    Raises:
        UserError: the file cannot be read, or is not a schedule (see `check`).
    """
    name = quoted(str(path), 255)
    text = read_small(path, what="schedule", remedy="name a .csv file that can be read")
    lines = [line.split(",") for line in text.splitlines() if line.strip()]
    placement = "loop"
    if lines and lines[0][0].strip() == "placement":
        placement = ",".join(cell.strip() for cell in lines.pop(0)[1:]).rstrip(",")
        _check_placement(name, placement)
    cells = [[_parsed(path, stage, cell) for cell in line] for stage, line in enumerate(lines)]
    used = [cell for line in cells for cell in line if cell[0]]
    if not used:
        raise UserError(f"schedule {path} is empty; write a line per stage, with cells such as F0")
    table = np.zeros((max(map(len, cells)), len(cells), 3), np.int32)
    for stage, line in enumerate(cells):
        table[: len(line), stage] = line
    micro_batches, chunks = (1 + max(cell[k] for cell in used) for k in (1, 2))
    schedule = Schedule(str(path), len(cells), micro_batches, chunks, placement, table)  # type: ignore[arg-type]
    check(schedule)
    return schedule


def _check_placement(name: str, placement: str) -> None:
    if placement not in (known := get_args(Placement)):
        words = f"placement={quoted(placement)}: use one of {', '.join(known)}"
        raise UserError(f"schedule {name}: {words}")


def _parsed(path: str | Path, stage: int, cell: str) -> tuple[int, int, int]:
    match = CELL.fullmatch(cell.strip())
    if match:
        return Operation[match[1]], int(match[2]), int(match[3] or 0)
    if cell.strip():
        raise UserError(
            f"schedule {path}: stage {stage} has a cell {cell.strip()[:20]!r}; write F0, B0 or W0, "
            "with a chunk F0.1, or nothing"
        )
    return 0, 0, 0
