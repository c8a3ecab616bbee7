"""Draws bytes that a device holds and sends, losses over steps, and the devices of a mesh."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxptd.errors import UserError
from jaxptd.fields import checked
from jaxptd.layout import Layout
from jaxptd.plot.colors import COLORS, INK
from jaxptd.plot.style import new_picture, styled

# ---- bytes that a device holds and sends ---------------------------------------------------------

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


# ---- losses over steps ---------------------------------------------------------------------------

Columns = Mapping[str, Sequence[float] | np.ndarray]


@runtime_checkable
class Run(Protocol):
    """The part of a run that a picture needs."""

    @property
    def metrics(self) -> Columns: ...


@checked("jaxptd.plot.loss")
@styled
def loss(runs: Run | Columns | Mapping[str, Run | Columns]) -> Figure:
    """Draws the training loss of each run as a line, and its validation losses as points.

    Args:
        runs: a run, its columns of metrics, or several of them by name.

    Raises:
        UserError: nothing was logged.
    """
    figure = new_picture(7, 3.6)
    axes = figure.subplots()
    for (name, columns), color in zip(_named(runs).items(), _colors(), strict=False):
        step = np.asarray(columns["step"])
        label = f"{name}, training" if name else "training"
        axes.plot(step, columns["loss"], color=color, lw=1.5, label=label)
        validation = np.asarray(columns.get("validation_loss", np.full(len(step), np.nan)), float)
        if (there := np.isfinite(validation)).any():
            points: dict[str, Any] = {"color": color, "ls": "", "marker": "o", "ms": 4}
            axes.plot(step[there], validation[there], label=label[:-8] + "validation", **points)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid()
    axes.legend()
    return figure


def _named(runs: Any) -> dict[str, Columns]:
    """The columns of each run by its name; a single run has none."""
    if hasattr(runs, "metrics") or "step" in runs or not runs:
        runs = {"": runs}
    metrics = {name: getattr(run, "metrics", run) for name, run in runs.items()}
    for name, columns in metrics.items():
        _check_columns(name, columns)
    return metrics


def _check_columns(name: str, columns: Any) -> None:
    where = f" in {name}" if name else ""
    if not isinstance(columns, Mapping):
        kind = type(columns).__name__
        raise UserError(
            f"jaxptd.plot.loss: {name} is of type {kind}; expected a run, or its metrics"
        )
    if not len(columns.get("loss", ())):
        raise UserError(f"no loss was logged{where}; see log_every")
    lengths = {column: len(columns.get(column, ())) for column in ("step", "loss")}
    if len({*lengths.values()}) > 1:
        raise UserError(f"columns{where} are of {lengths} values; use the metrics of a run")


def _colors() -> list[str]:
    return [*COLORS] * 8


# ---- the devices of a mesh -----------------------------------------------------------------------

MOST = 4096  # devices; more could not be told apart
NUMBERED = 512  # devices up to which each has its number


@checked("jaxptd.plot.mesh")
@styled
def mesh(layout: Layout) -> Figure:
    """Draws each device of a layout: a column of boxes a pipeline stage, a row a replica.

    In a box are the devices that share weight matrices, `tp` side by side or `row` x `col`. A
    replica (`dp`) has one color.

    Raises:
        UserError: there are too many devices.
    """
    if layout.num_devices > MOST:
        raise UserError(f"layout ({layout}) has {layout.num_devices} devices; draw {MOST} or fewer")
    across = layout.col * layout.tp
    columns, rows = layout.pp * (across + 1), layout.dp * layout.cp * (layout.row + 1)
    figure = new_picture(np.clip(0.5 * columns + 1.5, 6, 16), np.clip(0.45 * rows + 1, 2, 16))
    axes = figure.subplots()
    ranks = np.arange(layout.num_devices).reshape(tuple(layout.sizes.values()))
    for pp, dp, cp in np.ndindex(layout.pp, layout.dp, layout.cp):
        place = pp * (across + 1), (dp * layout.cp + cp) * (layout.row + 1)
        block = ranks[pp, dp, cp].reshape(layout.row, across)
        _box(axes, block, place, COLORS[dp % len(COLORS)])
    axes.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6), aspect="equal")
    _label(axes, layout, across)
    figure.suptitle(f"{layout.num_devices} devices: {layout}", x=0.01, ha="left")
    return figure


def _box(axes: Axes, block: np.ndarray, place: tuple[int, int], color: str) -> None:
    """Draws the devices of one box, from its upper left corner."""
    x, y = place
    height, width = block.shape
    corner = x - 0.1, y - 0.1
    axes.add_patch(Rectangle(corner, width + 0.2, height + 0.2, fill=False, edgecolor=INK, lw=0.8))
    for (i, j), rank in np.ndenumerate(block):
        axes.add_patch(Rectangle((x + j + 0.06, y + i + 0.06), 0.88, 0.88, color=color, lw=0))
        if rank < NUMBERED:
            where = x + j + 0.5, y + i + 0.5
            axes.text(*where, str(rank), ha="center", va="center", fontsize=8, color="white")


def _label(axes: Axes, layout: Layout, across: int) -> None:
    """Names stages below, and replicas and pieces of a sequence on the left."""
    middle = (across + 1) * np.arange(layout.pp) + across / 2
    axes.set_xticks(middle, [f"pp {stage}" for stage in range(layout.pp)])
    lines = [
        f"dp {dp}" + (f" cp {cp}" if layout.cp > 1 else "")
        for dp, cp in np.ndindex(layout.dp, layout.cp)
    ]
    axes.set_yticks((layout.row + 1) * np.arange(len(lines)) + layout.row / 2, lines)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    inside = f"row {layout.row} x col {layout.col}" if layout.has_grid else f"tp {layout.tp}"
    axes.set_xlabel(f"in each box: {inside}")
