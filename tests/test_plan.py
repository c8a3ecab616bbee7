"""`jaxptd plan validate`: what it prints, its exit codes, and bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import refused
from published import ROWS

from jaxptd import plan as command

ROW = ROWS / "h100_calibration.csv"


def test_rows_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert command.main(["validate", "--rows", str(ROW), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["measured"] for row in found["rows"]] == [12.91]
    assert abs(found["mean"]) < 1e-3
    slow = tmp_path / "slow.csv"
    slow.write_text(ROW.read_text().replace("12.91", "15"))
    assert command.main(["validate", "--rows", str(slow), "--quiet"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "mean error 13.9%, worst 13.9%",
        "missed: llama3-8b: 13.9% is above 8.0%",
    ]


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    unknown = tmp_path / "unknown.csv"
    unknown.write_text(ROW.read_text().replace(",h100,", ",h300,"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    for options, words in (
        ([], "--gpus and --gpu"),
        (["calibrat"], "calibrat"),
        (["validate", "--rows", "no.csv"], "no.csv: No such file"),
        (["validate", "--rows", str(unknown)], "hardware=h300: no such accelerator; did you mean"),
        (["validate", "--rows", str(ROW), "--hardware", str(broken)], "is not YAML"),
        (["validate"], "--rows and --run-dir name the steps to predict, and neither is given"),
        (["validate", "--held"], "unrecognized arguments: --held"),
    ):
        assert words in refused(capsys, command.main, options)


@pytest.mark.slow
def test_the_same_plan_is_the_same_text_in_every_process() -> None:
    """Whatever the order of Python's sets is there."""
    command = [
        "jaxptd",
        "plan",
        "--config",
        "gpt2-124m",
        "--gpus",
        "64",
        "--gpu",
        "h200",
        "--json",
        "--quiet",
    ]
    texts = {
        subprocess.check_output(
            [sys.executable, "-m", *command], env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("1", "3")
    }
    assert len(texts) == 1
