"""The layers of each part of the model, and their rows in the stages' stacks of parameters.

A model has one or several stacks of layers, such as an encoder and a decoder. Each stage holds rows
of every stack, chunk by chunk. A chunk has as many rows of a stack as the part with the most of its
layers, or none if no stage has layers there; rows that a smaller part leaves unfilled never run.
"""

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxptd.errors import UserError
from jaxptd.pipeline.table import Schedule

Stacks = Mapping[str, tuple[int, ...]]  # per stack, the number of its layers in each part


class Kind(NamedTuple):
    """Layers that save the same arrays for backward: rows `begin` to `end` of a stack's parts."""

    stack: str
    begin: int
    end: int


class Stages(Protocol):
    """A pipeline as formulas need it: a plan, or an outline of one."""

    @property
    def schedule(self) -> Schedule:
        """Its parts on its stages; the table may be missing."""

    @property
    def stacks(self) -> Stacks:
        """The layers of each stack in each part."""

    @property
    def recompute(self) -> bool:
        """True if backward runs a part of the model again, from its input."""

    @property
    def splits(self) -> bool:
        """True if backward is split into B and W."""

    @property
    def slots(self) -> Mapping[str, int]:
        """The number of slots of each pool: *mail*, and *saved* and *between* `of_stack`."""

    def depth(self, stack: str) -> int:
        """The layers of the largest part."""


def stack_sizes(
    layers: Mapping[str, int],
    schedule: Schedule,
    stage_layers: Sequence[int] | None = None,
    *,
    period: int = 1,
) -> Stacks:
    """The number of layers of each stack in each part of the model.

    If a stage has a chunk for every stack, and each stack layers for all parts of its chunks,
    stacks get whole chunks in proportion to their layers, and no row is unused. Otherwise the parts
    are as equal as possible regardless of stack, and each stage also holds rows of stacks of which
    it runs no layer.

    Args:
        layers: the number of layers of each stack, in the order in which x passes them.
        schedule: the schedule that runs the parts.
        stage_layers: as in `part_sizes`, for the layers of all stacks.
        period: layers of the model in one of a stack, for errors.

    Raises:
        UserError: a part would be empty, or `stage_layers` does not add up to all layers.
    """
    chunks = _chunks([*layers.values()], schedule.chunks)
    needed = (schedule.stages * number for number in chunks)
    whole = schedule.chunks >= len(layers) and all(map(operator.ge, layers.values(), needed))
    if stage_layers is not None or (len(layers) > 1 and not whole):
        sizes = part_sizes(
            sum(layers.values()),
            schedule.parts,
            stage_layers,
            words=_words(layers, period),
            period=period,
        )
        return _cut(sizes, layers)
    ends = [schedule.stages * end for end in itertools.accumulate(chunks)]
    by_stack: dict[str, tuple[int, ...]] = {}
    for (name, count), begin, end in zip(layers.items(), [0, *ends], ends, strict=False):
        parts = part_sizes(count, end - begin, words=_words({name: count}, period))
        by_stack[name] = (*[0] * begin, *parts, *[0] * (schedule.parts - end))
    return by_stack


def _words(layers: Mapping[str, int], period: int) -> str:
    """The number of layers in the words of `part_sizes`' errors."""
    total = sum(layers.values())
    if period > 1:
        return f"model.num_layers={total * period} in periods of {period}"
    if len(layers) == 1:
        return f"model.num_layers={total}"
    each = ", ".join(f"{count} of {name}" for name, count in layers.items())
    return f"a depth of {total} layers ({each})"


def _chunks(layers: Sequence[int], chunks: int) -> list[int]:
    """Divides a stage's chunks among stacks by their layers, at least one for each."""
    counts = [1] * len(layers)
    for _ in range(chunks - len(layers)):
        counts[max(range(len(layers)), key=lambda i: layers[i] / counts[i])] += 1
    return counts


def _cut(sizes: Sequence[int], layers: Mapping[str, int]) -> Stacks:
    """The layers of each stack in parts of these sizes."""
    ends = [*itertools.accumulate(sizes)]
    by_stack, begin = {}, 0
    for name, count in layers.items():
        inside = [min(max(end - begin, 0), count) for end in (0, *ends)]
        by_stack[name] = tuple(after - before for before, after in itertools.pairwise(inside))
        begin += count
    return by_stack


