"""Records of frameworks: how they differ in what they send, recompute and hold."""

import dataclasses
from typing import Any

import pytest
from framework_layouts import workload

from jaxptd.costs.collective import ALL_TO_ALL, REDUCE_SCATTER
from jaxptd.costs.program import Parallelism
from jaxptd.planner.cost import Placed
from jaxptd.planner.frameworks.framework import Setup, Workload
from jaxptd.planner.frameworks.memory import memory_of
from jaxptd.planner.frameworks.planning import FRAMEWORKS
from jaxptd.planner.frameworks.search import FrameworkSearch, describe, time_of

LOAD = workload("llama3-8b", [], 16)


def sent(name: str, load: Workload = LOAD, **axes: Any) -> list[Placed]:
    """Everything that a framework sends with a layout."""
    parallelism = Parallelism(load.gpus, load.batch, **axes)
    description = describe(FRAMEWORKS[name], load, Setup(parallelism, ""))
    return FRAMEWORKS[name].collectives(description)


def test_zero_2_of_deepspeed_reduces_in_every_micro_batch() -> None:
    def scattered(zero: int) -> list[Placed]:
        return [each for each in sent("deepspeed", zero=zero) if each.kind == REDUCE_SCATTER]

    (once,), (often,) = scattered(1), scattered(2)
    assert (once.place, often.place, often.under) == ("step", "backward", "layer")
    (stack,) = LOAD.architecture.stacks
    assert often.bytes == 2 * stack.weights


def test_ulysses_trades_heads_instead_of_passing_keys_on() -> None:
    """Each device sends all but 1/cp of queries, keys, values and the output, in 16 bits."""
    traded = [each for each in sent("deepspeed", cp=4, zero=3) if each.axes == ("cp",)]
    assert {each.kind for each in traded} == {ALL_TO_ALL}
    tokens = 8192 // 4
    forward = sum(each.count * each.bytes for each in traded if each.place == "forward")
    assert forward == 2 * tokens * (2 * 4096 + 2 * 1024) * 3 / 4
    again = sent("deepspeed", cp=4, zero=3, remat="full")
    backward = [each for each in again if each.kind == ALL_TO_ALL and each.place == "backward"]
    assert sum(each.count * each.bytes for each in backward) == 2 * forward


def test_only_a_shared_table_has_its_gradient_summed_over_the_ends() -> None:
    tied = workload("gpt2-1.5b", [], 16)
    for name, load, number in (("megatron", LOAD, 0), ("megatron", tied, 1), ("maxtext", LOAD, 0)):
        ends = [each for each in sent(name, load, pp=2) if each.axes == ("ends",)]
        assert len(ends) == number


def test_torchtitan_saves_gathered_inputs_and_gathers_them_again_only_for_op() -> None:
    def gathers(remat: str) -> set[str]:
        axes = {"tp": 8, "sequence_parallel": True, "zero": 3, "remat": remat}
        return {e.name for e in sent("torchtitan", **axes) if e.axes == ("tp",)}

    assert "gathers again for weights" not in gathers("none") | gathers("dots") | gathers("full")
    assert "gathers forward again" in gathers("dots") & gathers("full")
    assert "gathers forward again" not in gathers("none")


def test_op_recomputes_half_of_the_matmuls() -> None:
    framework = FRAMEWORKS["torchtitan"]
    seconds = {}
    for remat in ("none", "dots", "full"):
        setup = Setup(Parallelism(16, 128, zero=3, remat=remat), remat)
        terms = time_of(framework, describe(framework, LOAD, setup), setup).terms
        again = (term for term in terms if term.kind == "products" and "again" in term.name)
        seconds[remat] = sum(term.seconds for term in again)
    assert seconds["none"] == 0
    assert seconds["dots"] == pytest.approx(seconds["full"] / 2, rel=1e-6)


def test_micro_batches_that_a_stage_holds() -> None:
    """1F1B holds one for each later stage, interleaved a part more, MaxText all of them."""
    plain = Parallelism(16, 128, tp=1, pp=4)
    chunks = dataclasses.replace(plain, virtual_stages=2, schedule="interleaved")
    megatron, maxtext = FRAMEWORKS["megatron"], FRAMEWORKS["maxtext"]
    assert [megatron.passes_held(plain, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [megatron.passes_held(chunks, stage) for stage in (0, 3)] == [(2 * 3 + 4 + 1) / 2, 2.5]
    assert maxtext.passes_held(plain, 0) == plain.micro_batches + 3
    assert maxtext.passes_held(chunks, 0) == plain.micro_batches + 3 / 2
    assert maxtext.passes_held(Parallelism(16, 128), 0) == 1


def test_a_layer_at_work_counts_where_it_exceeds_the_logits() -> None:
    framework, load = FRAMEWORKS["megatron"], workload("llama3-8b", ["--model.vocab_size=1024"], 16)
    setup = Setup(Parallelism(16, 128, zero=1, remat="full"), "full")
    parts = memory_of(framework, describe(framework, load, setup), load.model, setup)
    (stack,) = load.architecture.stacks
    each = stack.tokens * stack.hidden
    assert parts["one layer"] == pytest.approx((1.5 * 34 - 2) * each, rel=0.01)
    assert parts["activations"] == pytest.approx(32 * 2 * each)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_layout_of_a_ranking_has_other_axes(name: str) -> None:
    search = FrameworkSearch(FRAMEWORKS[name], LOAD, 70 * 2**30)
    found = [each for each, _ in zip(search, range(6), strict=False)]
    words = [FRAMEWORKS[name].layout_words(each.setup).split(" x")[0] for each in found]
    assert len(set(words)) == len(words)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
