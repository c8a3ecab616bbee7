"""Runs are predicted as `jaxptd plan` predicts layouts, and compared with their logs."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_lines import refused

from jaxptd import plan as command
from jaxptd.commands.command_line import as_yaml, load_config
from jaxptd.config import Config
from jaxptd.hardware.table import PACKAGED
from jaxptd.plan import plan
from jaxptd.planner.validation import NEWEST, read_run

GPU = ("--gpu", "h200")


def folder(path: Path, config: Config, times: Sequence[float | None]) -> str:
    """Makes the directory of a run that has logged these step times."""
    path.mkdir()
    (path / "config.yaml").write_text(as_yaml(config))
    rows = ({"step": step, "step_time": time} for step, time in enumerate(times, start=1))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def best() -> tuple[Config, float]:
    """A planned layout over two nodes, and its predicted seconds."""
    config = load_config("gpt2-124m", ["--train.global_batch_size=64"])
    pins = {"layout.tp": 2, "layout.pp": 2}
    first = plan(config, gpus=16, gpu="h200", top=1, pins=pins).best[0]
    return first.config, first.seconds


def test_a_run_is_predicted_as_its_layout_is_planned(
    best: tuple[Config, float], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config, seconds = best
    name = folder(tmp_path / "run", config, [seconds])
    assert command.main(["validate", "--run-dir", name, *GPU, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["predicted"] == pytest.approx(seconds, rel=1e-12)
    assert row["measured"] == seconds
    assert (row["name"], row["program"], row["hardware"]) == (name, "jaxptd", "h200")
    assert (row["gpus"], row["bar"]) == (16, 0.06)


def test_an_error_above_the_bar(
    best: tuple[Config, float], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config, seconds = best
    near = folder(tmp_path / "near", config, [seconds / 0.95])
    far = folder(tmp_path / "far", config, [seconds / 0.93])
    assert command.main(["validate", "--run-dir", near, *GPU]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "predicted, nothing fitted to these runs"
    assert lines[2].startswith(near)
    assert lines[2].split()[-4:] == [f"{seconds / 0.95:.3g}", f"{seconds:.3g}", "-5.0%", "6.0%"]
    assert command.main(["validate", "--run-dir", near, far, *GPU, "--quiet"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "mean error 6.0%, worst 7.0%",
        f"missed: {far}: 7.0% is above 6.0%",
    ]


def test_accelerators_and_nodes_are_the_options(
    best: tuple[Config, float], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config, seconds = best
    name = folder(tmp_path / "run", config, [seconds])

    def row(*options: str) -> dict:
        command.main(["validate", "--run-dir", name, *options, "--json"])
        (found,) = json.loads(capsys.readouterr().out)["rows"]
        return dict(found)

    assert row(*GPU, "--node", "4")["predicted"] > 1.01 * seconds  # more traffic crosses nodes
    slow = row("--gpu", "v100")  # from a data sheet
    assert (slow["predicted"] > 2 * seconds, slow["bar"]) == (True, 0.12)
    own = tmp_path / "cluster.yaml"
    own.write_text(PACKAGED.read_text().replace("h200:\n", "mynode:\n"))
    assert row("--gpu", "mynode", "--hardware", str(own))["predicted"] == row(*GPU)["predicted"]


def test_the_time_of_a_run_is_the_median_of_its_newest_rows(tmp_path: Path) -> None:
    config = load_config("gpt2-124m")
    times = [9.0] * NEWEST + [None] + [1.0, 2.0, 3.0] * (NEWEST // 3)
    run = read_run(Path(folder(tmp_path / "run", config, times)), "h200")
    assert run.seconds == 2.0


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = load_config("gpt2-124m")
    run = folder(tmp_path / "run", config, [1.0])
    new = folder(tmp_path / "new", config, [])
    wide = folder(tmp_path / "wide", load_config("gpt2-124m", ["--model.dtype=float32"]), [1.0])
    for options, words in (
        (["--run-dir", run], "add --gpu, such as --gpu h200"),
        (["--rows", "rows.csv", "--gpu", "h200"], "--gpu has no effect without --run-dir"),
        (["--rows", "rows.csv", "--node", "4"], "--node has no effect without --run-dir"),
        (["--run-dir", run, *GPU, "--node", "-1"], "--node -1: use 0 to"),
        ([], "--rows and --run-dir name the steps to predict, and neither is given; use one"),
        (["--run-dir", run, *GPU, "--rows", "rows.csv"], "to predict, and both are given; use one"),
        (["--run-dir", run, "--gpu", "h20"], "hardware=h20: no such accelerator; did you mean"),
        (["--run-dir", str(tmp_path), *GPU], "config.yaml: No such file"),
        (["--run-dir", run, new, *GPU], f"{new} has not logged a step; train there first"),
        (["--run-dir", run, wide, *GPU], f"{wide}: model.dtype=float32: the hardware table"),
    ):
        assert words in refused(capsys, command.main, ["validate", *options])
