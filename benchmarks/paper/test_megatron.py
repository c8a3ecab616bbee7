"""Megatron's table 1 (published figures agree, rates follow from seconds) and process groups."""

import dataclasses

import pytest

from benchmarks.lib.compiler import Memory
from benchmarks.paper import megatron
from benchmarks.paper.megatron import GPU, Model, published
from benchmarks.published.fit import FittedTable, constant_rate, table_1
from jaxptd.hardware import find_accelerator
from jaxptd.planner.rows import Row
from jaxptd.planner.validation import Outcome

GIB = 2**30
ROWS = table_1()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_published_seconds_give_the_published_rates(row: Row) -> None:
    model, figures = Model(row, row.seconds), published()[row.name]
    assert model.teraflops == pytest.approx(figures["teraflops_per_gpu"])
    # TFLOP/s have three digits, so what follows from them is known to half a TFLOP/s per GPU.
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
    layer = 2 * s * h * (3 * h + h + 4 * h + 4 * h) + 2 * s * s * h * 2  # weights, and scores
    logits = 2 * s * h * V
    passes = 1 + 1 + 2  # forward, recomputation, and backward
    expected = row.parallelism.global_batch * (passes * l * layer + 3 * logits)
    assert row.flops == pytest.approx(expected, rel=1e-12)
    assert find_accelerator(GPU).bf16_flops == 312e12


def test_the_tables_of_weak_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """From predictions that are all 5 % too slow."""
    monkeypatch.setattr(megatron, "PACKAGES", ())
    outcomes = tuple(Outcome(row, 1.05 * row.seconds, 0.06) for row in ROWS)
    found = FittedTable("", outcomes, 0.06, constant_rate(ROWS), {})
    memory = Memory(40 * GIB, 10 * GIB, 12.3)
    models = megatron.models(found, compile_steps=False)
    text = megatron.weak_scaling(models, found)
    assert "GiB" not in text and "mean 5.0%, worst 5.0%" in text and "6.8% and 11.7%" in text
    assert "| 3,072 | 107.76 | 102.63 | 155 | 163 | 50 | 52 | 476.9 | 502.0 | +5.0% |" in text
    models = [dataclasses.replace(model, memory=memory) for model in models]
    line = "| gpt-1.7b | 1.65 | 1.7 | 32 | 1 | 1 | 32 | 1 | 512 | 1 x 16 | 40.00 | 10.00 | 12 |"
    assert line in megatron.weak_scaling(models, found)


@pytest.mark.slow
def test_a_model_planned_afresh() -> None:
    row, cells = ROWS[0], megatron.planned(ROWS[0], "h200")
    seconds, rate, percent, gib, times = map(float, cells[6:])
    assert cells[:3] == ["gpt-1.7b", "32", "512"] and "dp=32" in cells[3]
    assert rate == pytest.approx(row.flops / seconds / 32e12, rel=0.01)
    assert percent == pytest.approx(rate / 9.895, abs=0.6)
    assert times == pytest.approx(row.seconds / seconds, abs=0.06)
    assert 30 < gib < 131


def test_groups_are_the_documented_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row[1:2] + row[-1:] for row in megatron.group_rows()] == [
        [number, "the same"] for number in ("8", "4", "8", "2", "4", "4")
    ]
    assert megatron.groups().count("the same") == 6 + 4
    assert megatron.formula(1, 2) == [[2, 3], [6, 7]] == megatron.layers_of(1, 2)
    other = dataclasses.replace(megatron.LAYOUT, dp=4, tp=1)
    monkeypatch.setattr(megatron, "LAYOUT", other)
    assert [row[-1] for row in megatron.group_rows()].count("the same") < 6
