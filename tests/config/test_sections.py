"""Defaults and ranges of the fields of every section."""

import dataclasses
import inspect
import math

import pytest

from jaxptd.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ProcessesConfig,
    TrainConfig,
    option,
)
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

SECTIONS = {
    "model": ModelConfig,
    "layout": Layout,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "processes": ProcessesConfig,
}


def test_the_sections():
    assert {field.name: field.type for field in dataclasses.fields(Config)} == SECTIONS
    for name, section in SECTIONS.items():
        assert getattr(Config(), name) == section()


@pytest.mark.parametrize("section", SECTIONS.values())
def test_every_field_is_explained_for_help(section):
    for field in dataclasses.fields(section):
        assert f"\n    {field.name}: " in inspect.cleandoc(section.__doc__)


def test_nothing_can_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.num_layers = 3  # type: ignore[misc]


def test_sizes_that_follow_from_others():
    model = ModelConfig(hidden_size=96, num_heads=6)
    assert (model.block.head_size, model.mlp_size) == (16, 384)
    assert ModelConfig(ffn_hidden_size=100).mlp_size == 100


@pytest.mark.parametrize(
    ("sizes", "layers", "period"),
    [
        (None, 3, 1),
        ((8, 16), 6, 2),
        ((8, 16, 8, 16), 4, 2),
        ((8, 16, 8), 3, 3),  # a loop runs whole periods
        ((8, 16), 5, 5),
    ],
)
def test_a_loop_runs_whole_periods_of_shapes(sizes, layers, period):
    model = ModelConfig(num_layers=layers, head_sizes=sizes)
    assert model.period == period
    assert option(model, "head_size") == (None if sizes else 32)


def test_a_layer_of_a_period_reads_what_all_such_layers_have():
    rope = {"window_theta": 9.0}
    sizes = {"num_layers": 6, "head_sizes": (8, 16), "window": 3, "attention_softcap": 9.0}
    model = ModelConfig(family="llama", rope=rope, **sizes, window_layers=(True, False))
    model = dataclasses.replace(model, softcap_layers=(False, True))
    first, second = (model.of_layers(slice(place, None, 2)) for place in (0, 1))
    assert (first.block.head_size, second.block.head_size) == (8, 16)
    assert (first.block.window, second.block.window) == (3, None)
    assert (first.attention_softcap, second.attention_softcap) == (None, 9.0)
    assert first.window_layers is second.window_layers is second.softcap_layers is None
    assert (first.rope.window_theta, second.rope.window_theta) == (9.0, None)
    mixed = dataclasses.replace(model, window_layers=(True, True, False))
    assert mixed.of_layers(slice(0, None, 2)).window_layers == (True, True, False)


def test_parts_of_a_pipeline_have_whole_periods():
    model = ModelConfig(num_layers=6, head_sizes=(8, 16))
    assert model.in_periods((4, 2)) == (2, 1)
    words = r"layout.stage_layers=\[., .\] with model.head_sizes: .* use multiples of 2 that add up"
    for sizes in ((3, 3), (4, 4)):
        with pytest.raises(UserError, match=words):
            model.in_periods(sizes)


def test_layers_that_recompute_are_counted_in_periods():
    model = ModelConfig(num_layers=6, head_sizes=(8, 16), remat="full", remat_layers=4)
    assert model.remats(3) == (("full", 2), ("none", 1))


@pytest.mark.parametrize(
    ("choice", "looped"),
    [
        ({"num_layers": 4}, True),
        ({"num_layers": 2}, False),  # one iteration, which XLA runs without a loop
        (
            {"num_layers": 6, "remat": "full", "remat_layers": 2},
            False,
        ),  # the first alone recomputes
        ({"num_layers": 8, "remat": "full", "remat_layers": 4}, True),
        ({"num_layers": 4, "scan_layers": False}, False),
    ],
    ids=str,
)
def test_layers_of_a_period_know_whether_they_run_in_a_loop(choice, looped):
    """Without one, XLA would undo what backward computes again unless the layer prevents it."""
    model = ModelConfig(head_sizes=(8, 16), **choice)
    layers = [model.of_layers(slice(place, None, 2)) for place in (0, 1)]
    assert [each.block.looped for each in (model, *layers)] == [looped] * 3


@pytest.mark.parametrize("pattern", [None, (False, True)], ids=str)
@pytest.mark.parametrize(
    ("window", "padded"), [(None, None), (5, 5), (9, 9), (10, 16), (11, 16), (20, 20)], ids=str
)
def test_padding_lengthens_a_window_that_hides_nothing(window, padded, pattern):
    """Ten tokens become sixteen. A window that is longer still hides nothing of them."""
    pattern = window and pattern
    model = ModelConfig(seq_length=10, window=window, window_layers=pattern)
    found = model.with_lengths(lambda length: -(-length // 8) * 8)
    assert (found.seq_length, found.num_positions) == (16, 10)
    assert (found.window, found.window_layers) == (padded, pattern)


# --- One field


POSITIVE = {
    ModelConfig: ["num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size"],
    OptimizerConfig: ["learning_rate"],
    TrainConfig: ["steps", "global_batch_size", "micro_batches", "max_skipped", "eval_batches"],
    CheckpointConfig: ["keep"],
    ProcessesConfig: ["count", "wait"],
}
NOT_NEGATIVE = {
    OptimizerConfig: ["warmup_steps", "weight_decay", "grad_clip", "skip_above"],
    TrainConfig: ["seed", "log_every", "eval_every", "sample_tokens"],
    CheckpointConfig: ["every"],
    ProcessesConfig: ["id", "stuck_after", "slow_factor"],
}
SHARES = {
    ModelConfig: ["dropout"],
    DataConfig: ["validation_fraction"],
    OptimizerConfig: ["beta1", "beta2"],
}
TEXTS = {
    DataConfig: ["source", "tokenizer"],
    TrainConfig: ["run_dir"],
    CheckpointConfig: ["resume"],
}


def every(table, values):
    return [
        (section, name, v) for section, names in table.items() for name in names for v in values
    ]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        *every(POSITIVE, [0, -1, math.nan, math.inf]),
        *every(NOT_NEGATIVE, [-1, math.nan, math.inf]),
        *every(SHARES, [-0.1, 1.0, math.nan]),
        *every(TEXTS, [""]),
        (DataConfig, "source", []),
        (TrainConfig, "seed", 2**32),
    ],
)
def test_a_value_out_of_range_names_its_field(section, name, value):
    prefix = next(key for key, known in SECTIONS.items() if known is section)
    with pytest.raises(UserError, match=rf"^{prefix}\.{name}\b") as caught:
        section(**{name: value})
    assert value in ("", []) or str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        *every(NOT_NEGATIVE, [0]),
        *every(SHARES, [0.0, 0.999]),
        (TrainConfig, "seed", 2**32 - 1),
        (ModelConfig, "vocab_size", None),
        (DataConfig, "source", ["a.txt", "b*.txt"]),
    ],
)
def test_the_ends_of_a_range_are_in_it(section, name, value):
    assert getattr(section(**{name: value}), name) == value


# --- Fields that must fit each other


def test_heads_split_the_width():
    with pytest.raises(UserError, match=r"model\.hidden_size=30 does not split over .*num_heads=4"):
        ModelConfig(hidden_size=30, num_heads=4)


def test_cudnn_has_no_dropout():
    assert ModelConfig(attention="cudnn").dropout == 0
    with pytest.raises(UserError, match=r"cudnn has no dropout .*0\.1.*attention=xla"):
        ModelConfig(attention="cudnn", dropout=0.1)