def part_sizes(
    layers: int,
    parts: int,
    stage_layers: Sequence[int] | None = None,
    *,
    words: str | None = None,
    period: int = 1,
) -> tuple[int, ...]:
    """The number of layers of each part of the model, in the model's order.

    Sizes are as equal as possible. Parts in the middle get the remainder first, because the first
    part also runs the embedding, and the last the head and the loss.

    Args:
        layers: the number of layers of the model.
        parts: stages times chunks.
        stage_layers: the number of layers of each part, to use instead.
        words: the layers, in errors; None: `model.num_layers`.
        period: layers of the model in one of these, for errors.

    Raises:
        UserError: a part would be empty, or `stage_layers` does not add up to `layers`.
    """
    words = words or f"model.num_layers={layers}"
    if stage_layers is not None:
        if len(stage_layers) != parts or sum(stage_layers) != layers or min(stage_layers) < 0:
            given = [size * period for size in stage_layers]
            raise UserError(
                f"layout.stage_layers={given}: use {parts} numbers, one for each "
                f"part of the model, that add up to {words}"
            )
        return tuple(stage_layers)
    if layers < parts:
        raise UserError(
            f"{words} leaves some of the pipeline's {parts} parts (layout.pp x "
            "layout.virtual_stages) empty; use more layers, fewer parts, or layout.stage_layers"
        )
    each, more = divmod(layers, parts)
    order = sorted(range(parts), key=lambda part: (part == parts - 1, part == 0))
    return tuple(each + (order.index(part) < more) for part in range(parts))


def chunk_rows(schedule: Schedule, sizes: Sequence[int]) -> tuple[int, ...]:
    """The first row of each chunk in a stage's stack, then the total number of rows.

    Args:
        schedule: defines the chunks.
        sizes: the number of layers of the stack in each part.
    """
    used = {schedule.where(part)[1] for part, size in enumerate(sizes) if size}
    depths = (max(sizes) * (chunk in used) for chunk in range(schedule.chunks))
    return tuple(itertools.accumulate(depths, initial=0))


def of_stack(name: str, stack: str) -> str:
    """The name of a stack's column or pool in a plan: saved_encoder."""
    return f"{name}_{stack}"


def layers_scope(name: str, kind: int) -> str:
    """The name of the scope of a loop over a part's layers of one kind."""
    return f"{name}_layers_{kind}" if kind else f"{name}_layers"


def layer_columns(
    schedule: Schedule, stacks: Stacks, *, part: np.ndarray, chunk: np.ndarray
) -> dict[str, np.ndarray]:
    """A plan's columns row, layer and layers for each stack; see `Plan.columns`.

    Args:
        schedule: the plan's.
        stacks: the plan's.
        part: the part of each stage and tick, `[ticks, p]`.
        chunk: likewise.
    """
    columns, before = {}, 0
    for stack, of_parts in stacks.items():
        sizes, rows = np.array(of_parts), np.array(chunk_rows(schedule, of_parts))
        columns[of_stack("row", stack)] = rows[chunk]
        columns[of_stack("layer", stack)] = before + (np.cumsum(sizes) - sizes)[part]
        columns[of_stack("layers", stack)] = sizes[part]
        before += sum(of_parts)
    return columns


def rows_of_layers(schedule: Schedule, sizes: Sequence[int]) -> tuple[int, ...]:
    """The row of each layer of a stack, counted through all stages.

    For 1f1b on 2 stages with parts of 3 and 1 layers, these are rows 0, 1, 2 and 3; rows 4 and 5
    are unused.

    Args:
        schedule: places the parts on stages.
        sizes: the number of layers of the stack in each part.
    """
    *begins, depth = chunk_rows(schedule, sizes)
    rows: list[int] = []
    for part, size in enumerate(sizes):
        stage, chunk = schedule.where(part)
        begin = stage * depth + begins[chunk]
        rows += range(begin, begin + size)
    return tuple(rows)
