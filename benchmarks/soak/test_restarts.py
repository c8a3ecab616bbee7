"""Restarts are read from what a run prints, and what is lost is noticed."""

from pathlib import Path

import pytest

from benchmarks.soak import restarts
from benchmarks.soak.restarts import HEADS, Kill, Launched, Restarts, main, row


@pytest.mark.slow
def test_a_short_one_loses_nothing(tmp_path: Path) -> None:
    short = ["--kills", "1", "--processes", "2", "--steps", "300"]
    assert main([*short, "--out", str(tmp_path)]) == 0
    assert "| 2 | 1 | 1 |" in (tmp_path / "restarts.md").read_text()


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """A run that prints these lines and ends."""

    def launch(*lines: str) -> Launched:
        monkeypatch.setattr(restarts, "SUPERVISOR", "print('''" + "\n".join(lines) + "''')")
        run = Launched(tmp_path, [], 2)
        assert run.end() == 0
        return run

    return launch


def test_the_first_step_of_the_next_start_is_found(launched) -> None:
    run = launched(
        "2 simulated CPU devices",
        *("step 1/60  loss 5", "step 2/60", "step 3/60"),
        "launch: process 1 of 2 was killed",
        "2 simulated CPU devices",
        *("resuming at step 2 from there", "step 3/60  loss 4", "step 4/60  loss 4"),
    )
    assert run.first(restarts.STEP, 0)[1] == 1
    assert run.found(restarts.STEP)[1] == 4
    assert run.next_step(1)[1] == 3
    assert run.next_step(6) is None
    assert run.first(restarts.RESUMED, 1)[1] == 2


def test_a_row_says_what_the_kills_cost(tmp_path) -> None:
    each = Restarts(tmp_path, [2, 4], {}, steps=1, seed=0)
    each.runs = 2
    each.kills = [Kill(True, False, 10.0, 6.0, 4), Kill(False, True, 20.0, 7.0, 8)]
    each.kills.append(Kill(False, False, 12.0, 5.0, 0))
    cells = dict(zip(HEADS, row(each), strict=True))
    assert cells == {
        "processes": "2 or 4",
        "runs": "2",
        "kills": "3",
        "while writing": "1",
        "with its host": "1",
        "seconds: median": "12.0",
        "longest": "20.0",
        "work": "6.0",
        "steps lost: mean": "4.0",
        "most": "8",
        "difference": "0e+00",
    }
