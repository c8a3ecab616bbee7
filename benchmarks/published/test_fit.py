"""The fit finds the shares that made its rows, is deterministic, and stays within its bounds."""

import dataclasses

import numpy as np
import pytest

from benchmarks.published.fit import (
    BEFORE,
    HIGHEST,
    LOWEST,
    ROW_ERROR,
    SHARES,
    calibrated,
    fitted,
    h100_row,
    table_1,
    with_shares,
)
from jaxptd.hardware import find_accelerator
from jaxptd.planner.rows import Row

A100 = find_accelerator("a100")


def made(shares: np.ndarray) -> list[Row]:
    """The rows of table 1 as an accelerator with these shares would run them."""
    machine = with_shares(A100, shares)
    return [dataclasses.replace(row, seconds=row.predict(machine).seconds) for row in table_1()]


def shares_of(machine: object) -> np.ndarray:
    return np.array([getattr(machine, name) for name in SHARES])


def test_shares_that_made_the_rows_are_found() -> None:
    wanted = np.array([0.78, 0.65, 0.65, 0.70])
    rows = made(wanted)
    machine = fitted(A100, rows)
    assert [row.predict(machine).seconds for row in rows] == pytest.approx(
        [row.seconds for row in rows], rel=ROW_ERROR
    )
    found = shares_of(machine)
    assert (np.abs(found - wanted) < np.abs(BEFORE - wanted)).all()
    assert shares_of(fitted(A100, rows)).tolist() == found.tolist()


def test_a_share_stays_within_its_bounds() -> None:
    fast = [dataclasses.replace(row, seconds=row.seconds / 4) for row in table_1()]
    slow = [dataclasses.replace(row, seconds=row.seconds * 4) for row in table_1()]
    assert shares_of(fitted(A100, fast))[0] == HIGHEST[0]
    assert shares_of(fitted(A100, slow))[0] == LOWEST[0]


def test_one_row_sets_one_share() -> None:
    row, machine = h100_row(), find_accelerator("h100")
    found = calibrated(machine, row)
    assert row.predict(found).seconds == pytest.approx(row.seconds, rel=1e-6)
    assert dataclasses.replace(found, products_share=machine.products_share) == machine
    slow = dataclasses.replace(row, seconds=1e6)
    assert calibrated(machine, slow).products_share == pytest.approx(LOWEST[0])
