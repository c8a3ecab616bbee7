"""A small bounded fit: four shares of an accelerator's limits, from rows of measured steps.

The shares are of products, memory, NVLink and network. They minimise the squared logarithms of
predicted by measured seconds, in units of `ROW_ERROR`, and the squared distances from `BEFORE`, in
units of `SPREAD`, by Gauss-Newton steps that stay within `LOWEST` and `HIGHEST`. The same rows give
the same shares.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxptd.hardware import Accelerator
from jaxptd.planner.published.rows import Row

SHARES = ("products_share", "hbm_share", "nvlink_share", "network_share")
BEFORE = np.array([0.85, 0.80, 0.78, 0.85])  # usual values, set before any row was seen
LOWEST = np.array([0.60, 0.50, 0.50, 0.50])
HIGHEST = np.array([0.95, 0.95, 0.95, 0.95])
ROW_ERROR = 0.02  # of one measured row: another day, another node
SPREAD = 0.1  # of a share about `BEFORE`
STEP, STEPS, SMALL = 1e-3, 20, 1e-4  # of a derivative; at most; of the last change
DAMPINGS = (0.0, 0.1, 1.0, 10.0, 100.0)  # of a step, tried in turn

Residuals = Callable[[np.ndarray], np.ndarray]


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
    """The accelerator with the share of products with which one row is predicted exactly.

    It is found by halving between `LOWEST` and `HIGHEST`, and is one of them if the row is out of
    reach.
    """
    low, high = LOWEST[0], HIGHEST[0]
    for _ in range(40):
        middle = (low + high) / 2
        machine = dataclasses.replace(accelerator, products_share=float(middle))
        too_fast = row.predict(machine).seconds < row.seconds
        low, high = (low, middle) if too_fast else (middle, high)
    return dataclasses.replace(accelerator, products_share=float((low + high) / 2))


def _least_squares(residuals: Residuals) -> np.ndarray:
    """Levenberg and Marquardt's steps from `BEFORE`, until one changes next to nothing."""
    x = BEFORE.copy()
    for _ in range(STEPS):
        to = _next(residuals, x)
        done = np.max(np.abs(to - x)) < SMALL
        x = to
        if done:
            break
    return x


def _next(residuals: Residuals, x: np.ndarray) -> np.ndarray:
    """The first better place within the bounds, from the longest step on; `x` if there is none."""
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
