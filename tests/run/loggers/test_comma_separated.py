"""metrics.csv: the rows of metrics.jsonl, with a fixed set of columns."""

import csv
from pathlib import Path

import pytest

from jaxptd.config import Config, TrainConfig
from jaxptd.run.folder import RunDir
from jaxptd.run.loggers import CommaSeparated

CONFIG = Config(train=TrainConfig(loggers=["csv"]))


def row(step: int, **more: float) -> dict:
    return {"step": step, "loss": 1.0 / step, "mfu": None, **more}


def cells(run_dir: RunDir) -> list[dict[str, str]]:
    with (run_dir.path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def expected(rows: list[dict]) -> list[dict[str, str]]:
    names = dict.fromkeys(name for each in rows for name in each)
    return [{n: "" if each.get(n) is None else str(each[n]) for n in names} for each in rows]


@pytest.fixture
def run_dir(tmp_path):
    run = RunDir(tmp_path / "run")
    run.open(CONFIG, step=0)
    return run


def test_it_has_every_row_also_where_a_column_is_new(run_dir) -> None:
    assert cells(run_dir) == []
    for step in (1, 2):
        run_dir.log(row(step))
    run_dir.log(row(3, **{"expert_load/0": 1.5, "validation_loss": 2.0}))
    run_dir.log(row(4))
    assert cells(run_dir) == expected(run_dir.metrics())
    assert [each["validation_loss"] for each in cells(run_dir)] == ["", "", "2.0", ""]


def test_a_resumed_run_has_each_step_once(run_dir) -> None:
    for step in range(1, 8):
        run_dir.log(row(step, validation_loss=3.0))
    again = RunDir(run_dir.path)
    again.open(CONFIG, step=5)
    for step in (6, 7, 8):
        again.log(row(step, validation_loss=4.0))
    assert [each["step"] for each in cells(again)] == [str(step) for step in range(1, 9)]
    assert cells(again) == expected(again.metrics())


def test_a_new_column_that_cannot_be_written_comes_with_the_next_row(run_dir, monkeypatch) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    run_dir.log(row(1))
    with monkeypatch.context() as patch:
        patch.setattr(f"{CommaSeparated.__module__}.write_whole", full)
        run_dir.log(row(2, validation_loss=2.0))
    assert len(cells(run_dir)) == 1
    run_dir.log(row(3))
    assert cells(run_dir) == expected(run_dir.metrics())
    assert len(cells(run_dir)) == 3


def test_a_row_that_cannot_be_written_is_written_with_the_next(run_dir, monkeypatch) -> None:
    plain = Path.open

    def full(self, *args, **options):
        if self.name == "metrics.csv":
            raise OSError(28, "No space left on device")
        return plain(self, *args, **options)

    run_dir.log(row(1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        run_dir.log(row(2))
    assert len(cells(run_dir)) == 1
    run_dir.log(row(3))
    assert cells(run_dir) == expected(run_dir.metrics())
    assert len(cells(run_dir)) == 3
