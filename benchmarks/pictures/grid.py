"""Pictures of matmuls on a grid: the blocks of each step, and the bytes that a layer sends.

Letters: A B = C, in q x q blocks; i, j a device's row and column; k the panel of a step.
"""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.grid import break_even as even
from jaxptd.plot import DARK, FILLS
from jaxptd.plot.style import COLORS, INK, PAGE

Q = 3
GAP = 0.03  # where arrows are, between devices
HIDDEN = 4096  # D for the costs drawn; only the norms depend on it


# ---- steps of a matmul --------------------------------------------------------------------------


def panel(algorithm: str, i: int, j: int, step: int) -> int:
    """The panel k that device (i, j) of a q x q grid multiplies at a step."""
    return {"fox": i + step, "cannon": i + j + step, "summa": step}[algorithm] % Q


def source(algorithm: str, i: int, j: int, step: int) -> bool:
    """True if device (i, j) uses its local block of A, which a broadcast then sends."""
    return panel(algorithm, i, j, step) == j


def fox() -> Figure:
    """Draws Fox: A is broadcast along rows, B moves one up at each step."""
    figure = Figure(figsize=(PAGE, 3.3), layout="constrained")
    for step, axes in enumerate(figure.subplots(1, Q)):
        _grid(axes, "fox", step)
        for n in range(Q):
            _along_row(axes, n, panel("fox", n, 0, step))
            if step:
                _up(axes, n)
        moved = "B moved one up" if step else "B not moved"
        axes.set_xlabel(f"A from the bold device\nalong its row, {moved}", fontsize=9)
    return figure


def cannon() -> Figure:
    """Draws Cannon: both are skewed once; then A moves one to the left, B one up at each step."""
    figure = Figure(figsize=(PAGE, 3.3), layout="constrained")
    for step, axes in enumerate(figure.subplots(1, Q)):
        _grid(axes, "cannon", step)
        for n in range(Q if step else 0):
            _up(axes, n)
            _left(axes, n)
        first = "skewed: A's row i by i to the left,\nB's column j by j up"
        axes.set_xlabel("A moved one to the left,\nB one up" if step else first, fontsize=9)
    return figure


def summa_and_gather() -> Figure:
    """Draws the steps of SUMMA, and the single step of a gather."""
    figure = Figure(figsize=(PAGE, 7.2), layout="constrained")
    *steps, gather = figure.subplots(2, 2).flat
    for step, axes in enumerate(steps):
        _grid(axes, "summa", step)
        axes.set(title=f"summa, step {step}")
        axes.set_xlabel(f"A's column {step} along rows,\nB's row {step} along columns")
        for n in range(Q):
            _along_row(axes, n, step)
            _along_column(axes, n, step)
    _frame(gather, "gather, in one slice")
    for i, j in np.ndindex(Q, Q):
        _device(gather, i, j, FILLS[3], f"A{i}0 A{i}1 A{i}2", f"B0{j} B1{j} B2{j}")
    for i, j in np.ndindex(Q, Q):
        _along_row(gather, i, j)
        _along_column(gather, j, i)
    gather.set_xlabel("every block of A to all of its row,\nof B to all of its column: one matmul")
    return figure


def _frame(axes: Axes, title: str) -> None:
    axes.set(xlim=(-0.34, Q), ylim=(Q, -0.34), aspect="equal", title=title)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _grid(axes: Axes, algorithm: str, step: int) -> None:
    """Draws the devices, coloured by k; bold are those whose local block of A is in use."""
    _frame(axes, f"step {step}")
    for i, j in np.ndindex(Q, Q):
        k = panel(algorithm, i, j, step)
        _device(axes, i, j, FILLS[k], f"A{i}{k}", f"B{k}{j}")
        if algorithm != "cannon" and source(algorithm, i, j, step):
            place = j + 0.1, i + 0.1
            axes.add_patch(Rectangle(place, 0.86, 0.86, fill=False, edgecolor=COLORS[k], lw=2.5))


