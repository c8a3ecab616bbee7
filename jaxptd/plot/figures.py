"""Draws memory and communication per device, losses and loads over steps, a mesh, and a plan."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from jaxptd.errors import UserError
from jaxptd.fields import checked
from jaxptd.hardware import Accelerator, Cluster
from jaxptd.layout import BATCH_AXES, Axis, Layout, check_node
from jaxptd.plot import BLUE, COLORS, DARK, FILLS, INK
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
    """Draws the memory of a device: by formulas, as compiled, and as predicted for GPUs.

    Args:
        report: from `jaxptd.memory(config)`.
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
    """Draws the bytes that each device sends per step, by mesh axes and kind of collective.

    Args:
        report: from `jaxptd.comms(config)`; shows the collectives of its jaxpr, run as rings.

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
    _bars(figure.subplots(), [*axes_of], parts, label="bytes that each device sends per step")
    figure.suptitle(f"communication of a training step, {report.layout}", x=0.01, ha="left")
    return _with_legend(figure)


def _bars(axes: Axes, groups: Sequence[str], parts: Parts, *, label: str) -> None:
    """Draws a stacked bar per group, in a unit that fits."""
    most = max(np.sum([*parts.values()], axis=0), default=0)
    unit, size = next((pair for pair in UNITS if most >= pair[1]), ("bytes", 1.0))
    colors = dict(zip(parts, [*COLORS] * 4, strict=False))
    stacked(axes, groups, {name: np.divide(sizes, size) for name, sizes in parts.items()}, colors)
    axes.set_xlabel(label if unit == "bytes" else label.replace("bytes", unit, 1))


def stacked(
    axes: Axes, groups: Sequence[str], parts: Mapping[str, Any], colors: Mapping[str, str]
) -> None:
    """Draws a stacked bar per group, with a piece per part.

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


# ---- losses and loads over steps ----------------------------------------------------------------

Columns = Mapping[str, Sequence[float] | np.ndarray]
LOADS = "expert_load/"  # before the number of a layer, in names of columns
LOAD_COLORS = (FILLS[0], BLUE, DARK)  # of equal loads, and of unequal ones


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
    for (name, columns), color in zip(_named(runs).items(), [*COLORS] * 8, strict=False):
        step = np.asarray(columns["step"])
        label = f"{name}, training" if name else "training"
        axes.plot(step, columns["loss"], color=color, lw=1.5, label=label)
        names = [each for each in columns if each.partition("/")[0] == "validation_loss"]
        for each, marker in zip(names, "os^vD<>pP*" * len(names), strict=False):
            validation = np.asarray(columns[each], float)
            if (there := np.isfinite(validation)).any():
                points: dict[str, Any] = {"color": color, "ls": "", "marker": marker, "ms": 4}
                title = each.replace("validation_loss", "validation").replace("/", " ")
                axes.plot(step[there], validation[there], label=label[:-8] + title, **points)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid()
    axes.legend()
    return figure


@checked("jaxptd.plot.expert_load")
@styled
def expert_load(run: Run | Columns) -> Figure:
    """Draws how unequal the loads of experts are: a row per layer, steps from left to right.

    A color is the largest load of a layer's experts over their mean; 1 if all are equal. Rows of
    layers without experts are empty.

    Args:
        run: a run of a model with experts, or its columns of metrics.

    Raises:
        UserError: no loads were logged.
    """
    columns = run.metrics if isinstance(run, Run) else run
    found = {int(n.removeprefix(LOADS)): x for n, x in columns.items() if n.startswith(LOADS)}
    steps = np.asarray(columns.get("step", ()))
    if not found or not len(steps):
        raise UserError(
            "no loads of experts were logged; a run of a model with experts (model.moe) has them"
        )
    load_LS = np.full((max(found) + 1, len(steps)), np.nan)
    for layer, load_S in found.items():
        load_LS[layer] = load_S
    figure = new_picture(7, 1.6 + 0.25 * len(load_LS))
    axes = figure.subplots()
    # A step's color begins where the color of the step logged before it ends.
    edges = np.concatenate([[steps[0] - np.diff(steps[:2], prepend=0)[-1]], steps])
    drawn = axes.pcolormesh(
        edges,
        np.arange(len(load_LS) + 1) - 0.5,
        np.ma.masked_invalid(load_LS),
        cmap=LinearSegmentedColormap.from_list("load", LOAD_COLORS),
        vmin=1,
        vmax=max(float(np.nanmax(load_LS)), 1.1),
        rasterized=True,
    )
    figure.colorbar(drawn, ax=axes, label="largest load / mean")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="layer")
    axes.invert_yaxis()
    return figure


