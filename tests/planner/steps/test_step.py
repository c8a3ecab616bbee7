"""The part of a step's time that its collectives take."""

import dataclasses

import pytest

from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.layout import Layout
from jaxptd.planner.cost.collectives import BESIDE, HIDING
from jaxptd.planner.steps.implementation import NARROW, UPDATE, implementation_of
from jaxptd.planner.steps.step import ConfigStep, Predictor
from jaxptd.planner.steps.traffic import NAMES

H100 = Cluster(find_accelerator("h100"))
MODEL = ModelConfig(
    num_layers=8,
    hidden_size=2048,
    num_heads=16,
    seq_length=1024,
    vocab_size=32000,
    dtype="bfloat16",
)


def seconds(config: Config, *, hiding: bool) -> tuple[float, float]:
    """Seconds of the collectives of ZeRO's layers, and of the kernels that can hide them."""
    terms = Predictor(H100, hiding=hiding)(ConfigStep(config)).terms
    sent = sum(term.seconds for term in terms if term.name.startswith(NAMES["zero"]))
    inside = (t for t in terms if t.kind in HIDING and not t.name.startswith("logits"))
    return sent, sum(term.seconds for term in inside)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("batch", [16, 2048])  # layers hide some of them, and all
def test_other_layers_hide_the_messages_of_a_layer(zero: int, batch: int) -> None:
    config = Config(MODEL, Layout(dp=16, zero=zero), train=TrainConfig(global_batch_size=batch))
    left, work = seconds(config, hiding=True)
    whole, _ = seconds(config, hiding=False)
    assert left == pytest.approx(max(0.0, whole - BESIDE * work))
    assert (left > 0) == (batch == 16)
    assert left < whole


@pytest.mark.parametrize("batch", [64, 8192])
def test_the_last_micro_batch_alone_hides_the_gradients_of_zero_1(batch: int) -> None:
    train = TrainConfig(global_batch_size=batch, micro_batches=4)
    config = Config(MODEL, Layout(dp=16, zero=1), train=train)
    left, work = seconds(config, hiding=True)
    whole, _ = seconds(config, hiding=False)
    assert left == pytest.approx(max(0.0, whole - BESIDE * work / 4))
    assert (left > 0) == (batch == 64)


def test_nothing_hides_them_in_a_pipeline() -> None:
    layout = Layout(pp=2, dp=8, zero=3)
    config = Config(MODEL, layout, train=TrainConfig(global_batch_size=64, micro_batches=4))
    assert seconds(config, hiding=True) == seconds(config, hiding=False)


@pytest.mark.parametrize(
    ("layout", "micro_batches", "scan", "less"),
    [
        (Layout(tp=2), 1, True, NARROW),
        (Layout(tp=2), 2, True, 0),
        (Layout(dp=2), 1, True, 0),
        (Layout(), 1, False, 0),
    ],
    ids=str,
)
def test_an_update_reads_gradients_that_nothing_sums_in_16_bits(
    layout: Layout, micro_batches: int, scan: bool, less: int
) -> None:
    train = TrainConfig(global_batch_size=4, micro_batches=micro_batches)
    config = Config(dataclasses.replace(MODEL, scan_layers=scan), layout, train=train)
    assert implementation_of(config, H100.accelerator).update == UPDATE["adamw"] - less
