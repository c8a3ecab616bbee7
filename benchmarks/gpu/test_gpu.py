"""Compiled steps and their budget, estimates, goals, predictions, and measurements on a GPU."""

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import compiled, estimate, goals, planned, timed, waits
from benchmarks.gpu.compiled import CASES, Case, worse
from benchmarks.gpu.goals import Figure
from benchmarks.lib.pages import RESULTS
from jaxptd.analysis.hlo.kernels import ATTENTION, OTHER, PRODUCT
from jaxptd.analysis.hlo.timeline import host_waits
from jaxptd.analysis.profiling import SCOPES
from jaxptd.errors import UserError
from jaxptd.models.stages import make_plan

FIGURES = {
    "peak_gib": 13.86,
    "kernels": 637,
    "others_ms": 12.34,
    "product_tflop": 24.29,
    "attention_tflop": 2.16,
    "collectives": 10,
    "hidden": 8,
}

# ---- the budget ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", FIGURES)
def test_what_is_worse_is_named(key):
    bad = FIGURES | {key: FIGURES[key] * (0.9 if key == "hidden" else 1.1)}
    (line,) = worse({"124m": bad}, {"124m": FIGURES})
    assert line == f"124m: {key} is {bad[key]:,}, the budget is {FIGURES[key]:,}"
    better = FIGURES | {key: FIGURES[key] * (1.1 if key == "hidden" else 0.9)}
    assert worse({"124m": better}, {"124m": FIGURES}) == []


def test_store_then_check(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(compiled, "measure", lambda *_: dict(FIGURES))
    monkeypatch.setattr(compiled, "PACKAGES", ())
    cases = ["--cases", "124m"]
    assert compiled.main([*cases, "--check"]) == 1
    words = "124m has no budget; python -m benchmarks.gpu.compiled --store"
    assert words in capsys.readouterr().out
    assert compiled.main([*cases, "--store"]) == 0
    assert compiled.read_budget() == {compiled.version(): {"124m": FIGURES}}
    assert compiled.main([*cases, "--check", "--out", str(tmp_path / "page.md")]) == 0
    assert "within the budget" in capsys.readouterr().out
    assert "| 124m | one device | 32 | unrolled |" in (tmp_path / "page.md").read_text()
    with pytest.raises(UserError, match="--check and --store"):
        compiled.main(["--check", "--store"])


def test_the_budget_has_every_case_of_the_newest_version():
    budgets = compiled.read_budget()
    assert set(budgets[planned.newest()]) == set(CASES)
    for cases in budgets.values():
        assert set(cases) <= set(CASES)
        assert all(set(each) == set(FIGURES) for each in cases.values())


def test_compiled_steps_are_within_the_budget():
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("no CUDA compiler here: pip install -e '.[h200]'")
    if compiled.version() not in compiled.read_budget():
        pytest.skip(f"no budget of jax {jax.__version__}: benchmarks.gpu.compiled --store")
    words = "-m benchmarks.gpu.compiled --check --cases 124m 1.5b"
    done = subprocess.run([sys.executable, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- estimates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "found"),
    [
        (("tp",), ("NVLink", estimate.INSIDE)),
        (("dp",), ("network", estimate.BEYOND)),
        (("dp", "tp"), ("network", estimate.BEYOND)),
        ((), ("NVLink", estimate.INSIDE)),
    ],
    ids=str,
)
def test_the_last_axes_of_the_mesh_are_in_a_node(axes: tuple, found: tuple) -> None:
    sizes = {"pp": 8, "dp": 24, "cp": 1, "row": 1, "col": 1, "tp": 8}
    assert estimate.rates(sizes).link(axes) == found
    near = estimate.rates(sizes | {"dp": 8, "tp": 1})
    assert near.link(("dp",)) == ("NVLink", estimate.INSIDE)


@pytest.mark.parametrize(
    ("name", "factor"),
    [("145b 1f1b, full", 1 + 7 / 96), ("145b", 1.0486), ("145b interleaved", 1 + 7 / (5 * 24))],
)
def test_a_pipeline_takes_longer_by_what_its_stages_wait(name: str, factor: float) -> None:
    config = estimate.CASES[name].config
    resolved = types.SimpleNamespace(plan=make_plan(config))
    program = types.SimpleNamespace(resolved=resolved, config=config)
    assert estimate.waiting(program) == pytest.approx(factor, abs=1e-4)


# ---- goals and predictions ----------------------------------------------------------------------


def test_a_figure_is_held_against_its_goal() -> None:
    assert Figure(5.9, 5.9).reached and not Figure(6.0, 5.9).reached
    line = goals.row("hidden", Figure(0.77, 0.9, least=True, form="{:.0%}"))
    assert line == ["hidden", "at least 90%", "77%", "missed"]
    assert goals.row("step, s", Figure(5.63, 5.9))[1:] == ["at most 5.90", "5.63", "reached"]
    assert goals.waiting_of_hops() == pytest.approx(1.0)


def test_timed_goals_on_the_page_are_of_the_stored_run() -> None:
    page = (RESULTS / "goals.md").read_text(encoding="utf-8")
    timed = [name for name in goals.GOALS if "timed" in name]
    assert timed
    for name in timed:
        assert f"| {' | '.join(goals.row(name, goals.GOALS[name]()))} |" in page


def test_the_page_of_speed_lists_all_goals_that_are_missed() -> None:
    made = (RESULTS / "goals.md").read_text(encoding="utf-8").splitlines()
    page = (RESULTS.parents[1] / "docs" / "performance.md").read_text(encoding="utf-8")
    reached, missed = (
        [line for line in made if line.endswith(f"| {x} |")] for x in ("reached", "missed")
    )
    assert missed == [line for line in page.splitlines() if line.endswith("| missed |")]
    assert f"{len(reached)} of the {len(reached) + len(missed)} goals" in page
    assert len(reached) + len(missed) == len(goals.GOALS)


def test_predictions_are_those_of_the_page_and_of_the_compiled_steps() -> None:
    found = {each.name: each for each in planned.compared()}
    text = (RESULTS / "planned.md").read_text(encoding="utf-8")
    assert [each.name for each in found.values() if f"| {' | '.join(each.row)} |" not in text] == []
    gpt = [found[name] for name, case in CASES.items() if isinstance(case, Case)]
    assert max(abs(each.flop_error) for each in gpt) < 0.002
    assert max(abs(each.bytes_error) for each in gpt) < 0.25
    assert abs(sum(each.bytes_error for each in gpt)) / len(gpt) < 0.10


def test_norms_in_kernels_of_their_own_read_once() -> None:
    """XLA's read x twice in forward and both arrays twice in backward: 6 more bytes per element."""
    xla, triton = (planned.compared([name])[0] for name in ("124m", "124m triton"))
    ms = 1e3 * 24 * 6 * 32 * 1024 * 768 / 4.3e12  # norms of 12 layers
    assert xla.milliseconds - triton.milliseconds == pytest.approx(ms, rel=1e-3)


# ---- waits of the host --------------------------------------------------------------------------


def test_the_chains_compute_the_same_and_wait_as_their_names_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "LENGTH", 3)
    x, number = jnp.eye(8), jnp.int32(3)
    want, *others = (np.asarray(way(x, number)) for way in waits.WAYS.values())
    assert all((other == want).all() for other in others) and want[0, 0] != 1
    texts = [jax.jit(way).lower(x, number).compile().as_text() for way in waits.WAYS.values()]
    # A loop waits before each iteration and after the last; one of unknown length counts as one.
    assert [host_waits(text) for text in texts] == [0, 3, 2, 6]
    with pytest.raises(UserError, match="JAX finds no GPU"):
        waits.main([])


