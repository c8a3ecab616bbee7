"""Draws a schedule as text, as PNG or SVG, and as a trace for Perfetto.

Only `draw` and `render` need matplotlib (the viz extra).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from jaxptd.atomic_files import explained, write_whole
from jaxptd.fields import checked
from jaxptd.pipeline.statistics import EQUAL, Durations, bubble, held, simulate
from jaxptd.pipeline.table import B, F, Operation, Schedule, W, cell_text, check
from jaxptd.plot import (
    AMBER,
    BACKWARD,
    BLUE,
    DARK,
    FORWARD,
    GREEN,
    PINK,
    WEIGHTS,
    drawing,
    format_of,
)

STYLES = {F: "blue", B: "green", W: "dark_orange"}  # in a terminal
COLORS = {F: FORWARD, B: BACKWARD, W: WEIGHTS}  # for chunk 0; later chunks are darker
FOLDS = 8  # most blocks of lines into which `as_text` folds a wide table
NUMBERS = 4000  # most cells of a picture that shows micro-batch numbers
IDLE = (0.5, 0.5, 0.5, 0.15)
ENDS = (BLUE, GREEN, AMBER, PINK)  # colours from the first stage to the last
# Explains what a reader could mistake for an error, by schedule.
NOTES = {
    "1f1b": "\nits early gaps cost nothing: a forward every second tick, until the first backward "
    "comes back"
}
LABELS = 1.0  # inches next to the cells
SMALLEST = 5.0  # points; smaller numbers are unreadable, and omitted


# ---- text ---------------------------------------------------------------------------------------


def as_text(schedule: Schedule, *, width: int = 80) -> Text:
    """A line per stage and a cell per tick: F3 is micro-batch 3's forward, F3.1 that of chunk 1.

    Args:
        schedule: the schedule.
        width: columns of the terminal. A wider table is folded into at most `FOLDS` blocks; the
            last line says how many ticks are omitted.
    """
    rows = [
        [cell_text(schedule, cell) for cell in column]
        for column in schedule.table.swapaxes(0, 1).tolist()
    ]
    cell = max(len(str(schedule.ticks - 1)), *(len(text) for row in rows for text in row)) + 1
    label = len(f"stage {schedule.stages - 1} ")
    ticks = max(1, (width - label) // cell)  # per block
    blocks = [
        _block(rows, range(t, min(t + ticks, schedule.ticks)), label=label, cell=cell)
        for t in range(0, min(schedule.ticks, FOLDS * ticks), ticks)
    ]
    if (left := schedule.ticks - FOLDS * ticks) > 0:
        blocks.append(Text(f"and {left} more ticks, not shown; a picture or a CSV has them"))
    return Text("\n\n").join(blocks)


def _block(rows: list[list[str]], ticks: range, *, label: int, cell: int) -> Text:
    lines = [Text("tick".ljust(label) + "".join(f"{t:<{cell}}" for t in ticks).rstrip())]
    for stage, row in enumerate(rows):
        line = Text(f"stage {stage}".ljust(label))
        for tick in ticks:
            text = row[tick]
            style = STYLES[Operation[text[0]]] if text else "dim"
            line.append((text or ".").ljust(cell), style)
        line.rstrip()
        lines.append(line)
    return Text("\n").join(lines)


# ---- picture ------------------------------------------------------------------------------------


def draw(schedule: Schedule, path: str | Path) -> None:
    """Writes a picture, PNG or SVG by the path's suffix; the same schedule gives the same bytes.

    It shows a column per tick, a row per stage and a micro-batch's number in each cell; below, the
    number of micro-batches that each stage holds.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    write({Path(path): render(schedule, path)})


def render(schedule: Schedule, path: str | Path) -> bytes:
    """The bytes of the picture that `draw` writes to this path."""
    kind = format_of(path)
    return drawing("jaxptd.plot.style").to_bytes(figure(schedule), kind)


