"""The table of goals: its lines, and the figures that need no compiled step."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import goals
from benchmarks.gpu.goals import Figure
from benchmarks.one_device.cases import CASES


def test_a_figure_is_held_against_its_goal() -> None:
    assert Figure(5.9, 5.9).reached and not Figure(6.0, 5.9).reached
    assert Figure(0.9, 0.9, least=True).reached and not Figure(0.8, 0.9, least=True).reached
    line = goals.row("hidden", Figure(0.77, 0.9, least=True, form="{:.0%}"))
    assert line == ["hidden", "at least 90%", "77%", "missed"]
    assert goals.row("step, s", Figure(5.63, 5.9))[1:] == ["at most 5.90", "5.63", "reached"]


def test_interleaved_stages_do_not_wait_for_hops() -> None:
    assert goals.waiting_of_hops() == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["145b", "1.5b zero3", "350m dp8", "124m", "1.5b dots"])
def test_the_cases_are_there(name: str) -> None:
    assert goals.case(name).layout.num_devices >= 1


def test_timed_goals_are_of_the_stored_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"jaxptd-triton": {"seconds": [0.05, 0.06, 0.07]}, "torch": {"seconds": [0.09] * 3}}
    monkeypatch.setattr(goals, "TIMED", tmp_path / "gpu.json")
    goals.TIMED.write_text(json.dumps({"124m": seconds}))
    ratio = goals.GOALS["124M, timed, kernels by Triton: tokens a second over PyTorch's"]()
    assert (ratio.value, ratio.goal, ratio.least) == (pytest.approx(1.5), 1.15, True)
    share = goals.GOALS["124M, timed, kernels by Triton: MFU"]()
    flops = CASES["124m"].flops(causal=False) * 32 * 1024
    assert share.value == pytest.approx(flops / 0.06 / 989.5e12)
