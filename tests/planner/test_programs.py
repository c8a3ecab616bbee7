"""Collectives of published programs against counts in the literature."""

import collections
import dataclasses

from jaxptd.costs.program import Parallelism
from jaxptd.hardware import Cluster, Group, find_accelerator
from jaxptd.planner.cost import Placed, StepDescription
from jaxptd.planner.programs import (
    MEGATRON_2021,
    MEGATRON_2022,
    NEMO,
    published_collectives,
    record_of,
)
from jaxptd.planner.rows import Shape

GPT = Shape(24, 4096, 32, 51200, 2048)
X = 2.0 * 2048 * 4096  # bytes of a micro-batch's activation
LAYER = 12 * 4096**2  # elements


def placed(implementation=MEGATRON_2021, **parallelism: object) -> list[Placed]:
    sizes = {"gpus": 16, "global_batch": 16, **parallelism}
    cluster = Cluster(find_accelerator("a100"))
    return published_collectives(
        StepDescription(GPT.architecture, Parallelism(**sizes), implementation, cluster)
    )


def counts(found: list[Placed], *places: str) -> dict[tuple[str, str], float]:
    """Number of executions by kind and axes, for collectives at some places."""
    total: collections.Counter = collections.Counter()
    for each in found:
        if each.place in places:
            total[each.kind, "+".join(each.axes)] += each.count
    return dict(total)


def test_maxtext_adds_up_only_gradients_of_several_micro_batches_that_are_whole() -> None:
    def bytes_added(**parallelism: int) -> int:
        return record_of("maxtext", Parallelism(8, 16, **parallelism)).accumulate

    assert bytes_added() == 10
    assert bytes_added(micro_batch=2) == bytes_added(zero=3) == 0
    assert record_of("nemo", Parallelism(8, 16)) == NEMO


def test_two_sums_forward_and_two_backward() -> None:
    found = placed(tp=8)
    assert counts(found, "forward") == counts(found, "backward") == {("all-reduce", "tp"): 2}
    assert {each.bytes for each in found if each.axes == ("tp",)} == {X}
    again = placed(tp=8, remat="full")
    assert counts(again, "backward") == {("all-reduce", "tp"): 4}
    assert counts(placed(tp=8, remat="attention"), "backward") == {("all-reduce", "tp"): 2}


def test_sequence_parallelism_moves_the_same_and_two_gathers_more() -> None:
    found = placed(MEGATRON_2022, tp=8, sequence_parallel=True)
    both = counts(found, "forward", "backward")
    assert both == {("all-gather", "tp"): 6, ("reduce-scatter", "tp"): 4}


def test_what_hides_tensor_parallel_collectives() -> None:
    unders = [
        {each.name: each.under for each in placed(implementation, tp=8, sequence_parallel=sharded)}
        for implementation, sharded in (
            (MEGATRON_2021, False),
            (MEGATRON_2022, False),
            (MEGATRON_2022, True),
            (NEMO, True),
        )
    ]
    old, summed, sharded, pieces = unders
    assert set(old.values()) == {"nothing", "last backward"}
    assert summed["sums backward"] == "weight gradients"
    assert summed["sums forward"] == sharded["scatters forward"] == "nothing"
    assert sharded["gathers again for weights"] == "input gradients"
    assert sharded["gathers of gradients"] == "nothing"
    assert pieces["gathers forward"] == pieces["scatters backward"] == "products"


def test_gradients_are_reduced_once_under_backward_without_a_pipeline() -> None:
    (alone,) = [each for each in placed(tp=8) if each.place == "step"]
    assert (alone.kind, alone.under) == ("all-reduce", "last backward")
    assert alone.bytes == 2 * (24 * LAYER + 51200 * 4096) / 8
    piped = {each.name: each for each in placed(tp=4, pp=2) if each.place == "step"}
    assert piped["gradients"].under == "nothing"
    assert piped["gradients"].bytes == 2 * (12 * LAYER + 51200 * 4096) / 4
    assert piped["gradient of the embedding"].bytes == 2 * 51200 * 4096 / 4


def test_zero() -> None:
    one = counts(placed(NEMO, zero=1), "step")
    assert one == {("reduce-scatter", "cp+dp"): 1, ("all-gather", "cp+dp"): 1}
    three = placed(NEMO, zero=3)
    assert counts(three, "forward") == {("all-gather", "shard"): 1}
    assert counts(three, "backward") == {("all-gather", "shard"): 1, ("reduce-scatter", "shard"): 1}
    assert counts(three, "step") == {}
    assert [each.bytes for each in three] == [2 * LAYER] * 3
    grouped = placed(NEMO, zero=3, zero_group=8)
    assert counts(grouped, "step") == {("all-reduce", "replica"): 1}


def test_a_ring_passes_keys_and_values() -> None:
    llama = dataclasses.replace(GPT, num_kv_heads=8)
    parallelism = Parallelism(8, 8, cp=4)
    found = published_collectives(
        StepDescription(llama.architecture, parallelism, NEMO, Cluster(find_accelerator("h100")))
    )
    ring = [each for each in found if each.axes == ("cp",)]
    assert counts(ring, "forward") == {("all-gather", "cp"): 1}
    assert counts(ring, "backward") == {("all-gather", "cp"): 1, ("reduce-scatter", "cp"): 1}
    assert {each.bytes for each in ring} == {2 * 2048 * 2 * 8 * 128}


def test_groups_follow_the_order_of_axes() -> None:
    parallelism = Parallelism(64, 64, tp=4, cp=2, pp=2, zero=3, zero_group=4)
    assert parallelism.dp == 4
    assert parallelism.group(("tp",)) == Group(4, 1)
    assert parallelism.group(("cp",)) == Group(2, 4)
    assert parallelism.group(("dp",)) == Group(4, 8)
    assert parallelism.group(("cp", "dp")) == parallelism.group(("dp", "cp")) == Group(8, 4)
    assert parallelism.group(("pp",)) == Group(2, 32)
    assert parallelism.group(("shard",)) == Group(4, 4)
    assert parallelism.group(("replica",)) == Group(2, 16)
    assert parallelism.group(("ends",)) == Group(2, 32)


def test_replicas_are_outside_of_the_devices_that_share_a_state() -> None:
    parallelism = Parallelism(64, 64, tp=2, pp=2, replicas=4, zero=3)
    assert (parallelism.dp, parallelism.sample_shards, parallelism.shards) == (4, 16, 4)
    assert parallelism.group(("dp",)) == parallelism.group(("shard",)) == Group(4, 2)
    assert parallelism.group(("replicas",)) == parallelism.group(("replica",)) == Group(4, 8)
    assert parallelism.group(("pp",)) == Group(2, 32)
