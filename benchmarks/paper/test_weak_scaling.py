"""Weak scaling of Megatron's table 1: published figures agree, and rates follow from seconds."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import pages, weak_scaling
from benchmarks.paper.memory import Memory, compiled_memory
from benchmarks.paper.weak_scaling import GPU, Model, published
from benchmarks.paper.weak_scaling_picture import PICTURE
from benchmarks.published.fit import FittedTable, constant_rate, table_1
from jaxptd.errors import UserError
from jaxptd.hardware import find_accelerator
from jaxptd.planner.rows import Row
from jaxptd.planner.validation import Outcome

GIB = 2**30
ROWS = table_1()


def predicted(rows: list[Row]) -> FittedTable:
    """Predictions that are all 5 % too slow."""
    outcomes = tuple(Outcome(row, 1.05 * row.seconds, 0.06) for row in rows)
    return FittedTable("", outcomes, 0.06, constant_rate(rows), {})


def as_published(row: Row) -> Model:
    """A model whose predicted seconds are the published ones."""
    return Model(row, published()[row.name], row.seconds)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_published_seconds_give_the_published_rates(row: Row) -> None:
    model, figures = as_published(row), published()[row.name]
    assert model.teraflops == pytest.approx(figures["teraflops_per_gpu"])
    # TFLOP/s have three digits, so what follows from them is known to half a TFLOP/s a GPU.
    half = 0.5 / figures["teraflops_per_gpu"]
    assert abs(model.percent - figures["percent_of_peak"]) <= 0.5 + half * model.percent
    slack = half * model.petaflops + 0.05
    assert abs(model.petaflops - figures["aggregate_petaflops"]) <= slack
    assert round(model.parameters / 1e9, 1) == figures["params_billion"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_papers_flops_are_those_of_its_products(row: Row) -> None:
    s, h, l, V = (  # noqa: E741
        getattr(row.shape, name)
        for name in ("seq_length", "hidden_size", "num_layers", "vocab_size")
    )
    layer = 2 * s * h * (3 * h + h + 4 * h + 4 * h) + 2 * s * s * h * 2  # products, and scores
    logits = 2 * s * h * V
    passes = 1 + 1 + 2  # forward, once more, and backward
    assert row.flops == pytest.approx(
        row.parallelism.global_batch * (passes * l * layer + 3 * logits), rel=1e-12
    )


def test_the_peak_is_the_papers() -> None:
    assert find_accelerator(GPU).bf16_flops == 312e12


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(40 * GIB, 10 * GIB, 12.3)
    monkeypatch.setattr(weak_scaling, "predictions", lambda: predicted(ROWS))
    monkeypatch.setattr(weak_scaling, "compiled_memory", lambda config: memory)
    monkeypatch.setattr(weak_scaling, "PLUGINS", "flax")
    path = tmp_path / "paper_weak_scaling.md"
    assert paper.main(["--weak-scaling", "--compile", "--out", str(tmp_path)]) == 0
    text = path.read_text(encoding="utf-8")
    line = "| gpt-1.7b | 1.65 | 1.7 | 32 | 1 | 1 | 32 | 1 | 512 | 1 x 16 | 40.00 | 10.00 | 12 |"
    assert line in text and "peak GiB" in text and "stand-in for A100s" in text
    assert "| 3,072 | 107.76 | 102.63 | 155 | 163 | 50 | 52 | 476.9 | 502.0 | +5.0% |" in text
    assert "mean 5.0%, worst 5.0%" in text and "6.8% and 11.7%" in text
    assert f"({PICTURE})" in text and ">predicted<" in (tmp_path / PICTURE).read_text()


def test_without_compiling_there_is_no_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(weak_scaling, "predictions", lambda: predicted(ROWS[:2]))
    assert paper.main(["--weak-scaling"]) == 0
    text = capsys.readouterr().out
    assert "GiB" not in text and "compiled" not in text and PICTURE not in text
    assert "| gpt-1.7b | 32 | 3.70 | 3.53 | 130 | 137 |" in text


@pytest.mark.slow
def test_a_model_planned_afresh(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(pages, "table_1", lambda: ROWS[:1])
    assert paper.main(["--weak-scaling", "--fresh"]) == 0
    text = capsys.readouterr().out
    (line,) = (line for line in text.split("## H200")[1].splitlines() if "gpt-1.7b" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    seconds, rate, percent, gib, times = map(float, cells[6:])
    row = ROWS[0]
    assert cells[:3] == ["gpt-1.7b", "32", "512"] and "dp=32" in cells[3]
    assert rate == pytest.approx(row.flops / seconds / 32e12, rel=0.01)
    assert percent == pytest.approx(rate / 9.895, abs=0.6)
    assert times == pytest.approx(row.seconds / seconds, abs=0.06)
    assert 30 < gib < 131 and "planned" in text


def test_compiling_has_no_effect_on_plans() -> None:
    with pytest.raises(UserError, match="--compile has no effect with --weak-scaling --fresh"):
        paper.main(["--weak-scaling", "--fresh", "--compile"])
    with pytest.raises(UserError, match="--fresh has no effect with --table 2"):
        paper.main(["--table", "2", "--fresh"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-1.7b", "gpt-1008.0b"])
def test_a_model_compiles_for_all_of_its_gpus(name: str) -> None:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("no CUDA compiler here: pip install -e '.[h200]'")
    (row,) = (row for row in ROWS if row.name == name)
    memory = compiled_memory(as_published(row).config)
    assert memory.state < memory.peak < find_accelerator(GPU).hbm_bytes
