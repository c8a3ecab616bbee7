"""The command that prints what a device holds."""

import json

import pytest
import tiny

from jaxptd import Config, TrainConfig, UserError, memory
from jaxptd.analysis import memory_report
from jaxptd.mesh import Layout


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture) -> None:
    options = [f"--model.{k}={v}" for k, v in vars(tiny.MODEL).items() if v is not None]
    options += ["--layout.tp=2", "--train.platform=cpu"]
    assert memory.main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["part"]: row for row in found["rows"]}
    layers = rows["all layers: 2 layers x 1 micro-batches"]
    assert layers["formula"] == layers["counted"] > 0
    assert rows["temporary: gradients, layers, all else"]["compiled"] > layers["formula"]
    assert rows["a layer, remat none"]["published"] > rows["a layer, remat none"]["formula"] / 4
    state = sum(rows[name]["formula"] for name in ("parameters", "optimizer"))
    enters, rest = rows["all that enters the step"], rows["temporary: gradients, layers, all else"]
    assert 0 < enters["compiled"] - state < 2000  # tokens, counters
    assert state < enters["model"] < state + 2000
    ends = ", at the fullest moment"
    parts = {name: row["model"] for name, row in rows.items() if ends in name}
    assert rest["model"] == sum(parts.values()) > layers["formula"]
    assert rows["outside of the step on a GPU: CUDA and its libraries"]["model"] > 2**30


def test_quiet_prints_what_the_compiled_step_holds_only(capsys, monkeypatch, tmp_path) -> None:
    rows = [
        {"part": "parameters", "published": 4, "formula": 4},
        {"part": "all that enters the step", "compiled": 4321},
    ]
    report = memory.MemoryReport(Layout(tp=2), "2 devices", rows)
    monkeypatch.setattr(memory, "memory", lambda config, compiled: report)
    assert memory.main(["--config", "test-tiny", "--layout.tp=2"]) == 0
    out = capsys.readouterr().out
    assert "parameters" in out and "4,321" in out and "2 devices" in out
    assert memory.main(["--config", "test-tiny", "--layout.tp=2", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "parameters" not in out and "4,321" in out and "2 devices" not in out


CONFIG = Config(tiny.MODEL, Layout(tp=2), train=TrainConfig(platform="cpu"))


def test_nothing_need_be_compiled(monkeypatch) -> None:
    monkeypatch.setattr(memory_report, "compile_to_read", None)
    found = memory.memory(CONFIG, compiled=False)
    assert "compiled" not in {*found.columns, *found.as_dict()["rows"][0]}
    assert {"formula", "counted"} <= set(found.columns)
    assert "compiled" not in repr(found)


@pytest.mark.slow
def test_without_the_compiled_step_the_formulas_are_the_same() -> None:
    whole, found = (memory.memory(CONFIG, compiled=each) for each in (True, False))
    assert set(whole.columns) - set(found.columns) == {"compiled"}
    rows = whole.as_dict()["rows"]
    assert sum(row.pop("compiled") is not None for row in rows) == 2
    assert found.as_dict()["rows"] == rows


def test_quiet_has_nothing_to_print_without_the_compiled_step() -> None:
    with pytest.raises(UserError, match="leave out --compiled false"):
        memory.main(["--config", "test-tiny", "--compiled", "false", "--quiet"])


def test_a_picture(monkeypatch, tmp_path) -> None:
    rows = [{"part": "parameters", "formula": 4}, {"part": "gradients", "formula": 8}]
    report = memory.MemoryReport(Layout(tp=2), "2 devices", rows)
    monkeypatch.setattr(memory, "memory", lambda config, compiled: report)
    picture = tmp_path / "memory.png"
    assert memory.main(["--config", "test-tiny", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_explain_prints_what_becomes_of_each_group_and_compiles_nothing(
    capsys, monkeypatch
) -> None:
    monkeypatch.setattr(memory, "memory", None)
    options = ["--config", "llama3-70b", "--layout.dp", "512", "--explain"]
    batch = ["--train.global_batch_size", "32768"]
    assert memory.main([*options, *batch]) == 0
    out = capsys.readouterr().out
    assert "layer matrices" in out
    assert "gathered step (layer vectors, layer matrices): layout.zero=1" in out
    assert memory.main([*options, *batch, "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert {each["plan"]["gather"] for each in groups} == {"step"}


@pytest.mark.parametrize(
    ("layout", "runs"),
    [
        (Layout(dp=2, zero=2, offload="parameters"), "; layout.zero=2 runs as stage 3, "),
        (Layout(dp=2, zero=1), "; layout.zero=1 runs as stage 2, "),
        (Layout(dp=2, zero=2), "\n"),
    ],
    ids=str,
)
def test_explain_says_which_stage_of_zero_runs(layout: Layout, runs: str) -> None:
    config = tiny.config(layout, micro_batches=1)
    assert repr(memory.explain(config)).startswith(f"{layout}{runs}")


@pytest.mark.parametrize("option", [["--quiet"], ["--picture", "x.png"]])
def test_explain_has_nothing_else_to_print(option) -> None:
    with pytest.raises(UserError, match="which --explain leaves out; use one"):
        memory.main(["--config", "test-tiny", "--explain", *option])
