"""Draws the times of a step's parts as bars. Needs the viz extra."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxptd.analysis import svg
from jaxptd.analysis.hlo.kernels import KINDS
from jaxptd.analysis.profiling.step_parts import SCOPES, Times

COLORS = dict(zip(KINDS, ("#2b6cb0", "#63b3ed", "#f6ad55", "#c05621"), strict=True))
STYLE = {"font.size": 9}


def draw(path: Path, panels: Mapping[str, Times], label: str) -> None:
    """Writes `picture` to an SVG file."""
    svg.save({path.name: partial(picture, panels, label)}, path.parent, STYLE)


def picture(panels: Mapping[str, Times], label: str) -> Figure:
    """A panel for each step, with a bar for each scope and a color for each kind of kernel.

    Args:
        panels: titles -> times.
        label: of the horizontal axis.
    """
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, times) in zip(every, panels.items(), strict=True):
        _panel(axes, times)
        axes.set_title(f"{title}: {1e3 * sum(times.values()):.3g} ms", fontsize=10, loc="left")
        axes.set_xlabel(label)
    handles, names = every[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _panel(axes: Axes, times: Times) -> None:
    left = np.zeros(len(SCOPES))
    for kind in KINDS:
        widths = np.array([1e3 * times.get((scope, kind), 0.0) for scope in SCOPES])
        if kind == KINDS[-1] and not widths.any():
            continue
        axes.barh(SCOPES, widths, left=left, color=COLORS[kind], ec="white", lw=0.5, label=kind)
        left += widths
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
