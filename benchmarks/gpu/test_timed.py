"""The table of timed steps: its columns, what is said without a GPU, which cases there are."""

import json
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.gpu import timed
from benchmarks.gpu.timed import HEAD, ONE, row
from jaxptd.analysis.hlo.kernels import ATTENTION, OTHER, PRODUCT
from jaxptd.analysis.profiling import SCOPES
from jaxptd.errors import UserError

FOUND: dict[str, Any] = {
    "device": "NVIDIA H200",
    "seconds": [0.06] * 9 + [0.07],
    "named": 0.061,
    "peak_bytes": 3 * 2**30,
    "compiled_bytes": 2 * 2**30,
    "product_flop": 24e12,
    "attention_flop": 2e12,
    "kernels": 1234,
    "other_bytes": 42e9,
    "estimated": 0.0583,
    "kinds": {PRODUCT: 0.032, ATTENTION: 0.010, OTHER: 0.014},
    "others": dict.fromkeys(SCOPES, 0.001) | {"mlp": 0.0041, "loss": 0.0034},
}


def cells(**changes: Any) -> dict[str, str]:
    return dict(zip(HEAD, row("124m", FOUND | changes), strict=True))


def test_a_line_has_times_rates_and_what_is_left() -> None:
    found = cells()
    assert found["step ms, median"] == "60.0"
    assert found["estimated"] == "58.3"
    assert found["products ms, TFLOP/s"] == "32.0, 750"
    assert found["attention ms, TFLOP/s"] == "10.0, 200"
    assert found["others ms, TB/s"] == "14.0, 3.00"
    assert found["idle ms"] == "5.0"
    assert (found["kernels"], found["peak GiB"], found["compiled"]) == ("1,234", "3.0", "2.0")
    assert cells(compiled_bytes=0)["compiled"] == ""


def test_the_plan_is_that_of_the_gpu() -> None:
    assert 50 < float(cells()["planned"]) < 70
    assert float(cells(device="NVIDIA A100")["planned"]) > 1.5 * float(cells()["planned"])
    assert cells(device="Some GPU")["planned"] == ""


def test_every_case_is_of_one_gpu() -> None:
    assert {"124m", "1.5b dots", "1.5b unrolled"} <= set(ONE)
    assert all(case.config.layout.num_devices == 1 for case in ONE.values())


def test_the_programs_own_figures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces a small step here, whose kernels count as none of a GPU's."""
    copied = [{"args": {"hlo_op": "y"}, "dur": 10.0}] * timed.TRACED
    named = 'metadata={op_name="jit(step)/norm/add"}'
    monkeypatch.setattr(timed, "events", lambda directory: copied)
    monkeypatch.setattr(jax.profiler, "trace", lambda directory: jax.named_scope("trace"))
    text = "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
    text += "  ROOT %y = f32[8]{0} copy(%x), " + named + "\n}\n"
    runs: list[int] = []
    found = timed.kinds(lambda: lambda: runs.append(1), text, None)
    assert len(runs) == timed.TRACED
    assert found["kinds"][OTHER] == pytest.approx(10e-6)
    assert found["others"] == pytest.approx(dict.fromkeys(SCOPES, 0.0) | {"norm": 10e-6})
    assert found["kernels"] == 1
    assert found["other_bytes"] == 2 * 8 * 4
    assert found["estimated"] == pytest.approx(2 * 8 * 4 / 3e12)


def test_a_case_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Any:
        fails = "1.5b" in command
        words = "Traceback\nerror: too large\n" if fails else ""
        return subprocess.CompletedProcess(command, int(fails), json.dumps(FOUND) + "\n", words)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "timed.md"
    assert timed.main(["--cases", "1.5b", "124m", "--out", str(out)]) == 0
    text = out.read_text()
    assert "| 1.5b | 16 | `full`, loop | not measured: too large |" in text
    assert "NVIDIA H200; " in text
    assert "| 124m | 32 | `none`, unrolled | 60.0 |" in text
    assert "| other kernels, ms | embedding | norm | attention | mlp | loss |" in text
    assert "| 124m | 1.0 | 1.0 | 1.0 | 4.1 | 3.4 | 1.0 | 1.0 |" in text


def test_a_run_that_is_cut_off_keeps_the_cases_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(name: str, *_: Any) -> Any:
        if name == "1.5b":
            raise KeyboardInterrupt
        return FOUND

    monkeypatch.setattr(timed, "ask", ask)
    out = tmp_path / "timed.md"
    with pytest.raises(KeyboardInterrupt):
        timed.main(["--cases", "124m", "350m", "1.5b", "--out", str(out)])
    assert [out.read_text().count(f"| {name} | ") for name in ("124m", "350m")] == [2, 2]


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "ask", lambda *_: {"error": "JAX finds no GPU"})
    out = tmp_path / "timed.md"
    with pytest.raises(UserError, match="^nothing was measured: JAX finds no GPU$"):
        timed.main(["--cases", "124m", "--out", str(out)])
    with pytest.raises(UserError, match="keep=.*: is there already; name a new directory"):
        timed.main(["--keep", str(tmp_path)])
    with pytest.raises(UserError, match="--steps=1 must be at least 2"):
        timed.main(["--steps", "1"])
    with pytest.raises(UserError, match="JAX finds no GPU"):
        timed.measure(ONE["124m"], 2)
    assert not out.exists()
