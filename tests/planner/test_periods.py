"""Layers of several shapes in a plan: a layer of a stack is a period of the model's."""

import dataclasses
from typing import Any

import pytest

from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.layout import Layout
from jaxptd.planner.search.best import Search
from jaxptd.planner.search.space import Choice, ScheduleChoice, Space
from jaxptd.planner.steps.step import predict

H200 = Cluster(find_accelerator("h200"))
MODEL = ModelConfig(
    family="llama",
    num_layers=12,
    hidden_size=1024,
    num_heads=8,
    ffn_hidden_size=2816,
    vocab_size=32000,
    seq_length=2048,
    dtype="bfloat16",
    head_sizes=(64, 128),
)
TRAIN = TrainConfig(global_batch_size=16, micro_batches=4)
ALONE = {f"layout.{axis}": 1 for axis in ("tp", "cp", "ulysses", "row", "col", "dp")}


def flops(layout: Layout, **choice: Any) -> float:
    model = dataclasses.replace(MODEL, **choice)
    return sum(term.flops for term in predict(Config(model, layout, train=TRAIN), H200).terms)


@pytest.mark.parametrize("some", [None, 4], ids=str)
@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_half_of_the_layers_cost_as_those_of_each_width(layout: Layout, remat: Any, some: Any):
    """Also where only the first layers recompute: of four, two have each width."""
    choice = {"remat": remat, "remat_layers": some}
    both = (flops(layout, head_size=n, head_sizes=None, **choice) for n in (64, 128))
    assert flops(layout, **choice) == sum(both) / 2


def search(gib: float, model: ModelConfig = MODEL, **pins: Any) -> Search:
    config = Config(model, train=TrainConfig(global_batch_size=16))
    return Search(Space(config, 4, ALONE | {"layout.pp": 4} | pins), H200, gib * 2.0**30)


def test_a_plan_gives_stages_whole_periods() -> None:
    """Six periods on four stages: the two stages with one fewer are of two layers fewer."""
    layouts = [next(iter(search(100))).config.layout]
    layouts += [next(iter(search(100, **{"layout.stage_layers": (4, 4, 2, 2)}))).config.layout]
    assert layouts[1].stage_layers == (4, 4, 2, 2)
    for each in layouts:
        sizes = each.stage_layers or (4, 4, 2, 2)
        assert sum(sizes) == 12
        assert all(size % 2 == 0 for size in sizes)


@pytest.mark.parametrize("pins", [{}, {"layout.stage_layers": (4, 4, 2, 2)}], ids=str)
def test_what_is_found_recomputes_whole_periods(pins: Any) -> None:
    found = search(100, **{"model.remat": "full"}, **pins)
    step = next(iter(found))
    pipe = ScheduleChoice("1f1b")
    made = found.space.config_of(step.mesh_shape, pipe, Choice("none", "full"), 2)
    assert made.model.remat_layers == 4
    assert made.layout.stage_layers == pins.get("layout.stage_layers")
    assert (step.config.model.remat_layers or 2) % 2 == 0
