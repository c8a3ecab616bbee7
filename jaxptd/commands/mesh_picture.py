"""Draws a mesh as a picture. Needs matplotlib (the viz extra)."""

from typing import Any

import numpy as np

from jaxptd.layout import Layout

COLORS = ("#63a4e8", "#6cc08b", "#f2a65a", "#c792d9")  # of stages, in turn
INK = "#1a202c"
MOST = 4096  # devices; in a larger picture none could be told from the next
NUMBERS = 512  # the most devices of a picture with their ranks
LABELS = 32  # the most of an axis
CELL = 0.36, 0.32  # inches


def picture(layout: Layout) -> Any:
    """A matplotlib Figure: a column of boxes per stage, a row per dp and cp index.

    A box has the devices of tp, or of the grid, side by side, with their ranks.
    """
    from matplotlib.figure import Figure

    ranks = np.arange(layout.num_devices).reshape(layout.pp, layout.dp * layout.cp, -1)
    _, rows, width = ranks.shape
    across = max(layout.pp * width * CELL[0] + 2, 6)
    figure = Figure(figsize=(min(across, 40), min(rows * CELL[1] + 1.4, 40)), layout="constrained")
    axes = figure.subplots()
    for stage in range(layout.pp):
        _draw_stage(axes, ranks, stage)
    axes.set_xticks(_left(np.arange(layout.pp), width) + width / 2, _names("pp", layout.pp))
    every = -(-rows // LABELS)
    labels = [f"dp {d} cp {c}" for d, c in np.ndindex(layout.dp, layout.cp)]
    axes.set_yticks(np.arange(0, rows, every) + 0.5, labels[::every])
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    inside = f"row {layout.row} x col {layout.col}" if layout.has_grid else f"tp {layout.tp}"
    title = f"{layout.num_devices} devices: {layout}\nside by side in a box: {inside}"
    axes.set_title(title, loc="left", fontsize=9)
    return figure


def _left(stage: Any, width: int) -> Any:
    """Where a stage's box begins."""
    return stage * (width + 0.3)


def _draw_stage(axes: Any, ranks: np.ndarray, stage: int) -> None:
    """Draws the box of a stage; ranks `[pp, dp * cp, tp or grid]`."""
    left, block = _left(stage, ranks.shape[2]), ranks[stage]
    corners = np.arange(block.shape[1] + 1) + left, np.arange(block.shape[0] + 1)
    color = _one_color(COLORS[stage % len(COLORS)])
    axes.pcolormesh(*corners, np.zeros(block.shape), cmap=color, ec="white", lw=0.6)
    if ranks.size > NUMBERS:
        return
    for (row, column), rank in np.ndenumerate(block):
        place = left + column + 0.5, row + 0.5
        axes.text(*place, str(rank), ha="center", va="center", size=7, color=INK)


def _names(axis: str, size: int) -> list[str]:
    return [f"{axis} {i}" for i in range(size)]


def _one_color(color: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([color])
