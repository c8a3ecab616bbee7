"""The command that counts collectives."""

import json

import numpy as np
import pytest
import tiny

from jaxptd import Config, TrainConfig, comms
from jaxptd.analysis import count
from jaxptd.costs.collective import ALL_REDUCE, Collective
from jaxptd.mesh import Axis, Layout

OPTIONS = [f"--model.{k}={v}" for k, v in vars(tiny.MODEL).items() if v is not None]


@pytest.mark.slow
def test_the_command_prints_json(capsys) -> None:
    assert comms.main([*OPTIONS, "--layout.dp=2", "--layout.tp=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == dict.fromkeys(Axis, 1) | {"dp": 2, "tp": 4}
    assert found["jaxpr"] == found["formula"]
    rows = {(r["kind"], *r["axes"]): r for r in found["jaxpr"]}
    assert rows[ALL_REDUCE, "tp"]["wire_bytes"] == rows[ALL_REDUCE, "tp"]["bytes"] * 3 // 2
    assert np.sum([r["count"] for r in found["per_layer"]]) == 4


def test_nothing_need_be_compiled(monkeypatch, capsys) -> None:
    options = [*OPTIONS, "--layout.tp=2", "--compiled", "false"]
    monkeypatch.setattr(count, "compile_to_read", None)
    assert comms.main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "compiled" not in found and found["jaxpr"] == found["formula"] != []
    assert comms.main(options) == 0
    assert "compiled" not in capsys.readouterr().out


@pytest.mark.slow
def test_without_the_compiled_program_the_other_counts_are_the_same() -> None:
    config = Config(tiny.MODEL, Layout(tp=2), train=TrainConfig(platform="cpu"))
    whole, found = (comms.comms(config, compiled=each).as_dict() for each in (True, False))
    assert whole.pop("compiled") and found == whole


def test_the_command_prints_tables_or_its_verdict_and_draws(capsys, monkeypatch, tmp_path) -> None:
    moved = Collective(ALL_REDUCE, ("tp",), 4, 128)
    report = comms.CommsReport(Layout(tp=4), "4 devices", [moved], [moved], [moved], [moved])
    monkeypatch.setattr(comms, "comms", lambda config, compiled: report)
    assert comms.main([*OPTIONS, "--layout.tp=4", "--picture", str(tmp_path / "moved.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tp=4 on 4 devices"
    assert sum("all-reduce" in line for line in lines) == 4
    assert "tp" in (tmp_path / "moved.svg").read_text()
    assert comms.main([*OPTIONS, "--layout.tp=4", "--quiet"]) == 0
    assert capsys.readouterr().out == lines[-1] + "\n" == report.verdict + "\n"