# ---- timed --------------------------------------------------------------------------------------

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
    return dict(zip(timed.HEAD, timed.row("124m", FOUND | changes), strict=True))


def test_a_line_has_times_rates_and_what_is_left() -> None:
    found = cells()
    assert (found["step ms, median"], found["estimated"]) == ("60.0", "58.3")
    assert found["matmuls ms, TFLOP/s"] == "32.0, 750"
    assert found["attention ms, TFLOP/s"] == "10.0, 200"
    assert found["others ms, TB/s"] == "14.0, 3.00"
    assert found["idle ms"] == "5.0"
    assert 50 < float(found["planned"]) < 70
    assert float(cells(device="NVIDIA A100")["planned"]) > 1.5 * float(found["planned"])
    assert cells(device="Some GPU")["planned"] == cells(compiled_bytes=0)["compiled"] == ""


def test_the_programs_own_figures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces a small step on this machine, whose kernels do not count as a GPU's."""
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
    assert (found["kernels"], found["other_bytes"]) == (1, 2 * 8 * 4)
    assert found["estimated"] == pytest.approx(2 * 8 * 4 / 3e12)


def test_a_case_that_fails_is_said_and_a_run_that_is_cut_off_keeps_the_cases_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> Any:
        if "350m" in command:
            raise KeyboardInterrupt
        fails = "1.5b" in command
        words = "Traceback\nerror: too large\n" if fails else ""
        return subprocess.CompletedProcess(command, int(fails), json.dumps(FOUND) + "\n", words)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "timed.md"
    with pytest.raises(KeyboardInterrupt):
        timed.main(["--cases", "1.5b", "124m", "350m", "--out", str(out)])
    text = out.read_text()
    assert "| 1.5b | 16 | `full`, loop | not measured: too large |" in text
    assert "| 124m | 32 | `none`, unrolled | 60.0 |" in text
    assert "| 124m | 1.0 | 1.0 | 1.0 | 4.1 | 3.4 | 1.0 | 1.0 |" in text


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "ask", lambda *_: {"error": "JAX finds no GPU"})
    out = tmp_path / "timed.md"
    with pytest.raises(UserError, match="^nothing was measured: JAX finds no GPU$"):
        timed.main(["--cases", "124m", "--out", str(out)])
    with pytest.raises(UserError, match="keep=.*: already exists; name a new directory"):
        timed.main(["--keep", str(tmp_path)])
    with pytest.raises(UserError, match="--steps=1 must be at least 2"):
        timed.main(["--steps", "1"])
    assert not out.exists()
