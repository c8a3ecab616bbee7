"""Draws the loss of runs over their steps."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure

from jaxptd.errors import UserError
from jaxptd.plot.colors import COLORS
from jaxptd.plot.style import new_picture, styled

Columns = Mapping[str, Sequence[float] | np.ndarray]


class HasMetrics(Protocol):
    """A `Run`."""

    @property
    def metrics(self) -> Columns: ...


@styled
def loss(runs: HasMetrics | Columns | Mapping[str, HasMetrics | Columns]) -> Figure:
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
    found = {name: getattr(run, "metrics", run) for name, run in runs.items()}
    for name, columns in found.items():
        if not len(columns.get("loss", ())):
            raise UserError(f"no loss was logged{f' in {name}' if name else ''}; see log_every")
    return found


def _colors() -> list[str]:
    return [*COLORS] * 8
