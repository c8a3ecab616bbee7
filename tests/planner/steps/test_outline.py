"""Outlines of pipelines have the same slots as their plans."""

import pytest

from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.layout import Layout
from jaxptd.models.stages import make_plan
from jaxptd.pipeline.placement import of_stack
from jaxptd.planner.steps.implementation import MAIL, layers_by_stage
from jaxptd.planner.steps.step import ConfigStep

CASES = [
    *(("1f1b", p, m, None) for p in (2, 3, 4) for m in (1, p, 3 * p)),
    *(("gpipe", p, m, None) for p in (2, 4) for m in (1, p, 3 * p)),
    *(("interleaved", p, m, v) for p in (2, 3, 4) for m in (p, 2 * p, 4 * p) for v in (2, 3)),
    *(
        (name, p, m, None)
        for name in ("zb-h1", "zb-v", "zb-h2")
        for p in (2, 4)
        for m in (2 * p, 9)
    ),
]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(("name", "p", "m", "chunks"), CASES)
def test_slots_are_those_of_the_plan(
    name: str, p: int, m: int, chunks: int | None, remat: str
) -> None:
    model = ModelConfig(num_layers=24, hidden_size=8, num_heads=2, seq_length=4, remat=remat)
    layout = Layout(pp=p, schedule=name, virtual_stages=chunks)
    config = Config(model, layout, train=TrainConfig(global_batch_size=m, micro_batches=m))
    outline, plan = ConfigStep(config).plan, make_plan(config)
    assert outline is not None
    saved, between = of_stack("saved", "blocks"), of_stack("between", "blocks")
    assert outline.slots[saved] - plan.slots[saved] in (0, 1)
    assert outline.slots[between] - plan.slots[between] in (0, 1)
    assert 0 <= outline.slots["mail"] - plan.slots["mail"] <= MAIL
    same = ("stacks", "recompute", "splits")
    assert [getattr(outline, x) for x in same] == [getattr(plan, x) for x in same]
    assert layers_by_stage(outline) == layers_by_stage(plan)
    if remat == "none" and name in ("1f1b", "interleaved", "zb-h1"):
        assert outline.slots[saved] == plan.slots[saved]
