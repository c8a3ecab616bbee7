"""The budget of compiled steps: figures, comparison, and the message for a figure over it."""

import importlib.util
import subprocess
import sys

import jax
import pytest

from benchmarks.gpu import compiled
from benchmarks.gpu.compiled import CASES, row, worse
from jaxptd.errors import UserError

FIGURES = {
    "peak_gib": 13.86,
    "kernels": 637,
    "others_ms": 12.34,
    "product_tflop": 24.29,
    "attention_tflop": 2.16,
    "collectives": 10,
    "hidden": 8,
}


def test_a_line_of_the_table():
    cells = dict(zip(compiled.HEAD, row("124m", FIGURES), strict=True))
    assert cells["case"] == "124m"
    assert (cells["layers"], cells["B"], cells["others, ms"]) == ("unrolled", "32", "12.34")
    assert cells["over products or attention"] == "8"


def test_a_packaged_config_is_compiled_with_its_options():
    cells = dict(zip(compiled.HEAD, row("llama3-70b dp8", FIGURES), strict=True))
    assert cells["layout"] == "dp=8 tp=8 sequence_parallel collective_matmul zero=1"
    assert cells["B"] == "128 in 16"


@pytest.mark.parametrize("key", FIGURES)
def test_what_is_worse_is_named(key):
    bad = FIGURES | {key: FIGURES[key] * (0.9 if key == "hidden" else 1.1)}
    (line,) = worse({"124m": bad}, {"124m": FIGURES})
    assert line == f"124m: {key} is {bad[key]:,}, the budget is {FIGURES[key]:,}"
    better = FIGURES | {key: FIGURES[key] * (1.1 if key == "hidden" else 0.9)}
    assert worse({"124m": better}, {"124m": FIGURES}) == []


def test_a_case_without_a_budget_is_named():
    assert worse({"350m": FIGURES}, {}) == [
        "350m has no budget; python -m benchmarks.gpu.compiled --store"
    ]


def test_store_then_check(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(compiled, "measure", lambda *_: dict(FIGURES))
    monkeypatch.setattr(compiled, "versions", lambda *_: "versions")

    cases = ["--cases", "124m"]
    assert compiled.main([*cases, "--check"]) == 1
    assert "124m has no budget" in capsys.readouterr().out
    assert compiled.main([*cases, "--store"]) == 0
    assert compiled.read_budget() == {compiled.version(): {"124m": FIGURES}}
    assert compiled.main([*cases, "--check", "--out", str(tmp_path / "page.md")]) == 0
    assert "within the budget" in capsys.readouterr().out
    assert "| 124m | one device | 32 | unrolled |" in (tmp_path / "page.md").read_text()
    with pytest.raises(UserError, match="--check and --store"):
        compiled.main(["--check", "--store"])


def test_the_budget_has_every_case_of_the_newest_version():
    budgets = compiled.read_budget()
    newest = max(budgets, key=lambda name: [int(number) for number in name.split(".")])
    assert set(budgets[newest]) == set(CASES)
    for cases in budgets.values():
        assert set(cases) <= set(CASES)
        assert all(set(each) == set(FIGURES) for each in cases.values())


def test_compiled_steps_are_within_the_budget():
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("no CUDA compiler here: pip install -e '.[h200]'")
    if compiled.version() not in compiled.read_budget():
        pytest.skip(
            f"no budget of jax {jax.__version__}: python -m benchmarks.gpu.compiled --store"
        )
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.compiled",
        "--check",
        "--cases",
        "124m",
        "1.5b",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
