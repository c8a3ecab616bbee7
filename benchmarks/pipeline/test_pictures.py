"""The pictures of docs/pipeline.md: they show what the schedules are, and are current."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.svg import words
from benchmarks.pipeline import pictures as pipeline_pictures
from jaxptd.pipeline.schedules import SCHEDULES, make_schedule
from jaxptd.pipeline.statistics import expected_bubble, expected_peak, simulate

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
NAMES = [*(f"pipeline_{name}.svg" for name in SCHEDULES), *pipeline_pictures.PICTURES]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pictures")
    assert pipeline_pictures.main(["--out", str(out / "new")]) == 0
    return out / "new"


@pytest.mark.slow
def test_pictures_are_the_same_each_time(drawn: Path, tmp_path: Path) -> None:
    pipeline_pictures.draw(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (drawn / name).read_bytes()


def test_some_pictures_of_the_page_are_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, *_), cost = pipeline_pictures.schedules(), "pipeline_cost.svg"
    monkeypatch.setattr(pipeline_pictures, "schedules", lambda: [first])
    monkeypatch.setattr(pipeline_pictures, "PICTURES", {cost: pipeline_pictures.PICTURES[cost]})
    assert pipeline_pictures.main(["--out", str(tmp_path)]) == 0
    assert {each.name for each in tmp_path.iterdir()} == {f"pipeline_{first.name}.svg", cost}
    for each in tmp_path.iterdir():
        assert words(PICTURES / each.name) == words(each)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_pictures_of_the_page_are_current(drawn: Path, name: str) -> None:
    assert words(PICTURES / name) == words(drawn / name)


def test_a_bar_is_where_its_operation_runs() -> None:
    panels = pipeline_pictures.in_time().axes
    for axes, schedule in zip(panels, pipeline_pictures.schedules(), strict=True):
        timing = simulate(schedule)
        operations = list(schedule.operations())
        assert axes.get_title(loc="left").startswith(
            f"{schedule.name}: time {timing.makespan:g}, bubble "
        )
        for bar, (tick, stage, *_) in zip(axes.patches, operations, strict=True):
            assert bar.get_x() == timing.start[tick, stage]
            assert bar.get_width() == timing.end[tick, stage] - timing.start[tick, stage]
            assert round(bar.get_y() + bar.get_height() / 2, 6) == stage
    end = max(simulate(schedule).makespan for schedule in pipeline_pictures.schedules())
    assert {axes.get_xlim() for axes in panels} == {(0, end)}


def test_the_curves_are_the_formulas() -> None:
    bubbles, held = pipeline_pictures.cost().axes
    compared = 0
    for name, share, most in zip(SCHEDULES, bubbles.lines, held.lines, strict=True):
        assert share.get_label() == most.get_label() == name
        for m, percent, micro_batches in zip(
            share.get_xdata(), share.get_ydata(), most.get_ydata(), strict=True
        ):
            schedule = make_schedule(name, stages=8, micro_batches=int(m))
            formula, peak = expected_bubble(schedule), expected_peak(schedule)
            assert peak is not None
            assert micro_batches == peak.max()
            if formula is not None:
                np.testing.assert_allclose(percent, 100 * formula, rtol=0, atol=1e-9)
                compared += 1
    assert compared == 22  # 6 schedules, 4 numbers; zb-h2 and zb-v have no formula for m = p