@checked("jaxptd.plot.schedule")
def figure(schedule: Schedule) -> Any:
    """Draws each stage's operation at each tick, and how many micro-batches it holds.

    Raises:
        UserError: the table is wrong, or matplotlib is not installed.
    """
    check(schedule)
    style = drawing("jaxptd.plot.style")
    return style.styled(_figure)(schedule, style)


def _figure(schedule: Schedule, style: Any) -> Any:
    width = _width(schedule, least=style.PAGE)
    figure = style.new_picture(width, schedule.stages * 0.32 + 3.6)
    ratios = [schedule.stages * 0.32 + 0.4, 1.8]
    cells, curves = figure.subplots(2, 1, sharex=True, height_ratios=ratios)
    _draw_cells(cells, schedule, _size_of_numbers(schedule, width=width))
    _draw_held(curves, schedule)
    return figure


def _width(schedule: Schedule, *, least: float) -> float:
    """Inches at which numbers are readable, between a page's width (`least`) and 48."""
    return float(np.clip(schedule.ticks * (0.03 + 0.09 * _digits(schedule)) + LABELS, least, 48))


def _size_of_numbers(schedule: Schedule, *, width: float) -> float:
    """The font size, in points, at which numbers fit in the cells; width: inches."""
    cell = (width - LABELS) * 72 / schedule.ticks
    return min(10.0, cell / (0.72 * _digits(schedule)))


def _digits(schedule: Schedule) -> int:
    return len(str(schedule.micro_batches - 1))


def _draw_cells(axes: Any, schedule: Schedule, points: float) -> None:
    """Draws the table; tick t extends from t to t + 1."""
    operation, micro_batch, chunk = np.moveaxis(schedule.table.swapaxes(0, 1), -1, 0)
    axes.pcolormesh(_shades(schedule), edgecolors=(0.5, 0.5, 0.5, 0.5), linewidth=0.6)
    if operation.size <= NUMBERS and points >= SMALLEST:
        for stage, tick in np.argwhere(operation > 0).tolist():
            ink = "white" if chunk[stage, tick] else DARK
            where = tick + 0.5, stage + 0.5
            number = str(micro_batch[stage, tick])
            axes.text(*where, number, ha="center", va="center", fontsize=points, color=ink)
    axes.invert_yaxis()
    names = [f"stage {stage}" for stage in range(schedule.stages)]
    axes.set_yticks(np.arange(schedule.stages) + 0.5, names)
    axes.set_title(
        f"{schedule.name}: {_count(schedule.stages, 'stage')}, "
        f"{_count(schedule.micro_batches, 'micro-batch', 'es')}, {_count(schedule.chunks, 'chunk')}"
        f" a stage, {schedule.ticks} ticks\n{np.mean(operation == 0):.1%} of the cells are idle; "
        f"bubble {bubble(schedule):.1%}: time between a stage's operations, over its work"
        + NOTES.get(schedule.name, "")
    )
    for label, color in legend([schedule]).items():
        axes.plot([], [], "s", color=color, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0), ncols=5, fontsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)


def legend(schedules: Sequence[Schedule]) -> dict[str, Any]:
    """The colours of schedules' cells, by meaning."""
    kinds: dict[str, Any] = {"forward": COLORS[F]}
    if not all(each.splits for each in schedules):
        kinds["backward"] = COLORS[B]
    if any(each.splits for each in schedules):
        kinds |= {"gradient of input": COLORS[B], "gradient of weights": COLORS[W]}
    if (chunks := max(each.chunks for each in schedules)) > 1:
        kinds["darker: a later chunk"] = shade(COLORS[F], chunks - 1, chunks)
    return kinds | {"idle": IDLE}


def _shades(schedule: Schedule) -> np.ndarray:
    """Colours `[stages, ticks, RGBA]` by operation, darker for later chunks; idle is pale grey."""
    operation, _, chunk = np.moveaxis(schedule.table.swapaxes(0, 1), -1, 0)
    shades = np.full((len(COLORS) + 1, schedule.chunks, 4), IDLE)
    for row, color in enumerate(COLORS.values(), start=1):
        for k in range(schedule.chunks):
            shades[row, k] = [*shade(color, k, schedule.chunks), 1]
    return shades[operation, chunk]


