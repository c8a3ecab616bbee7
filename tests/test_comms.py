"""The command that counts collectives."""

import json

import numpy as np
import tiny

from jaxptd import comms
from jaxptd.analysis.collective import ALL_REDUCE


def test_the_command_prints_json(capsys) -> None:
    options = [f"--model.{k}={v}" for k, v in vars(tiny.MODEL).items() if v is not None]
    assert comms.main([*options, "--layout.dp=2", "--layout.tp=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"pp": 1, "dp": 2, "cp": 1, "row": 1, "col": 1, "tp": 4}
    assert found["jaxpr"] == found["formula"]
    rows = {(r["kind"], *r["axes"]): r for r in found["jaxpr"]}
    assert rows[ALL_REDUCE, "tp"]["wire_bytes"] == rows[ALL_REDUCE, "tp"]["bytes"] * 3 // 2
    assert np.sum([r["count"] for r in found["per_layer"]]) == 4
