"""The notebook session in `examples/` runs and shows the output that it promises."""

import runpy
from pathlib import Path

import numpy as np
import pytest

SESSION = Path(__file__).parents[2] / "examples" / "notebook_session.py"
PICTURES = ("held", "loss", "mesh", "moved", "schedule")


@pytest.mark.slow
def test_the_session_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(SESSION))
    run, other = found["run"], found["other"]
    assert run.step == other.step == len(found["rows"]) == 20
    assert np.diff(run.metrics["loss"]).mean() < 0
    assert other.evaluate()["perplexity"] == pytest.approx(run.evaluate()["perplexity"], rel=1e-4)
    assert found["report"].equal
    assert found["moved"].as_formula
    files = sorted(path.name for path in (tmp_path / "session").iterdir())
    assert files == sorted(["run", *(f"{name}.svg" for name in PICTURES)])
    printed = capsys.readouterr().out
    assert len(printed) < 12_000
    for words in ("in each box: tp 2", "Run at step 20 of 20", "equal to one device in float64"):
        assert words in printed
