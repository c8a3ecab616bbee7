"""Placed collectives agree with the formulas, and therefore with the program."""

import collections

import pytest

from jaxptd.analysis.traffic import expected
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.layout import Layout
from jaxptd.models.stages import make_plan
from jaxptd.planner.steps.step import ConfigStep, Predictor, alone
from jaxptd.planner.steps.traffic import layer_collectives, step_collectives

SIZES = {"hidden_size": 64, "num_heads": 8, "seq_length": 32, "vocab_size": 64, "dtype": "bfloat16"}
GPT, T5 = ModelConfig(num_layers=4, **SIZES), ModelConfig(family="t5", num_layers=4, **SIZES)
LAYOUTS = [
    Layout(tp=4, dp=2),
    Layout(tp=4, sequence_parallel=True, dp=2, zero=1),
    Layout(tp=2, sequence_parallel=True, collective_matmul=True, dp=2, zero=3),
    Layout(cp=2, dp=2, zero=2),
    Layout(cp=4, tp=2, ring="gather"),
    Layout(row=2, col=2, cp=2, ring="gather"),
    Layout(row=2, col=2, dp=2),
    Layout(row=2, col=2, attention2d="blocks"),
    Layout(pp=2, tp=2, sequence_parallel=True, dp=2, zero=1),
    Layout(pp=2, dp=2, zero=3, schedule="interleaved"),
]


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_of_placed_collectives_sends_what_the_formula_says(
    layout: Layout, remat: str
) -> None:
    """The formula's bytes by axes, without messages between stages."""
    if layout.pp > 1 and remat == "full":
        pytest.skip("a pipeline runs the last product of a part again, which is not placed")
    model = ModelConfig(**{**SIZES, "num_layers": 4, "remat": remat})
    config = Config(model, layout, train=TrainConfig(global_batch_size=16, micro_batches=4))
    own = ConfigStep(config)
    sent: collections.Counter = collections.Counter()
    sequences = 16 // layout.dp // 4
    predictor = Predictor(Cluster(find_accelerator("h100")))
    for each in predictor.micro_batch(config, alone(layout), sequences, remat)[0]:
        layers = 4 if each.place == "layer" else 1
        sent["+".join(each.axes)] += each.count * each.bytes * layers * 4
    for each in step_collectives(config, own.infos, own.plan):
        runs = 4 * 4 if each.place == "layer" else 1
        stages = layout.pp if each.place == "step" and "pp" not in each.axes else 1
        sent["+".join(each.axes)] += each.count * each.bytes * runs * stages
    plan = make_plan(config) if layout.pp > 1 else None
    formula: collections.Counter = collections.Counter()
    for each in expected(config, own.infos, plan, on_gpus=True):
        if each.axes != ("pp",) or each.kind != "collective-permute":
            formula["+".join(each.axes)] += each.bytes
    assert dict(sent) == pytest.approx(dict(formula))


def test_each_stack_has_its_own() -> None:
    config = Config(T5, Layout(tp=2, sequence_parallel=True))
    stacks = {each.stack for each in layer_collectives(config, "none") if each.place == "layer"}
    assert stacks == {"encoder", "decoder"}
