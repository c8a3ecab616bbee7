"""The command that prints what a device holds."""

import json

import pytest
import tiny

from jaxptd import memory


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
    assert 0 < rows["all that enters the step"]["compiled"] - state < 2000  # tokens, counters
