"""A step is the sum of its terms, whose FLOPs and bytes agree with the literature."""

import dataclasses

import pytest
from published import h100_row, table_1

from jaxptd.costs.collective import ALL_REDUCE
from jaxptd.costs.program import Parallelism
from jaxptd.costs.terms import total
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.planner.cost import Placed, StepDescription, step_time
from jaxptd.planner.cost.collectives import BESIDE, collective_term
from jaxptd.planner.cost.layer import layer_terms
from jaxptd.planner.programs import (
    MEGATRON_2021,
    MEGATRON_2022,
    NEMO,
    PROGRAMS,
    published_collectives,
)
from jaxptd.planner.rows import Shape, paper_flops

ROWS = [*table_1(), h100_row()]
A100 = find_accelerator("a100")
GPT = Shape(24, 4096, 32, 51200, 2048)
BLOCKS = GPT.architecture.stacks[0]


def description(
    implementation=MEGATRON_2021, shape: Shape = GPT, **parallelism: object
) -> StepDescription:
    sizes = {"gpus": 8, "global_batch": 16, **parallelism}
    return StepDescription(shape.architecture, Parallelism(**sizes), implementation, Cluster(A100))


def predict(each: StepDescription) -> float:
    return step_time(each, published_collectives(each)).seconds


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_parts_sum_to_the_step(row) -> None:
    step = row.predict(find_accelerator(row.hardware))
    assert sum(term.seconds for term in step.terms) == pytest.approx(step.seconds, rel=1e-12)
    assert sum(step.by_kind().values()) == pytest.approx(step.seconds, rel=1e-12)
    assert all(term.seconds >= 0 for term in step.terms)
    for term in step.terms:
        amount = term.flops if term.resource == "matmuls" else term.bytes
        assert term.rate * term.seconds == pytest.approx(amount if term.rate else 0)


@pytest.mark.parametrize(
    "row", [row for row in table_1() if row.parallelism.pp == 1], ids=lambda r: r.name
)
def test_flops_are_those_of_the_paper(row) -> None:
    step = row.predict(A100)
    flops = sum(term.flops for term in step.terms) * row.parallelism.gpus
    assert flops == pytest.approx(paper_flops(row.shape, row.parallelism.global_batch), rel=1e-12)


def test_flops_of_a_pipeline_are_those_of_its_stages() -> None:
    one, four = description(tp=2), description(tp=2, pp=4)
    layers = "mlp in forward"
    runs = [
        next(term.runs for term in step_time(each, ()).terms if term.name == layers)
        for each in (one, four)
    ]
    assert runs == [24 * 4, 6 * 16]


def test_the_bubble_is_what_the_formula_gives() -> None:
    shape = dataclasses.replace(GPT, vocab_size=1)
    plain, chunks = (
        next(t for t in step_time(each, ()).terms if t.name == "bubble").seconds
        for each in (
            description(shape=shape, tp=1, pp=8),
            description(shape=shape, tp=1, pp=8, virtual_stages=3),
        )
    )
    assert 0 < chunks < plain / 2
    assert next(t for t in step_time(description(), ()).terms if t.name == "bubble").seconds == 0


@pytest.mark.parametrize(
    ("remat", "again"),
    [
        ("none", set()),
        ("dots", {"residual stream", "activation and heads"}),
        ("attention", {"scores", "softmax", "context"}),
        (
            "full",
            {"qkv", "attention output", "mlp in", "mlp out", "scores", "softmax", "context"}
            | {"residual stream", "activation and heads"},
        ),
    ],
)
def test_remat_runs_again_what_it_says(remat: str, again: set[str]) -> None:
    names = [term.name for term in layer_terms(description(remat=remat), BLOCKS).backward(remat)]
    assert {name.removesuffix(" forward again") for name in names if "again" in name} == again


def test_collectives_beside_products_are_hidden_as_far_as_these_last() -> None:
    each = description(tp=8)
    weights = total(layer_terms(each, BLOCKS).weight_gradients)
    placed = Placed("sums", ALL_REDUCE, ("tp",), 2, 1e9, "backward")
    alone = collective_term(each, placed).seconds
    assert alone > weights
    bare = step_time(each, ()).seconds
    layers = 24 * each.parallelism.micro_batches
    exposed = step_time(each, [placed]).seconds - bare
    hidden = placed._replace(under="weight gradients")
    left = step_time(each, [hidden]).seconds - bare
    assert exposed == pytest.approx(layers * alone)
    assert left == pytest.approx(layers * (alone - BESIDE * weights))
    small = hidden._replace(bytes=1e3)
    assert step_time(each, [small]).seconds == pytest.approx(bare)


def test_places_run_as_often_as_they_say() -> None:
    each = description(tp=4, pp=2)
    bare = step_time(each, ()).seconds
    placed = Placed("sums", ALL_REDUCE, ("tp",), 1, 1e9, "forward")
    alone, m = collective_term(each, placed).seconds, each.parallelism.micro_batches
    costs = {
        place: step_time(each, [placed._replace(place=place)]).seconds - bare
        for place in ("forward", "backward", "last", "step")
    }
    pipeline = m + 1  # the slowest stage's micro-batches, and the other stage once
    assert costs["forward"] == pytest.approx(costs["backward"])
    assert costs["forward"] == pytest.approx(12 * pipeline * alone)
    assert costs["last"] == pytest.approx(m * alone)
    assert costs["step"] == pytest.approx(alone)


def test_sequence_parallelism_and_fused_sums_are_faster() -> None:
    whole = description(tp=8, remat="full")
    parts = description(MEGATRON_2022, tp=8, remat="attention", sequence_parallel=True)
    assert predict(parts) < predict(dataclasses.replace(whole, implementation=MEGATRON_2022))
    assert predict(dataclasses.replace(whole, implementation=MEGATRON_2022)) < predict(whole)


def test_less_memory_traffic_with_more_tensor_parallelism_and_flash() -> None:
    names = ("residual stream forward", "activation and heads forward")
    by_tp = [
        {term.name: term.bytes for term in layer_terms(each, BLOCKS).elementwise}
        for each in (
            description(tp=1),
            description(tp=8),
            description(tp=8, sequence_parallel=True),
        )
    ]
    stream, inner = ([found[name] for found in by_tp] for name in names)
    assert [stream[0] / x for x in stream] == [1, 1, 8]
    assert [inner[0] / x for x in inner] == [1, 8, 8]
    long = dataclasses.replace(GPT, seq_length=8192)
    unfused, flash = (
        total(layer_terms(description(implementation, long), long.architecture.stacks[0]).attention)
        for implementation in (MEGATRON_2021, NEMO)
    )
    assert flash < unfused / 3


def test_every_program_predicts_every_layout() -> None:
    for implementation in PROGRAMS.values():
        for parallelism in (
            {"tp": 8, "sequence_parallel": True},
            {"tp": 2, "pp": 4},
            {"cp": 2, "zero": 1},
            {"zero": 3, "zero_group": 4},
            {"zero": 3, "tp": 2},
        ):
            assert predict(description(implementation, **parallelism)) > 0


def test_a_table_has_a_row_for_each_term() -> None:
    step = ROWS[4].predict(A100)
    lines = str(step.table()).splitlines()
    assert len(lines) == 2 + len(step.terms)
    assert lines[0] == f"a step of {step.seconds:.3f} s"
    assert lines[2].split()[-2:] == ["3.38%", "matmuls"]
