"""Draws the loss of runs over their steps."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.figure import Figure

from jaxptd.errors import UserError
from jaxptd.fields import checked
from jaxptd.plot.colors import COLORS
from jaxptd.plot.style import new_picture, styled

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
    found = {name: getattr(run, "metrics", run) for name, run in runs.items()}
    for name, columns in found.items():
        _check_columns(name, columns)
    return found


def _check_columns(name: str, columns: Any) -> None:
    where = f" in {name}" if name else ""
    if not isinstance(columns, Mapping):
        found = type(columns).__name__
        raise UserError(
            f"jaxptd.plot.loss: {name} is of type {found}; expected a run, or its metrics"
        )
    if not len(columns.get("loss", ())):
        raise UserError(f"no loss was logged{where}; see log_every")
    lengths = {column: len(columns.get(column, ())) for column in ("step", "loss")}
    if len({*lengths.values()}) > 1:
        raise UserError(f"columns{where} are of {lengths} values; use the metrics of a run")


def _colors() -> list[str]:
    return [*COLORS] * 8
