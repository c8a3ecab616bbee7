"""Predictions of published rows meet their bars, and the table has the shares that were fitted."""

import dataclasses

import pytest

from jaxptd.hardware import find_accelerator
from jaxptd.planner.published.fit import SHARES, calibrated
from jaxptd.planner.published.rows import PACKAGED, h100_row, read_rows, table_1
from jaxptd.planner.published.validation import (
    Outcome,
    Validation,
    fitted_table,
    predicted_rows,
)

A100, H100 = find_accelerator("a100"), find_accelerator("h100")


@pytest.fixture(scope="module")
def held_out() -> Validation:
    return fitted_table(table_1(), A100, held_out=True)


def test_table_1_held_out_meets_its_bars(held_out: Validation) -> None:
    assert held_out.missed() == []
    assert held_out.worst < 0.06
    assert held_out.mean < 0.025


def test_a_constant_rate_is_worse(held_out: Validation) -> None:
    baseline = held_out.as_dict()["baseline"]
    assert (round(baseline["worst"], 3), round(baseline["mean"], 3)) == (0.117, 0.068)
    assert held_out.worst < baseline["worst"] / 2
    assert held_out.mean < baseline["mean"] / 2


def test_a_row_is_predicted_without_it(held_out: Validation) -> None:
    """With one row slower its own prediction stays; a fit that saw it would move."""
    rows = table_1()[:3]
    moved = [dataclasses.replace(rows[0], seconds=rows[0].seconds * 1.3), *rows[1:]]
    found = fitted_table(moved, A100, held_out=True)
    before = fitted_table(rows, A100, held_out=True)
    assert found.outcomes[0].seconds == before.outcomes[0].seconds
    assert found.outcomes[1].seconds != before.outcomes[1].seconds


def test_the_hardware_table_has_the_fitted_shares(held_out: Validation) -> None:
    for name in SHARES:
        assert getattr(A100, name) == pytest.approx(held_out.shares[name], abs=5e-4)
    assert H100.products_share == pytest.approx(
        calibrated(H100, h100_row()).products_share, abs=1e-3
    )


def test_table_1_with_the_hardware_table_and_nothing_fitted() -> None:
    found = predicted_rows(table_1(), {"a100": A100})
    assert found.worst < 0.05
    assert found.missed() == []
    assert found.baseline == ()


def test_rows_that_no_fit_has_seen() -> None:
    found = predicted_rows(read_rows(PACKAGED / "megatron_2022.csv"), {"a100": A100})
    assert len(found.outcomes) == 8
    assert found.missed() == []
    assert found.worst < 0.07
    assert found.mean < 0.025


def outcome(error: float) -> Outcome:
    return Outcome(table_1()[0], table_1()[0].seconds * (1 + error), 0.06)


def test_missed_bars_are_named() -> None:
    good = Validation("", (outcome(0.01), outcome(-0.059)), 0.04)
    assert good.missed() == []
    assert (round(good.mean, 4), round(good.worst, 4)) == (0.0345, 0.059)
    bad = Validation("", (outcome(0.01), outcome(-0.062)), 0.025)
    assert bad.missed() == ["gpt-1.7b: 6.2% is above 6.0%", "mean: 3.6% is above 2.5%"]
    dull = Validation("", (outcome(0.05),), 0.06, (0.04, 0.06))
    assert dull.missed() == ["a constant TFLOP/s is as good"]
