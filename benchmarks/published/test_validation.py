"""Predictions of published rows meet their bars, and the table holds the fitted shares."""

import dataclasses

import pytest

from benchmarks.published.__main__ import main
from benchmarks.published.fit import (
    ROWS,
    SHARES,
    FittedTable,
    calibrated,
    calibrated_pace,
    fitted_table,
    h100_row,
    table_1,
)
from jaxptd.hardware import find_accelerator
from jaxptd.planner.programs import PROGRAMS
from jaxptd.planner.rows import read_rows
from jaxptd.planner.validation import Outcome, predicted_rows

A100, H100 = find_accelerator("a100"), find_accelerator("h100")


@pytest.fixture(scope="module")
def held_out() -> FittedTable:
    return fitted_table(table_1(), A100, held_out=True)


def test_table_1_held_out_meets_its_bars(held_out: FittedTable) -> None:
    assert held_out.missed() == []
    assert held_out.worst < 0.06
    assert held_out.mean < 0.025


def test_a_constant_rate_is_worse(held_out: FittedTable) -> None:
    baseline = held_out.as_dict()["baseline"]
    assert (round(baseline["worst"], 3), round(baseline["mean"], 3)) == (0.117, 0.068)
    assert held_out.worst < baseline["worst"] / 2
    assert held_out.mean < baseline["mean"] / 2


def test_a_row_is_predicted_without_it(held_out: FittedTable) -> None:
    """If one row is slower, its own prediction stays; a fit that saw the row would move."""
    rows = table_1()[:3]
    moved = [dataclasses.replace(rows[0], seconds=rows[0].seconds * 1.3), *rows[1:]]
    found = fitted_table(moved, A100, held_out=True)
    before = fitted_table(rows, A100, held_out=True)
    assert found.outcomes[0].seconds == before.outcomes[0].seconds
    assert found.outcomes[1].seconds != before.outcomes[1].seconds


def test_the_hardware_table_has_the_fitted_shares(held_out: FittedTable) -> None:
    for name in SHARES:
        assert getattr(A100, name) == pytest.approx(held_out.shares[name], abs=5e-4)
    assert H100.products_share == pytest.approx(
        calibrated(H100, h100_row()).products_share, abs=1e-3
    )


def test_table_1_with_the_hardware_table_and_nothing_fitted() -> None:
    found = predicted_rows(table_1(), {"a100": A100})
    assert found.worst < 0.05
    assert found.missed() == []


def test_rows_that_no_fit_has_seen() -> None:
    found = predicted_rows(read_rows(ROWS / "megatron_2022.csv"), {"a100": A100})
    assert len(found.outcomes) == 8
    assert found.missed() == []
    assert found.worst < 0.07
    assert found.mean < 0.025


def outcome(error: float) -> Outcome:
    return Outcome(table_1()[0], table_1()[0].seconds * (1 + error), 0.06)


def fit_with(*errors: float, mean_bar: float, baseline: tuple[float, ...] = (0.2,)) -> FittedTable:
    return FittedTable("", tuple(map(outcome, errors)), mean_bar, baseline, {})


def test_missed_bars_are_named() -> None:
    good = fit_with(0.01, -0.059, mean_bar=0.04)
    assert good.missed() == []
    assert (round(good.mean, 4), round(good.worst, 4)) == (0.0345, 0.059)
    bad = fit_with(0.01, -0.062, mean_bar=0.025)
    assert bad.missed() == ["gpt-1.7b: 6.2% is above 6.0%", "mean: 3.6% is above 2.5%"]
    dull = fit_with(0.05, mean_bar=0.06, baseline=(0.04, 0.06))
    assert dull.missed() == ["a constant TFLOP/s is as good"]


def test_the_command_prints_a_fit_to_all_rows(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a fit to all rows"
    assert len(lines) == 15
    assert lines[12] == "mean error 1.2%, worst 3.5%; bar of the mean 2.5%"
    assert lines[13] == "a constant TFLOP/s: mean error 6.8%, worst 11.7%"
    assert lines[14].startswith("shares of peak fitted to all rows: products 0.819, hbm 0.617")


@pytest.mark.parametrize(("file", "mean"), [("experts.csv", 0.08), ("maxtext_zero3.csv", 0.03)])
def test_steps_that_set_nothing_are_predicted(file: str, mean: float) -> None:
    found = predicted_rows(read_rows(ROWS / file), {"h100": H100})
    assert found.missed() == []
    assert found.mean < mean


def test_the_pace_of_each_programs_experts_is_that_of_its_row() -> None:
    rows = read_rows(ROWS / "experts_calibration.csv")
    assert len({row.program for row in rows}) == len(rows)
    for each in rows:
        pace = calibrated_pace(H100, each)
        assert PROGRAMS[each.program].expert_pace == pytest.approx(pace, rel=0.005), each.name
