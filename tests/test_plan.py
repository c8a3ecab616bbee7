"""`jaxptd plan`: the command it prints. `plan validate`: its output, exit codes and bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import refused
from hugging import CONFIG
from published import ROWS

from jaxptd import plan as command
from jaxptd.config.files import packaged_configs
from jaxptd.config.written import RUN_CONFIG

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
    """The output does not depend on the order of Python's sets."""
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


# ---- the command to train the best layout --------------------------------------------------------

SMALL = ["--gpus", "2", "--gpu", "h200", "--top", "1", "--layout.dp", "2"]


def train_command(capsys: pytest.CaptureFixture, *argv: str) -> tuple[str, str]:
    """The last line that a plan prints, and its stderr."""
    assert command.main([*argv, *SMALL]) == 0
    out, err = capsys.readouterr()
    return out.splitlines()[-1], err


@pytest.mark.parametrize("source", [["--from", "DIR"], ["--from=DIR"], ["--model.from", "DIR"]])
def test_the_command_names_the_model_and_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture, source: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))  # sizes do not require weights
    source = [each.replace("DIR", str(tmp_path)) for each in source]
    others = ["--data.source", "a b.jsonl", "--train.global_batch_size=4"]
    line, _ = train_command(capsys, *source, *others, "--model.dtype", "float16")
    assert line == (
        f"jaxptd train {' '.join(source)} --data.source 'a b.jsonl' --train.global_batch_size=4 "
        "--model.dtype float16 --layout.dp 2"
    )
    assert command.main([*source, *others, *SMALL, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    assert "--model.dtype bfloat16 --layout.dp 2\n" in out


def test_the_command_of_a_run_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Each plan of a process is made of its own options only."""
    (tmp_path / RUN_CONFIG).write_text(packaged_configs()["test-tiny"].read_text())
    for _ in range(2):
        line, _ = train_command(capsys, "--run-dir", str(tmp_path))
        options = "--model.dtype bfloat16 --layout.dp 2"
        assert line.startswith(f"jaxptd train --run-dir {tmp_path} {options}")


def test_a_precision_that_nobody_set_is_planned_in_16_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    said = "model.dtype is not set: planned for bfloat16, not for float32\n"
    unset = ("--config", "test-tiny")
    line, err = train_command(capsys, *unset)
    options = "--layout.dp 2 --layout.zero 1 --train.micro_batches 1"
    assert line == f"jaxptd train --config test-tiny --model.dtype bfloat16 {options}"
    assert err == said
    assert command.main([*unset, *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == said
    (row,) = json.loads(out)["best"]
    assert " ".join(row["options"]) == f"--model.dtype bfloat16 {options}"
    (tmp_path / "wide.yaml").write_text("model: {dtype: float32}")
    (tmp_path / "half.yaml").write_text("model: {dtype: float16}")
    for given in (["--model.dtype=float32"], ["--config", str(tmp_path / "wide.yaml")]):
        error = refused(capsys, command.main, [*given, *SMALL])
        assert "model.dtype=float32: the hardware table lists rates of 16-bit" in error
    line, err = train_command(capsys, "--config", str(tmp_path / "half.yaml"))
    assert (line, err) == (f"jaxptd train --config {tmp_path}/half.yaml --layout.dp 2", "")


def test_another_framework_is_planned_in_16_bits_as_well(capsys: pytest.CaptureFixture) -> None:
    assert command.main(["--config", "test-tiny", *SMALL[:4], "--print", "megatron"]) == 0
    out, err = capsys.readouterr()
    assert "--bf16" in out
    assert err.startswith("model.dtype is not set")
