"""Pictures of products on a grid: the blocks of each step, and the bytes that a layer sends.

`python -m benchmarks.grid.pictures [--out docs/pictures]` writes them, with the same bytes each
time. Needs matplotlib (the viz extra).

Letters: A B = C, in q x q blocks; i, j a device's row and column; k the panel of a step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.grid import break_even as even
from benchmarks.lib.svg import command
from jaxptd.errors import run_command
from jaxptd.plot.colors import COLORS, DARK, FILLS, INK
from jaxptd.plot.style import CARD, save

Q = 3
HIDDEN = 4096  # D of the costs that are drawn; only the norms depend on it


def draw(directory: Path) -> None:
    """Writes all pictures."""
    save(PICTURES, directory, CARD)


# ---- steps of a product -------------------------------------------------------------------------


def panel(algorithm: str, i: int, j: int, step: int) -> int:
    """The panel k that device (i, j) of a q x q grid multiplies at a step."""
    return {"fox": i + step, "cannon": i + j + step, "summa": step}[algorithm] % Q


def source(algorithm: str, i: int, j: int, step: int) -> bool:
    """True if device (i, j) uses its local block of A, which a broadcast then sends."""
    return panel(algorithm, i, j, step) == j


def fox() -> Figure:
    """Draws Fox: A is broadcast along rows, B moves one up at each step."""
    figure = Figure(figsize=(9.6, 4.1), layout="constrained")
    for step, axes in enumerate(figure.subplots(1, Q)):
        _grid(axes, "fox", step)
        _rings(axes, up=step > 0, left=False)
        for i in range(Q):
            _along_row(axes, i, panel("fox", i, 0, step))
        moved = "B moved one up" if step else "B not moved"
        axes.set_xlabel(f"A from the bold device along its row,\n{moved}")
    return figure


def cannon() -> Figure:
    """Draws Cannon: both are skewed once; then A moves one to the left, B one up at each step."""
    figure = Figure(figsize=(9.6, 4.1), layout="constrained")
    for step, axes in enumerate(figure.subplots(1, Q)):
        _grid(axes, "cannon", step)
        _rings(axes, up=step > 0, left=step > 0)
        first = "skewed: row i of A by i to the left,\ncolumn j of B by j up"
        axes.set_xlabel("A moved one to the left,\nB one up" if step else first)
    return figure


def summa_and_gather() -> Figure:
    """One step of each."""
    figure = Figure(figsize=(7.4, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _grid(left, "summa", 1)
    left.set(title="summa, step 1 of 0, 1, 2")
    left.set_xlabel("A's column 1 along rows,\nB's row 1 along columns")
    for n in range(Q):
        _along_row(left, n, 1)
        _along_column(left, n, 1)
    _frame(right, "gather, in one slice")
    for i, j in np.ndindex(Q, Q):
        _device(right, i, j, FILLS[3], f"A{i}0 A{i}1 A{i}2", f"B0{j} B1{j} B2{j}")
    right.set_xlabel("all of A's row i and of B's column j,\none product")
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
            place = j + 0.05, i + 0.05
            axes.add_patch(Rectangle(place, 0.9, 0.9, fill=False, edgecolor=COLORS[k], lw=2.5))


def _device(axes: Axes, i: int, j: int, fill: str, a: str, b: str) -> None:
    axes.add_patch(Rectangle((j + 0.05, i + 0.05), 0.9, 0.9, facecolor=fill, edgecolor=INK, lw=1))
    style: dict[str, Any] = {"ha": "center", "va": "center"}
    size = 8 if len(a) > 3 else 11
    axes.text(j + 0.53, i + 0.36, a, fontsize=size, **style)
    axes.text(j + 0.53, i + 0.6, b, fontsize=size, **style)
    axes.text(j + 0.53, i + 0.84, f"adds to C{i}{j}", fontsize=7, color=INK, **style)


def _along_row(axes: Axes, i: int, source: int) -> None:
    """Draws arrows from device (i, source) to the ends of its row, above the names of blocks."""
    for end in {0, Q - 1} - {source}:
        _arrow(axes, (source + 0.5, i + 0.17), (end + 0.5, i + 0.17))


def _along_column(axes: Axes, j: int, source: int) -> None:
    """Draws arrows from device (source, j) to the ends of its column, beside the blocks' names."""
    for end in {0, Q - 1} - {source}:
        _arrow(axes, (j + 0.13, source + 0.5), (j + 0.13, end + 0.5))


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "->", "color": DARK, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)


def _rings(axes: Axes, *, up: bool, left: bool) -> None:
    """Draws arrows outside the grid in the direction in which blocks moved before this step."""
    for n in range(Q):
        if up:
            _arrow(axes, (n + 0.5, 0), (n + 0.5, -0.3))
        if left:
            _arrow(axes, (0, n + 0.5), (-0.3, n + 0.5))


# ---- cost ---------------------------------------------------------------------------------------


def break_even() -> Figure:
    """Draws the bytes that a device sends a layer, over M / D; and the bytes it keeps, over N."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    sent, kept = figure.subplots(1, 2)
    ratio = np.geomspace(0.25, 128, 64)
    for (rows, cols), color in zip(((2, 2), (4, 4), (8, 8)), COLORS, strict=False):
        line, grid = even.one_way(rows * cols, HIDDEN), even.on_grid(rows, cols, HIDDEN)
        each = [grid.at(x * HIDDEN) / (x * HIDDEN**2) for x in ratio]
        name = f"{rows} x {cols}"
        sent.plot(ratio, each, color=color, label=f"grid of {name}")
        sent.axhline(line.each / HIDDEN, color=color, ls="--", lw=1, label=f"1D, {rows * cols}")
        if span := even.cheaper(rows, cols, HIDDEN):
            sent.plot(span[0] / HIDDEN, line.each / HIDDEN, "o", color=color, markersize=5)
    sent.set(xscale="log", ylim=(0, 40), title="bytes sent a layer / (M D)")
    sent.set_xlabel("tokens of a micro-batch / hidden size, M / D")
    sent.set_xticks([0.25, 1, 4, 16, 64], ["1/4", "1", "4", "16", "64"])
    devices = np.array([4, 8, 16, 32, 64])
    for name, keep, remat, color in (
        ("1D, remat: none", even.kept_one_way, "none", COLORS[1]),
        ("grid, remat: none", even.kept_on_grid, "none", COLORS[0]),
        ("both, remat: dots", even.kept_on_grid, "dots", COLORS[2]),
    ):
        values = [keep(n, remat=remat) for n in devices]
        kept.plot(devices, values, marker="o", markersize=4, color=color, label=name)
    kept.set(xscale="log", ylim=(0, 12), title="bytes kept a layer / (M D)", xlabel="devices, N")
    kept.set_xticks(devices, [str(n) for n in devices])
    for axes in (sent, kept):
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right", fontsize=9)
    return figure


PICTURES = {
    "grid_fox.svg": fox,
    "grid_cannon.svg": cannon,
    "grid_summa_gather.svg": summa_and_gather,
    "grid_break_even.svg": break_even,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the pictures of docs/grid.md."""
    return command(draw, "grid.pictures", main.__doc__, argv)


if __name__ == "__main__":
    run_command(main)