def _named(runs: Any) -> dict[str, Columns]:
    """The columns of each run by its name; a single run has no name."""
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
        raise UserError(f"no loss was logged{where}; check train.log_every")
    lengths = {column: len(columns.get(column, ())) for column in ("step", "loss")}
    if len({*lengths.values()}) > 1:
        raise UserError(f"columns{where} have {lengths} values; use the metrics of a run")


# ---- the devices of a mesh -----------------------------------------------------------------------

MOST = 4096  # devices; more would be indistinguishable
NUMBERED = 512  # devices up to which each is numbered


@checked("jaxptd.plot.mesh")
@styled
def mesh(layout: Layout, *, node: int | None = None) -> Figure:
    """Draws each device of a layout: a column of boxes per pipeline stage, a row per replica.

    A box holds the devices that share weight matrices, `tp` side by side or `row` x `col`. Each
    replica (`replicas`, `dp` and `ep`) has one color.

    Args:
        layout: the layout to draw.
        node: devices that NVLink joins; every other node is drawn paler. None draws all alike.

    Raises:
        UserError: there are too many devices, or `node` is not positive.
    """
    if node is not None:
        check_node(node)
    if layout.num_devices > MOST:
        raise UserError(f"layout ({layout}) has {layout.num_devices} devices; draw {MOST} or fewer")
    across = layout.col * layout.tp
    columns, rows = layout.pp * (across + 1), layout.batch_shards * (layout.row + 1)
    figure = new_picture(np.clip(0.5 * columns + 1.5, 6, 16), np.clip(0.45 * rows + 1, 2, 16))
    axes = figure.subplots()
    ranks = np.arange(layout.num_devices).reshape(tuple(layout.sizes.values()))
    shares = layout.sequence_shards
    ranks = ranks.reshape(layout.pp, layout.sample_shards, shares, layout.row, across)
    for pp, replica, share in np.ndindex(ranks.shape[:3]):
        place = pp * (across + 1), (replica * shares + share) * (layout.row + 1)
        _box(axes, ranks[pp, replica, share], place, COLORS[replica % len(COLORS)], node)
    axes.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6), aspect="equal")
    _label(axes, layout, across, f"; every other node of {node} is paler" if node else "")
    figure.suptitle(f"{layout.num_devices} devices: {layout}", x=0.01, ha="left")
    return figure


def _box(
    axes: Axes, block: np.ndarray, place: tuple[int, int], color: str, node: int | None
) -> None:
    """Draws the devices of one box, from its upper left corner; those of odd nodes are paler."""
    x, y = place
    height, width = block.shape
    corner = x - 0.1, y - 0.1
    axes.add_patch(Rectangle(corner, width + 0.2, height + 0.2, fill=False, edgecolor=INK, lw=0.8))
    for (i, j), rank in np.ndenumerate(block):
        alpha = 0.55 if node and rank // node % 2 else 1.0
        corner = x + j + 0.06, y + i + 0.06
        axes.add_patch(Rectangle(corner, 0.88, 0.88, color=color, lw=0, alpha=alpha))
        if rank < NUMBERED:
            where = x + j + 0.5, y + i + 0.5
            axes.text(*where, str(rank), ha="center", va="center", fontsize=8, color="white")


def _label(axes: Axes, layout: Layout, across: int, shades: str) -> None:
    """Labels stages below, and replicas and sequence shards on the left."""
    middle = (across + 1) * np.arange(layout.pp) + across / 2
    axes.set_xticks(middle, [f"pp {stage}" for stage in range(layout.pp)])
    shown = [axis for axis in BATCH_AXES if axis is Axis.DP or layout.sizes[axis] > 1]
    lines = [
        " ".join(f"{axis} {i}" for axis, i in zip(shown, index, strict=True))
        for index in np.ndindex(*(layout.sizes[axis] for axis in shown))
    ]
    axes.set_yticks((layout.row + 1) * np.arange(len(lines)) + layout.row / 2, lines)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    inside = f"row {layout.row} x col {layout.col}" if layout.has_grid else f"tp {layout.tp}"
    axes.set_xlabel(f"in each box: {inside}{shades}")


# ---- the best layouts of a plan ------------------------------------------------------------------

