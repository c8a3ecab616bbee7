"""Pictures of pipeline schedules: their tables on one time scale, and their costs.

Letters: p stages, m micro-batches; F, B, W as `jaxptd/pipeline/table.py` has them, 1 each.
"""

from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxptd.pipeline import picture
from jaxptd.pipeline.schedules import SCHEDULES, Schedule, make_schedule
from jaxptd.pipeline.statistics import bubble, peak, simulate
from jaxptd.plot import BLUE, GREEN, ORANGE, PINK, PURPLE
from jaxptd.plot.style import INK, PAGE

STAGES, MICRO_BATCHES = 4, 8
DEEP = 8  # stages for the costs drawn
LINES = (BLUE, ORANGE, GREEN, PURPLE, PINK, INK)
EDGE = (0.5, 0.5, 0.5, 0.5)
MARKS = ("o", "s", "^", "v", "D", "x")
WIDTHS = (6, 1.5, 1.5, 3.5, 1.5, 1)  # wide below narrow, where lines coincide


def schedules(stages: int = STAGES, micro_batches: int = MICRO_BATCHES) -> list[Schedule]:
    return [make_schedule(n, stages=stages, micro_batches=micro_batches) for n in SCHEDULES]


def in_time() -> Figure:
    """Draws every schedule over time, with F, B and W equally long; a whole backward is B + W."""
    found = schedules()
    figure = Figure(figsize=(PAGE, 8.6), layout="constrained")
    end = max(simulate(each).makespan for each in found)
    for axes, schedule in zip(figure.subplots(len(found), 1, sharex=True), found, strict=True):
        _strip(axes, schedule)
        held = f"holds {peak(schedule).max():g} micro-batches"
        time = f"time {simulate(schedule).makespan:g}, bubble {bubble(schedule):.1%}"
        axes.set_title(f"{schedule.name}: {time}, {held}", loc="left")
        axes.set_xlim(0, end)
    axes.set_xlabel("time: a forward of all layers of a stage takes 1, a whole backward 2")
    patches = [Patch(color=color, label=name) for name, color in picture.legend(found).items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _strip(axes: Axes, schedule: Schedule) -> None:
    """Draws a bar per operation and a line per stage."""
    timing = simulate(schedule)
    for tick, stage, operation, _, chunk in schedule.operations():
        start, end = timing.start[tick, stage], timing.end[tick, stage]
        color = picture.shade(picture.COLORS[operation], chunk, schedule.chunks)
        axes.barh(stage, end - start, left=start, height=0.9, color=color, ec=EDGE, lw=0.5)
    axes.set_yticks(range(schedule.stages), [f"stage {s}" for s in range(schedule.stages)])
    axes.invert_yaxis()
    axes.set_facecolor(picture.IDLE)
    for spine in axes.spines.values():
        spine.set_visible(False)


def cost() -> Figure:
    """Draws bubble and memory of each schedule over the number of micro-batches."""
    figure = Figure(figsize=(PAGE, 4), layout="constrained")
    bubbles, held = figure.subplots(1, 2)
    counts = DEEP * np.array([1, 2, 4, 8])
    for name, color, mark, wide in zip(SCHEDULES, LINES, MARKS, WIDTHS, strict=True):
        made = [make_schedule(name, stages=DEEP, micro_batches=int(m)) for m in counts]
        style: Any = {"color": color, "marker": mark, "markersize": 5, "lw": wide, "label": name}
        bubbles.plot(counts, [100 * bubble(each) for each in made], **style)
        held.plot(counts, [peak(each).max() for each in made], **style)
    bubbles.set(title=f"bubble, % of the work, {DEEP} stages")
    held.set(title="held by the busiest stage", ylim=(0, 34), ylabel="micro-batches")
    for axes in (bubbles, held):
        axes.set(xscale="log", xlabel="micro-batches of a step")
        axes.set_xticks(counts, [str(m) for m in counts])
        axes.minorticks_off()
        axes.grid()
    figure.legend(
        *held.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9
    )
    return figure


PICTURES = {
    **{f"pipeline_{each.name}.svg": partial(picture.figure, each) for each in schedules()},
    "pipeline_time.svg": in_time,
    "pipeline_cost.svg": cost,
}
