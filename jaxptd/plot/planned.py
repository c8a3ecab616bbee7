"""Draws the best layouts of a plan: their time, their memory, and a roofline of the best."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from jaxptd.fields import checked
from jaxptd.hardware import Accelerator, Cluster
from jaxptd.plot.colors import COLORS, INK
from jaxptd.plot.figures import stacked
from jaxptd.plot.style import new_picture, styled

OTHERS = "others"
LINKS = ("HBM", "NVLink", "network", "host")  # the limits of what only moves bytes
LABELLED = 0.04  # share of a step from which the longest dot of a kind, or of a link, has a name
DOT, SMALL = 1500.0, 12.0  # points^2 of a dot that takes the whole step; of the smallest dots
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
    """Draws the best layouts of a plan: seconds and GiB by their kind, and a roofline of the best.

    A dot of the roofline is a part of the step, and its area the part's time. Parts without FLOPs
    are on the left, by the memory or link that bounds them; triangles at an edge are beyond it.

    Args:
        planned: by `jaxptd.plan(config, gpus=..., gpu=...)`.
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
    """The kind of a part of the time; collectives over dp and other axes are one kind."""
    kind: str = term.kind
    return "dp" if "dp" in kind.split("+") else kind


def _by_kind(terms: Sequence[Any]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for term in terms:
        seconds[_kind(term)] = seconds.get(_kind(term), 0.0) + term.seconds
    return seconds


def _parts(layouts: Sequence[Mapping[str, float]]) -> tuple[Amounts, dict[str, str]]:
    """The amounts of each part, the largest first and the small ones as one; and their colors."""
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
    axes.tick_params(labelleft=False)  # the layouts are those of the panel beside it
    axes.set(title="memory of a device by kind", xlabel="GiB")


def _moved(axes: Axes, terms: Sequence[Any], planned: Plan, colors: Mapping[str, str]) -> None:
    """Draws the rates of parts without FLOPs, beside what limits them."""
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
            _label(axes, longest, dot, ha=side, va="center", xytext=(x, 0))
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
            _label(axes, longest, places[longest], **(above if longest.bytes else below))
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.set(title="roofline of layout 1", xlabel="FLOP a byte of HBM", ylabel="TFLOP/s")
    _plain(axes.xaxis, subs=(1,))
    _plain(axes.yaxis, subs=(1, 2, 5))
    axes.grid()


def _place(term: Any, edge: float) -> tuple[float, float]:
    """FLOPs for each byte, and TFLOP/s; a part whose bytes are not counted is at the edge."""
    x = term.flops / term.bytes if term.bytes else edge
    return x, term.flops / term.seconds / 1e12


def _dot(axes: Axes, place: tuple[float, float], term: Any, planned: Plan, **style: Any) -> None:
    size = max(SMALL, DOT * term.seconds / planned.best[0].step.seconds)
    axes.scatter(*place, s=size, alpha=0.75, linewidths=0, zorder=3, **style)


def _longest(terms: Sequence[Any], planned: Plan) -> Any:
    """The longest of some parts; None if it is too short for a name in the picture."""
    longest = max(terms, key=lambda term: term.seconds)
    return longest if longest.seconds >= LABELLED * planned.best[0].step.seconds else None


def _label(axes: Axes, term: Any, place: tuple[float, float], **style: Any) -> None:
    name = term.name.replace(", ", ",\n")  # two short lines fit beside a dot
    axes.annotate(name, place, textcoords="offset points", fontsize=8, **style)


def _plain(axis: Any, subs: tuple[int, ...]) -> None:
    """Gives a logarithmic axis plain numbers, at these multiples of powers of ten."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