OTHERS = "others"
LINKS = ("HBM", "NVLink", "network", "host")  # the limits of memory-bound and communication parts
LABELLED = 0.04  # share of a step from which the longest dot of a kind, or of a link, is labeled
DOT, SMALL = 1500.0, 12.0  # area in points^2 of a dot for the whole step; of the smallest dots
Amounts = Mapping[str, Sequence[float]]  # name of a part -> its amount in each layout


@runtime_checkable
class Plan(Protocol):
    """The parts of a plan by `jaxptd.plan` that a picture needs."""

    @property
    def title(self) -> str: ...
    @property
    def config(self) -> Any: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def limit(self) -> float: ...
    @property
    def best(self) -> Sequence[Any]: ...


@checked("jaxptd.plot.plan")
@styled
def plan(planned: Plan) -> Figure:
    """Draws the best layouts of a plan: seconds and GiB by kind, and a roofline of the best.

    Each dot of the roofline is a part of the step, and its area is the part's time. Parts without
    FLOPs are on the left, under the memory or link that limits them; triangles at an edge lie
    beyond it.

    Args:
        planned: from `jaxptd.plan(config, gpus=..., gpu=...)`.
    """
    figure = new_picture(8.4, 7.6)
    heights = (1 + 0.12 * len(planned.best), 1.6)
    halves: Any = figure.subfigures(2, 1, height_ratios=heights)
    above, below = halves
    time, memory = above.subplots(1, 2)
    moved, computed = below.subplots(1, 2, width_ratios=(1, 2.2))
    names = [_name(number, each) for number, each in enumerate(planned.best, 1)]
    kinds, colors = _parts([_by_kind(each.step.terms) for each in planned.best])
    stacked(time, names, kinds, colors)
    time.set(title="time of a step by kind", xlabel="seconds")
    _memory(memory, names, planned)
    for axes in (time, memory):
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.22), ncols=3, fontsize=8)
    terms = [term for term in planned.best[0].step.terms if term.seconds > 0]
    _moved(moved, [term for term in terms if not term.flops and term.bytes], planned, colors)
    _computed(computed, [term for term in terms if term.flops], planned, colors)
    figure.suptitle(f"plan for {planned.title}", x=0.01, ha="left")
    return figure


def _name(number: int, candidate: Any) -> str:
    """The number of a layout and the sizes of its axes."""
    sizes = [f"{axis}={n}" for axis, n in candidate.config.layout.sizes.items() if n > 1]
    return f"{number}: {' '.join(sizes) or 'one device'}"


def _kind(term: Any) -> str:
    """The kind of a part of the time; collectives over dp and other axes count as one kind."""
    kind: str = term.kind
    return "dp" if "dp" in kind.split("+") else kind


