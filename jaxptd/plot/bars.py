"""Draws the bytes that a device holds, and the bytes that it sends, as bars."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxptd.errors import UserError
from jaxptd.fields import checked
from jaxptd.layout import Layout
from jaxptd.plot.colors import COLORS
from jaxptd.plot.style import new_picture, styled

GROUPS = ("published", "formula", "compiled", "model")
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
Parts = Mapping[str, Sequence[float]]  # name of a part -> its bytes in each bar


@runtime_checkable
class MemoryReport(Protocol):
    """The parts of `jaxptd.memory`'s report that a picture needs."""

    @property
    def layout(self) -> Layout: ...
    @property
    def rows(self) -> Sequence[Mapping[str, Any]]: ...


@runtime_checkable
class CommsReport(Protocol):
    """The parts of `jaxptd.comms`'s report that a picture needs."""

    @property
    def layout(self) -> Layout: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def jaxpr(self) -> Sequence[Any]: ...


@checked("jaxptd.plot.memory")
@styled
def memory(report: MemoryReport) -> Figure:
    """Draws what a device holds: by formulas, as compiled, and as the model predicts for GPUs.

    Args:
        report: of `jaxptd.memory(config)`.
    """
    whole = [row for row in report.rows if not row["part"].startswith((" ", "a layer"))]
    groups = [group for group in GROUPS if any(row.get(group) for row in whole)]
    parts = {
        row["part"].partition(":")[0]: [row.get(group) or 0 for group in groups] for row in whole
    }
    used = {name: sizes for name, sizes in parts.items() if any(sizes)}
    figure = new_picture(8, 3.4)
    _bars(figure.subplots(), groups, used, label="bytes of one device")
    figure.suptitle(f"memory of a training step, {report.layout}", x=0.01, ha="left")
    return _with_legend(figure)


@checked("jaxptd.plot.bytes_by_axis")
@styled
def bytes_by_axis(report: CommsReport) -> Figure:
    """Draws the bytes that each device sends in a step, by mesh axes and kind of collective.

    Args:
        report: of `jaxptd.comms(config)`; the collectives are those of its jaxpr, as rings.

    Raises:
        UserError: the step moves nothing.
    """
    axes_of = {" x ".join(each.axes): 0.0 for each in report.jaxpr}
    if not axes_of:
        raise UserError(f"a step on layout {report.layout} moves nothing; choose another layout")
    parts: dict[str, list[float]] = {each.kind: [0.0] * len(axes_of) for each in report.jaxpr}
    for each in report.jaxpr:
        parts[each.kind][[*axes_of].index(" x ".join(each.axes))] += each.wire_bytes(report.sizes)
    figure = new_picture(8, 1.8 + 0.4 * len(axes_of))
    _bars(figure.subplots(), [*axes_of], parts, label="bytes that each device sends a step")
    figure.suptitle(f"communication of a training step, {report.layout}", x=0.01, ha="left")
    return _with_legend(figure)


def _bars(axes: Axes, groups: Sequence[str], parts: Parts, *, label: str) -> None:
    """Draws a bar for each group, with a piece for each part, in a unit that fits."""
    most = max(np.sum([*parts.values()], axis=0), default=0)
    unit, size = next((pair for pair in UNITS if most >= pair[1]), ("bytes", 1.0))
    colors = dict(zip(parts, [*COLORS] * 4, strict=False))
    stacked(axes, groups, {name: np.divide(sizes, size) for name, sizes in parts.items()}, colors)
    axes.set_xlabel(label if unit == "bytes" else label.replace("bytes", unit, 1))


def stacked(
    axes: Axes, groups: Sequence[str], parts: Mapping[str, Any], colors: Mapping[str, str]
) -> None:
    """Draws a bar for each group, with a piece for each part.

    Args:
        axes: to draw on.
        groups: names of the bars, from the top.
        parts: lengths of each part, one for each group.
        colors: of the parts.
    """
    left = np.zeros(len(groups))
    for name, sizes in parts.items():
        widths = np.asarray(sizes, float)
        axes.barh(groups, widths, left=left, height=0.6, color=colors[name], label=name)
        left += widths
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _with_legend(figure: Figure) -> Figure:
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8)
    return figure
