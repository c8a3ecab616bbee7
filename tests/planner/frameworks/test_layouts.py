"""Layouts divide devices, batch and model, and use only what the framework supports."""

import math

import pytest
from framework_layouts import read, some_of, workload

from jaxptd.planner.frameworks.framework import Setup, Workload
from jaxptd.planner.frameworks.memory import memory_of
from jaxptd.planner.frameworks.planning import FRAMEWORKS
from jaxptd.planner.frameworks.search import FrameworkSearch, describe, setups, time_of


def devices(name: str, found: dict) -> int:
    """The number of devices that a config asks for."""
    if name == "torchtitan":
        axes = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
        axes += ("context_parallel", "pipeline_parallel")
        return math.prod(found[f"parallelism.{axis}_degree"] for axis in axes)
    return math.prod(value for key, value in found.items() if key[:4] in ("ici_", "dcn_"))


@pytest.mark.parametrize("name", ["torchtitan", "maxtext"])
def test_the_degrees_multiply_to_the_devices(name: str) -> None:
    for load, setup in some_of(name):
        found = read(name, FRAMEWORKS[name].write(load, setup).text)
        assert devices(name, found) == load.gpus, found
        inside = [value for key, value in found.items() if key.startswith("ici_")]
        assert name == "torchtitan" or math.prod(inside) == min(8, load.gpus)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_batch_is_whole(name: str) -> None:
    for load, setup in some_of(name):
        p = setup.parallelism
        assert p.tp * p.cp * p.pp * p.sample_shards == load.gpus
        assert load.gpus % (p.pp * p.expert_shards) == 0
        assert p.sample_shards * p.micro_batch * p.micro_batches == load.batch
        found = read(name, FRAMEWORKS[name].write(load, setup).text)
        if name == "megatron":
            each = int(found["--micro-batch-size"])
            assert int(found["--global-batch-size"]) == load.batch
        elif name == "torchtitan":
            local = found["training.local_batch_size"]
            each = found.get("parallelism.pipeline_parallel_microbatch_size", local)
            accumulated = load.batch // (local * p.sample_shards)
            assert accumulated * local == p.micro_batch * p.micro_batches
            assert p.pp == 1 or accumulated == 1
        elif name == "maxtext":
            passes = found.get("gradient_accumulation_steps", 1)
            assert found["per_device_batch_size"] * load.gpus * passes == load.batch
            each = load.batch // (
                p.sample_shards * passes * found.get("num_pipeline_microbatches", 1)
            )
        else:
            each = found["train_micro_batch_size_per_gpu"]
            assert each * found["gradient_accumulation_steps"] * p.sample_shards == load.batch
        assert each == p.micro_batch


def test_what_megatron_lacks() -> None:
    for load, setup in some_of("megatron"):
        p = setup.parallelism
        found = read("megatron", FRAMEWORKS["megatron"].write(load, setup).text)
        accounted = 2 * ("--account-for-loss-in-pipeline-split" in found)
        assert (load.layers + accounted) % (p.pp * p.virtual_stages) == 0
        assert p.virtual_stages == 1 or (p.pp > 1 and p.micro_batches % p.pp == 0)
        assert p.zero in (0, 1)
        assert ("--sequence-parallel" in found) == (p.tp > 1)
        if "--recompute-num-layers" in found:
            depth = (load.layers + accounted) // (p.pp * p.virtual_stages)
            assert 1 <= int(found["--recompute-num-layers"]) <= depth


def test_what_torchtitan_lacks() -> None:
    for load, setup in some_of("torchtitan"):
        p = setup.parallelism
        found = read("torchtitan", FRAMEWORKS["torchtitan"].write(load, setup).text)
        assert found["parallelism.fsdp_reshard_after_forward"] == "default"
        assert p.pp == 1 or p.micro_batches % p.pp == 0
        assert p.pp == 1 or (found["model.name"] == "llama3" and not load.model.tie_embeddings)
        extra = found.get("parallelism.pipeline_parallel_first_stage_less_layers", 0)
        extra += found.get("parallelism.pipeline_parallel_last_stage_less_layers", 0)
        per_stage = found.get("parallelism.pipeline_parallel_layers_per_stage", load.layers)
        assert per_stage * p.pp * p.virtual_stages == load.layers + extra
        assert load.model.seq_length % (p.tp * (2 * p.cp if p.cp > 1 else 1)) == 0


def test_what_maxtext_lacks() -> None:
    for load, setup in some_of("maxtext"):
        p = setup.parallelism
        found = read("maxtext", FRAMEWORKS["maxtext"].write(load, setup).text)
        if p.pp > 1:
            stages = found.get("ici_pipeline_parallelism", 1)
            stages *= found.get("dcn_pipeline_parallelism", 1)
            assert stages == p.pp
            assert found["num_pipeline_microbatches"] % p.pp == 0
            assert load.layers % (p.pp * found["num_layers_per_pipeline_stage"]) == 0
            assert p.cp == 1
        assert p.zero in (0, 3)


def test_what_deepspeed_lacks() -> None:
    for load, setup in some_of("deepspeed"):
        p = setup.parallelism
        written = FRAMEWORKS["deepspeed"].write(load, setup)
        found = read("deepspeed", written.text)
        assert found["zero_optimization.stage"] == p.zero
        assert p.pp == 1 or p.zero <= 1
        assert p.tp == 1 or p.zero <= 2
        assert sum(size > 1 for size in (p.tp, p.cp, p.pp)) <= 1
        assert not load.model.moe or p.tp * p.cp == 1
        assert p.virtual_stages == 1
        assert (p.pp > 1) == any("PipelineModule" in note for note in written.notes)


# ---- the search ----------------------------------------------------------------------------------


def best_of_all(name: str, load: Workload, limit: float) -> float:
    """Seconds of the fastest layout that fits, by exhaustive search."""
    framework = FRAMEWORKS[name]
    fitting = []
    for family in setups(framework, load):
        for setup in family:
            described = describe(framework, load, setup)
            if sum(memory_of(framework, described, load.model, setup).values()) <= limit:
                fitting.append(time_of(framework, described, setup).seconds)
    return min(fitting)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_search_finds_the_fastest(name: str) -> None:
    load = workload("llama3-8b", ["--train.global_batch_size=32"], 16)
    limit = 48 * 2**30
    search = FrameworkSearch(FRAMEWORKS[name], load, limit)
    first, second = (found for found, _ in zip(search, range(2), strict=False))
    assert first.seconds == pytest.approx(best_of_all(name, load, limit))
    assert first.seconds <= second.seconds
    assert max(first.bytes, second.bytes) <= limit


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_recomputing_more_needs_less_memory(name: str) -> None:
    framework, load = FRAMEWORKS[name], workload("llama3-8b", [], 8)

    def size(setup: Setup) -> float:
        described = describe(framework, load, setup)
        return sum(memory_of(framework, described, load.model, setup).values())

    for number, family in enumerate(setups(framework, load)):
        if number % 7 == 0:
            sizes = [size(setup) for setup in family]
            assert sizes == sorted(sizes, reverse=True)
