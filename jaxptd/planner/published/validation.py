"""Holds predictions against published rows: errors, a baseline, and the bars they must meet."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxptd.hardware import Accelerator
from jaxptd.planner.published.fit import SHARES, fitted
from jaxptd.planner.published.rows import Row

WORST, MEAN = 0.06, 0.025  # of table 1, each row and on average
# Of rows that no fit has seen, by accelerator; of one without a fitted share `DATA_SHEET`.
BARS: Mapping[str, float] = {"a100": 0.07, "h100": 0.08}
DATA_SHEET = 0.12


class Measured(Protocol):
    """A step that was timed: a row's, or a run's."""

    @property
    def name(self) -> str:
        """Its name, for a person."""

    @property
    def program(self) -> str:
        """The program that ran."""

    @property
    def hardware(self) -> str:
        """Its accelerator's name."""

    @property
    def gpus(self) -> int:
        """Its devices."""

    @property
    def seconds(self) -> float:
        """Its time."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One measured step and its prediction.

    Args:
        row: as measured.
        seconds: predicted.
        bar: the largest error allowed, as a share.
    """

    row: Measured
    seconds: float
    bar: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.seconds / self.row.seconds - 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.row.name,
            "program": self.row.program,
            "hardware": self.row.hardware,
            "gpus": self.row.gpus,
            "measured": self.row.seconds,
            "predicted": self.seconds,
            "error": self.error,
            "bar": self.bar,
        }


@dataclasses.dataclass(frozen=True)
class Validation:
    """Predictions of several rows.

    Args:
        title: says how the predictions were made.
        outcomes: of the rows, in their order.
        mean_bar: the largest mean error allowed; None: any.
        baseline: errors of a constant TFLOP/s, of each row; empty: not asked.
        shares: of the fit to all rows; empty: there was none.
    """

    title: str
    outcomes: tuple[Outcome, ...]
    mean_bar: float | None = None
    baseline: tuple[float, ...] = ()
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean of the errors' sizes."""
        return float(np.mean([abs(each.error) for each in self.outcomes]))

    @property
    def worst(self) -> float:
        return max(abs(each.error) for each in self.outcomes)

    def missed(self) -> list[str]:
        """The bars that are missed, a sentence each."""
        found = [
            f"{each.row.name}: {abs(each.error):.1%} is above {each.bar:.1%}"
            for each in self.outcomes
            if abs(each.error) > each.bar
        ]
        if self.mean_bar is not None and self.mean > self.mean_bar:
            found.append(f"mean: {self.mean:.1%} is above {self.mean_bar:.1%}")
        if self.baseline and not self._beats_baseline():
            found.append("a constant TFLOP/s is as good")
        return found

    def _beats_baseline(self) -> bool:
        sizes = np.abs(self.baseline)
        return self.worst < sizes.max() and self.mean < sizes.mean()

    def as_dict(self) -> dict[str, Any]:
        sizes = np.abs(self.baseline) if self.baseline else None
        return {
            "title": self.title,
            "rows": [each.as_dict() for each in self.outcomes],
            "mean": self.mean,
            "worst": self.worst,
            "mean_bar": self.mean_bar,
            "baseline": None
            if sizes is None
            else {"mean": float(sizes.mean()), "worst": float(sizes.max())},
            "shares": dict(self.shares),
            "missed": self.missed(),
        }


def fitted_table(rows: Sequence[Row], accelerator: Accelerator, *, held_out: bool) -> Validation:
    """Fits the shares to rows of one accelerator and predicts the same rows.

    Args:
        rows: that ran on it.
        accelerator: its limits; its shares are not read.
        held_out: each row is predicted by a fit to the others.
    """
    whole = fitted(accelerator, rows)
    machines = [fitted(accelerator, others) if held_out else whole for others in _others(rows)]
    outcomes = tuple(
        Outcome(row, row.predict(machine).seconds, WORST)
        for row, machine in zip(rows, machines, strict=True)
    )
    how = "each row predicted by a fit to the others" if held_out else "a fit to all rows"
    shares = {name: float(getattr(whole, name)) for name in SHARES}
    return Validation(how, outcomes, MEAN, constant_rate(rows), shares)


def predicted_rows(rows: Sequence[Row], accelerators: Mapping[str, Accelerator]) -> Validation:
    """Predicts rows with the accelerators as they are: nothing is fitted."""
    outcomes = tuple(
        Outcome(
            row,
            row.predict(accelerators[row.hardware]).seconds,
            BARS.get(row.hardware, DATA_SHEET),
        )
        for row in rows
    )
    return Validation("predicted, nothing fitted to these rows", outcomes)


def constant_rate(rows: Sequence[Row]) -> tuple[float, ...]:
    """Errors of a constant TFLOP/s: of each row's own, predicted by the mean of the others."""
    rates = [row.flops / row.spread.gpus / row.seconds for row in rows]
    return tuple(
        float(np.mean(others)) / rate - 1
        for rate, others in zip(rates, _others(rates), strict=True)
    )


def _others(items: Sequence[Any]) -> list[list[Any]]:
    """For each item, the list without it."""
    return [[*items[:i], *items[i + 1 :]] for i in range(len(items))]
