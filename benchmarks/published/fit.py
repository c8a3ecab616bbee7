"""Published rows, and a small bounded fit to them: four shares of an accelerator's limits.

The shares are for matmuls, memory, NVLink and network. They minimise the squared logarithms of
predicted over measured seconds, in units of `ROW_ERROR`, plus the squared distances from `BEFORE`,
in units of `SPREAD`, by Gauss-Newton steps that stay within `LOWEST` and `HIGHEST`. The same rows
always give the same shares.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.hardware import Accelerator
from jaxptd.planner.rows import Row, read_rows
from jaxptd.planner.validation import Outcome, Validation

ROWS = Path(__file__).parent
WORST, MEAN = 0.06, 0.025  # bars for table 1: each row, and the mean
SHARES = ("products_share", "hbm_share", "nvlink_share", "network_share")
BEFORE = np.array([0.85, 0.80, 0.78, 0.85])  # usual values, set before any row was seen
LOWEST = np.array([0.60, 0.50, 0.50, 0.50])
HIGHEST = np.array([0.95, 0.95, 0.95, 0.95])
ROW_ERROR = 0.02  # of one measured row: another day or node changes it this much
SPREAD = 0.1  # of a share about `BEFORE`
STEP, STEPS, SMALL = 1e-3, 20, 1e-4  # of a derivative; the maximum number; of the last change
DAMPINGS = (0.0, 0.1, 1.0, 10.0, 100.0)  # of a step, tried in turn

Residuals = Callable[[np.ndarray], np.ndarray]


def table_1() -> list[Row]:
    return read_rows(ROWS / "megatron_table1.csv")


def h100_row() -> Row:
    """The row that sets the H100's share of peak."""
    return read_rows(ROWS / "h100_calibration.csv")[0]


def with_shares(accelerator: Accelerator, shares: Iterable[float]) -> Accelerator:
    """The accelerator with other shares, in the order of `SHARES`."""
    numbers: dict[str, Any] = dict(zip(SHARES, map(float, shares), strict=True))
    return dataclasses.replace(accelerator, **numbers)


def fitted(accelerator: Accelerator, rows: Sequence[Row]) -> Accelerator:
    """The accelerator with shares fitted to rows that ran on it."""

    def residuals(x: np.ndarray) -> np.ndarray:
        machine = with_shares(accelerator, x)
        errors = [np.log(row.predict(machine).seconds / row.seconds) for row in rows]
        return np.concatenate([np.array(errors) / ROW_ERROR, (x - BEFORE) / SPREAD])

    return with_shares(accelerator, _least_squares(residuals))


def calibrated(accelerator: Accelerator, row: Row) -> Accelerator:
    """The accelerator with the matmul share that predicts one row exactly.

    Bisection between `LOWEST` and `HIGHEST` finds it; it is one of them if the row is out of reach.
    """
    low, high = LOWEST[0], HIGHEST[0]
    for _ in range(40):
        middle = (low + high) / 2
        machine = dataclasses.replace(accelerator, products_share=float(middle))
        too_fast = row.predict(machine).seconds < row.seconds
        low, high = (low, middle) if too_fast else (middle, high)
    return dataclasses.replace(accelerator, products_share=float((low + high) / 2))


def calibrated_pace(accelerator: Accelerator, row: Row) -> float:
    """The pace of experts' kernels (`Implementation.expert_pace`) with which one row is exact."""
    low, high = 0.1, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        too_fast = row.predict(accelerator, expert_pace=middle).seconds < row.seconds
        low, high = (low, middle) if too_fast else (middle, high)
    return (low + high) / 2


def _least_squares(residuals: Residuals) -> np.ndarray:
    """Takes Levenberg-Marquardt steps from `BEFORE` until one changes next to nothing."""
    x = BEFORE.copy()
    for _ in range(STEPS):
        to = _next(residuals, x)
        done = np.max(np.abs(to - x)) < SMALL
        x = to
        if done:
            break
    return x


def _next(residuals: Residuals, x: np.ndarray) -> np.ndarray:
    """The first better point within the bounds, trying long steps first; `x` if there is none."""
    now = residuals(x)
    moves = np.eye(len(x)) * STEP
    slopes = np.stack([(residuals(x + move) - now) / STEP for move in moves], axis=1)
    curve, slope = slopes.T @ slopes, slopes.T @ now
    for damping in DAMPINGS:
        damped = curve + damping * np.diag(np.diag(curve))
        to = np.clip(x - np.linalg.solve(damped, slope), LOWEST, HIGHEST)
        then = residuals(to)
        if then @ then < now @ now:
            return to
    return x


@dataclasses.dataclass(frozen=True)
class FittedTable(Validation):
    """Predictions of a table's rows by shares that were fitted to them.

    Args:
        mean_bar: the largest mean error allowed.
        baseline: each row's error with a constant TFLOP/s.
        shares: from the fit to all rows.
    """

    mean_bar: float
    baseline: tuple[float, ...]
    shares: Mapping[str, float]

    def missed(self) -> list[str]:
        """The missed bars, one sentence each."""
        found = super().missed()
        if self.mean > self.mean_bar:
            found.append(f"mean: {self.mean:.1%} is above {self.mean_bar:.1%}")
        mean, worst = self.constant()
        if self.worst >= worst or self.mean >= mean:
            found.append("a constant TFLOP/s is as good")
        return found

    def constant(self) -> tuple[float, float]:
        """The mean and the worst error of a constant TFLOP/s."""
        sizes = np.abs(self.baseline)
        return float(sizes.mean()), float(sizes.max())

    def as_dict(self) -> dict[str, Any]:
        mean, worst = self.constant()
        more = {"mean_bar": self.mean_bar, "baseline": {"mean": mean, "worst": worst}}
        return {**super().as_dict(), **more, "shares": dict(self.shares)}


def fitted_table(rows: Sequence[Row], accelerator: Accelerator, *, held_out: bool) -> FittedTable:
    """Fits the shares to rows of one accelerator and predicts the same rows.

    Args:
        rows: measured on that accelerator.
        accelerator: its limits; its shares are not read.
        held_out: whether each row is predicted by a fit to the others.
    """
    whole = fitted(accelerator, rows)
    machines = [fitted(accelerator, others) if held_out else whole for others in _others(rows)]
    outcomes = tuple(
        Outcome(row, row.predict(machine).seconds, WORST)
        for row, machine in zip(rows, machines, strict=True)
    )
    how = "each row predicted by a fit to the others" if held_out else "a fit to all rows"
    shares = {name: float(getattr(whole, name)) for name in SHARES}
    return FittedTable(how, outcomes, MEAN, constant_rate(rows), shares)


def constant_rate(rows: Sequence[Row]) -> tuple[float, ...]:
    """Errors of a constant TFLOP/s: each row's is predicted by the mean of the others."""
    rates = [row.flops / row.parallelism.gpus / row.seconds for row in rows]
    return tuple(
        float(np.mean(others)) / rate - 1
        for rate, others in zip(rates, _others(rates), strict=True)
    )


def _others(items: Sequence[Any]) -> list[list[Any]]:
    """For each item, the list without it."""
    return [[*items[:i], *items[i + 1 :]] for i in range(len(items))]
