"""Predicted steps of the GPT cases have the FLOPs of the compiled ones, and about their bytes."""

from pathlib import Path

import pytest

from benchmarks.gpu import planned
from benchmarks.gpu.compiled import CASES, Case

GPT = [name for name, case in CASES.items() if isinstance(case, Case)]


@pytest.mark.parametrize("name", GPT)
def test_the_prediction_is_that_of_the_compiled_step(name: str) -> None:
    (found,) = planned.compared([name])
    assert abs(found.flop_error) < 0.002
    assert abs(found.bytes_error) < 0.25


def test_norms_in_kernels_of_their_own_read_once() -> None:
    """XLA's read x forward twice and both arrays twice backward: 6 bytes of each number more."""
    xla, triton = (planned.compared([name])[0] for name in ("124m", "124m triton"))
    ms = 1e3 * 24 * 6 * 32 * 1024 * 768 / 4.3e12  # norms of 12 layers
    assert xla.milliseconds - triton.milliseconds == pytest.approx(ms, rel=1e-3)
    assert abs(triton.bytes_error) < 0.03


def test_bytes_are_not_off_in_one_direction() -> None:
    errors = [each.bytes_error for each in planned.compared(GPT)]
    assert abs(sum(errors)) / len(errors) < 0.10


def test_the_newest_version_is_not_the_last_of_the_alphabet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planned, "read_budget", lambda: {"0.12": {}, "0.9": {}, "0.10": {}})
    assert planned.newest() == "0.12"


def test_the_page(tmp_path: Path) -> None:
    path = tmp_path / "planned.md"
    assert planned.main(["--out", str(path)]) == 0
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| 2.5b grid | 61.08 | 61.09 |") for line in lines) == 1