def _device(axes: Axes, i: int, j: int, fill: str, a: str, b: str) -> None:
    axes.add_patch(Rectangle((j + 0.1, i + 0.1), 0.86, 0.86, facecolor=fill, edgecolor=INK, lw=1))
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": DARK}
    size = 7 if len(a) > 3 else 10
    axes.text(j + 0.53, i + 0.31, a, fontsize=size, **style)
    axes.text(j + 0.53, i + 0.56, b, fontsize=size, **style)
    axes.text(j + 0.53, i + 0.82, f"adds to C{i}{j}", fontsize=7, **style)


def _along_row(axes: Axes, i: int, source: int) -> None:
    """Draws arrows from device (i, source) to the ends of its row, above the devices."""
    for end in {0, Q - 1} - {source}:
        _arrow(axes, (source + 0.53, i + GAP), (end + 0.53, i + GAP))


def _along_column(axes: Axes, j: int, source: int) -> None:
    """Draws arrows from device (source, j) to the ends of its column, beside the devices."""
    for end in {0, Q - 1} - {source}:
        _arrow(axes, (j + GAP, source + 0.53), (j + GAP, end + 0.53))


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "->", "color": INK, "lw": 1.5, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)


def _up(axes: Axes, j: int) -> None:
    """Draws the ring along column j, whose blocks of B moved one up before this step."""
    _arrow(axes, (j + GAP, Q - 0.1), (j + GAP, -0.3))


def _left(axes: Axes, i: int) -> None:
    """Draws the ring along row i, whose blocks of A moved one to the left before this step."""
    _arrow(axes, (Q - 0.1, i + GAP), (-0.3, i + GAP))


# ---- cost ---------------------------------------------------------------------------------------


def break_even() -> Figure:
    """Draws the bytes that a device sends per layer, over M / D, and those it saves, over N."""
    figure = Figure(figsize=(PAGE, 4.4), layout="constrained")
    sent, kept = figure.subplots(1, 2)
    ratio = np.geomspace(0.25, 128, 64)
    for (rows, cols), color in zip(((2, 2), (4, 4), (8, 8)), COLORS, strict=False):
        line, grid = even.one_way(rows * cols, HIDDEN), even.on_grid(rows, cols, HIDDEN)
        each = [grid.at(x * HIDDEN) / (x * HIDDEN**2) for x in ratio]
        name = f"{rows} x {cols}"
        sent.plot(ratio, each, color=color, label=f"grid of {name}")
        sent.axhline(line.each / HIDDEN, color=color, ls="--", lw=1, label=f"1D on {rows * cols}")
        if span := even.cheaper(rows, cols, HIDDEN):
            sent.plot(span[0] / HIDDEN, line.each / HIDDEN, "o", color=color, markersize=5)
    sent.set(xscale="log", ylim=(0, 40), title="sent by a device per layer")
    sent.set_xlabel("tokens of a micro-batch / hidden size, M / D")
    sent.set_ylabel("bytes / (M D)")
    sent.set_xticks([0.25, 1, 4, 16, 64], ["1/4", "1", "4", "16", "64"])
    devices = np.array([4, 8, 16, 32, 64])
    for name, keep, remat, color in (
        ("1D, remat: none", even.kept_one_way, "none", COLORS[1]),
        ("grid, remat: none", even.kept_on_grid, "none", COLORS[0]),
        ("both, remat: dots", even.kept_on_grid, "dots", COLORS[2]),
    ):
        values = [keep(n, remat=remat) for n in devices]
        kept.plot(devices, values, marker="o", markersize=4, color=color, label=name)
    kept.set(xscale="log", ylim=(0, 12), title="saved by a device for backward")
    kept.set(xlabel="devices, N", ylabel="bytes per layer / (M D)")
    kept.set_xticks(devices, [str(n) for n in devices])
    for axes in (sent, kept):
        axes.minorticks_off()
        axes.grid()
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=9)
    return figure


PICTURES = {
    "grid_fox.svg": fox,
    "grid_cannon.svg": cannon,
    "grid_summa_gather.svg": summa_and_gather,
    "grid_break_even.svg": break_even,
}