def shade(color: str, chunk: int, chunks: int) -> np.ndarray:
    """The colour of a chunk; the last chunk's is half as bright as the first's."""
    return _rgb(color) * (1 - 0.5 * chunk / max(1, chunks - 1))


def _rgb(color: str) -> np.ndarray:
    return np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def _draw_held(axes: Any, schedule: Schedule) -> None:
    counts = held(schedule) / schedule.chunks
    ends = {0, schedule.stages - 1}
    for stage in range(schedule.stages):
        label = f"stage {stage}" if schedule.stages <= 8 or stage in ends else None
        axes.stairs(
            counts[:, stage],
            color=_of_stage(stage, schedule.stages),
            label=label,
            baseline=None,
            linewidth=1.4,
        )
    axes.set(xlim=(0, schedule.ticks), xlabel="tick", ylabel="micro-batches held")
    axes.set_ylim(0, float(np.max(counts)) * 1.08)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid()
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.25), ncols=8, fontsize=8)


def _of_stage(stage: int, stages: int) -> np.ndarray:
    """The colour of a stage; those of four stages are `ENDS`."""
    place = stage / max(1, stages - 1) * (len(ENDS) - 1)
    rgb = np.array([_rgb(color) for color in ENDS]).T
    return np.array([np.interp(place, range(len(ENDS)), part) for part in rgb])


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


# ---- trace --------------------------------------------------------------------------------------

UNIT = 1000.0  # microseconds in the trace per unit of a duration


def as_trace(schedule: Schedule, durations: Durations = EQUAL) -> dict[str, Any]:
    """The simulated step as a Chrome trace; its JSON can be opened in ui.perfetto.dev.

    It contains a thread per stage, an event per operation, and a counter of the micro-batches that
    each stage holds.
    """
    names = [_meta("process_name", 0, {"name": f"{schedule.name}, simulated"})]
    for stage in range(schedule.stages):
        names.append(_meta("thread_name", stage, {"name": f"stage {stage}"}))
        names.append(_meta("thread_sort_index", stage, {"sort_index": stage}))
    events = [*_operations(schedule, durations), *_counters(schedule, durations)]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _meta(name: str, stage: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": stage, "args": args}


def _operations(schedule: Schedule, durations: Durations) -> Iterator[dict[str, Any]]:
    timing = simulate(schedule, durations)
    for tick, stage, operation, i, chunk in schedule.operations():
        start, end = timing.start[tick, stage], timing.end[tick, stage]
        yield {
            "name": cell_text(schedule, (operation, i, chunk)),
            "cat": operation.name,
            "ph": "X",
            "pid": 0,
            "tid": stage,
            "ts": start * UNIT,
            "dur": (end - start) * UNIT,
            "args": {
                "micro_batch": i,
                "chunk": chunk,
                "part": schedule.part(stage, chunk),
                "tick": tick,
            },
        }


def _counters(schedule: Schedule, durations: Durations) -> Iterator[dict[str, Any]]:
    """Counts up at the start of F, and down at the end of B, or of W if backward is split."""
    timing, last = simulate(schedule, durations), W if schedule.splits else B
    count = [0] * schedule.stages
    for tick, stage, operation, _, _ in schedule.operations():
        if operation not in (F, last):
            continue
        count[stage] += 1 if operation == F else -1
        when = (timing.start if operation == F else timing.end)[tick, stage]
        yield {
            "name": f"held by stage {stage}",
            "ph": "C",
            "pid": 0,
            "ts": when * UNIT,
            "args": {"micro-batches": count[stage] / schedule.chunks},
        }


# ---- files --------------------------------------------------------------------------------------


def write(files: Mapping[Path, bytes]) -> None:
    """Writes all files, or none if one of them cannot be written.

    Raises:
        UserError: a file cannot be written.
    """
    remedy = "name a file in a folder that exists"
    write_whole(files, lambda path: explained(f"cannot write {path}", remedy))