def _by_kind(terms: Sequence[Any]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for term in terms:
        seconds[_kind(term)] = seconds.get(_kind(term), 0.0) + term.seconds
    return seconds


def _parts(layouts: Sequence[Mapping[str, float]]) -> tuple[Amounts, dict[str, str]]:
    """The amounts of each part, largest first and small ones merged; and their colors."""
    whole: dict[str, float] = {}
    for each in layouts:
        for name, amount in each.items():
            whole[name] = whole.get(name, 0.0) + amount
    order = sorted(whole, key=lambda name: -whole[name])
    few = len(COLORS) if len(order) <= len(COLORS) else len(COLORS) - 1
    kept, rest = order[:few], order[few:]
    parts = {name: [each.get(name, 0.0) for each in layouts] for name in kept}
    if rest:
        parts[OTHERS] = [sum(each.get(name, 0.0) for name in rest) for each in layouts]
    colors = dict(zip(kept, COLORS, strict=False)) | dict.fromkeys((*rest, OTHERS), INK)
    return parts, colors


def _memory(axes: Axes, names: Sequence[str], planned: Plan) -> None:
    parts, colors = _parts([each.memory.parts for each in planned.best])
    in_gib = {name: np.divide(sizes, 2**30) for name, sizes in parts.items()}
    stacked(axes, names, in_gib, colors)
    axes.axvline(planned.limit / 2**30, color=INK, ls="--", lw=1.5, label="limit")
    axes.tick_params(labelleft=False)  # same layouts as in the panel next to it
    axes.set(title="memory of a device by kind", xlabel="GiB")


def _moved(axes: Axes, terms: Sequence[Any], planned: Plan, colors: Mapping[str, str]) -> None:
    """Draws the rates of parts without FLOPs, next to what limits them."""
    limits = _limits(planned.cluster.accelerator)
    used = [link for link in LINKS if any(term.resource == link for term in terms)]
    for place, link in enumerate(used):
        axes.plot([place - 0.4, place + 0.4], [limits[link] / 1e9] * 2, color=INK, lw=1.5)
    highest = 2 * max((limits[link] for link in used), default=1.0) / 1e9
    lowest = highest / 1e4
    for term in terms:
        rate = float(np.clip(term.rate / 1e9, lowest, highest))
        dot = (used.index(term.resource), rate)
        marker = "^" if rate == highest else "v" if rate == lowest else "o"
        _dot(axes, dot, term, planned, color=colors[_kind(term)], marker=marker)
    for place, link in enumerate(used):
        longest = _longest([term for term in terms if term.resource == link], planned)
        if longest:
            side, x = ("right", -10) if place else ("left", 10)
            dot = (place, longest.rate / 1e9)
            _annotate(axes, longest, dot, ha=side, va="center", xytext=(x, 0))
    axes.set_yscale("log")
    _plain(axes.yaxis, subs=(1,))
    axes.set(title="parts without FLOPs", ylabel="GB/s", ylim=(lowest / 1.5, highest * 1.5))
    axes.set_xticks(range(len(used)), used)
    axes.set_xlim(-0.6, max(len(used), 1) - 0.4)
    axes.grid(axis="y")


def _limits(a: Accelerator) -> dict[str, float]:
    """Bytes/s of the memory and of the links."""
    rates = (a.hbm_bandwidth, a.nvlink_bandwidth, a.network_bandwidth, a.host_bandwidth)
    return dict(zip(LINKS, rates, strict=True))


def _computed(axes: Axes, terms: Sequence[Any], planned: Plan, colors: Mapping[str, str]) -> None:
    """Draws the roof, and the rates of parts with FLOPs below it."""
    a = planned.cluster.accelerator
    peak = a.fp8_flops if planned.best[0].config.model.products == "fp8" else a.bf16_flops
    ridge = peak / a.hbm_bandwidth
    intensities = [term.flops / term.bytes for term in terms if term.bytes]
    left, right = min([ridge, *intensities]) / 4, max([ridge, *intensities]) * 4
    x = np.geomspace(left, right, 100)
    for products, memory, line in ((1, 1, "-"), (a.products_share, a.hbm_share, "--")):
        roof = np.minimum(peak * products, x * a.hbm_bandwidth * memory) / 1e12
        axes.plot(x, roof, color=INK, lw=1.5, ls=line)
    places = {term: _place(term, right / 1.3) for term in terms}
    for term, place in places.items():
        marker = "o" if term.bytes else ">"
        _dot(axes, place, term, planned, color=colors[_kind(term)], marker=marker)
    for kind in {_kind(term): 0 for term in terms}:
        longest = _longest([term for term in terms if _kind(term) == kind], planned)
        if longest:
            above = {"ha": "center", "va": "bottom", "xytext": (0, 13)}
            below = {"ha": "right", "va": "top", "xytext": (0, -10)}  # at the right edge
            _annotate(axes, longest, places[longest], **(above if longest.bytes else below))
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.set(title="roofline of layout 1", xlabel="FLOP per byte of HBM", ylabel="TFLOP/s")
    _plain(axes.xaxis, subs=(1,))
    _plain(axes.yaxis, subs=(1, 2, 5))
    axes.grid()


def _place(term: Any, edge: float) -> tuple[float, float]:
    """FLOP per byte, and TFLOP/s; parts whose bytes are not counted are at the edge."""
    x = term.flops / term.bytes if term.bytes else edge
    return x, term.flops / term.seconds / 1e12


def _dot(axes: Axes, place: tuple[float, float], term: Any, planned: Plan, **style: Any) -> None:
    size = max(SMALL, DOT * term.seconds / planned.best[0].step.seconds)
    axes.scatter(*place, s=size, alpha=0.75, linewidths=0, zorder=3, **style)


def _longest(terms: Sequence[Any], planned: Plan) -> Any:
    """The longest of some parts; None if it is too short for a label."""
    longest = max(terms, key=lambda term: term.seconds)
    return longest if longest.seconds >= LABELLED * planned.best[0].step.seconds else None


def _annotate(axes: Axes, term: Any, place: tuple[float, float], **style: Any) -> None:
    name = term.name.replace(", ", ",\n")  # two short lines fit next to a dot
    axes.annotate(name, place, textcoords="offset points", fontsize=8, **style)


def _plain(axis: Any, subs: tuple[int, ...]) -> None:
    """Gives a logarithmic axis plain numbers, at these multiples of powers of ten."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
