"""Accidents lose nothing, and the soak test notices when something is lost."""

import json
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import Soak, main


@pytest.mark.slow
def test_a_short_one_loses_nothing(tmp_path: Path) -> None:
    short = ["--minutes", "2", "--kills", "4", "--steps", "150", "--longest", "12"]
    assert main([*short, "--seed", "2", "--out", str(tmp_path)]) == 0
    assert "| lost | 0 |" in (tmp_path / "soak.md").read_text()


def rows(folder: Path, losses: list[float]) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": 10 * step, "loss": x}) for step, x in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([3.0, 2.0], ""),
        ([3.0, 2.000001], "losses differ by 5.0e-07"),
        ([3.0], "other steps are logged"),
    ],
)
def test_a_difference_of_curves_is_named(tmp_path, losses, words) -> None:
    soak = Soak(tmp_path, seed=0, steps=20, longest=1)
    soak._difference(rows(tmp_path / "whole", [3.0, 2.0]), rows(tmp_path / "other", losses))
    assert "".join(soak.wrong) == (f"other: {words}" if words else "")
