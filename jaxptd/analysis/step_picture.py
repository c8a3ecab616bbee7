"""Draws the times of a step's parts as bars. Needs the viz extra."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxptd.analysis.hlo.kernels import COLLECTIVE, HOST, KINDS
from jaxptd.analysis.profiling import SCOPES, ProfileReport, Times
from jaxptd.fields import checked
from jaxptd.plot import BLUE, INK, ORANGE, PINK, PURPLE, SKY
from jaxptd.plot.style import PAGE, new_picture, styled

COLORS = dict(zip(KINDS, (BLUE, SKY, PURPLE, ORANGE, PINK), strict=True))


@checked("jaxptd.plot.step_time")
def step_time(report: ProfileReport) -> Figure:
    """Draws where a step's time goes.

    Args:
        report: the result of `jaxptd.profile(config)`.
    """
    return picture({report.title: report.times}, "ms per step, measured")


@styled
def picture(panels: Mapping[str, Times], label: str) -> Figure:
    """Draws a panel per step, with a bar per scope and a color per kind of kernel.

    Args:
        panels: titles -> times.
        label: text on the horizontal axis.
    """
    figure = new_picture(PAGE, 3.4)
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, times) in zip(every, panels.items(), strict=True):
        _panel(axes, times)
        axes.set_title(f"{title}:\n{1e3 * sum(times.values()):.3g} ms")
        axes.set_xlabel(label)
    handles, names = every[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(handles), fontsize=8)
    return figure


def _panel(axes: Axes, times: Times) -> None:
    left = np.zeros(len(SCOPES))
    for kind in KINDS:
        widths = np.array([1e3 * times.get((scope, kind), 0.0) for scope in SCOPES])
        if kind in (COLLECTIVE, HOST) and not widths.any():
            continue
        axes.barh(SCOPES, widths, left=left, color=COLORS[kind], ec=INK, lw=0.5, label=kind)
        left += widths
    axes.invert_yaxis()
