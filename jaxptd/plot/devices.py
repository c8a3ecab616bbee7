"""Draws the devices of a mesh."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxptd.errors import UserError
from jaxptd.fields import checked
from jaxptd.layout import Layout
from jaxptd.plot.colors import COLORS, INK
from jaxptd.plot.style import new_picture, styled

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
