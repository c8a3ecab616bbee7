"""Defaults, checks in words, and the way to plain dicts and back."""

import dataclasses
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
    check_layout,
    from_dict,
    to_dict,
)
from jaxptd.config import sections as config_module
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
        assert f"        {field.name}: " in section.__doc__


def test_nothing_can_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.num_layers = 3  # type: ignore[misc]


def test_sizes_that_follow_from_others():
    model = ModelConfig(hidden_size=96, num_heads=6)
    assert (model.head_size, model.mlp_size) == (16, 384)
    assert ModelConfig(ffn_hidden_size=100).mlp_size == 100


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
    ProcessesConfig: ["id", "stuck_after"],
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


MODEL = ModelConfig(hidden_size=60, num_heads=30, seq_length=9)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        (MODEL, Layout(tp=4), "model.num_heads=30 does not split over layout.tp=4; use a size"),
        (MODEL, Layout(tp=4), "(1, 2, 3, 5, 6, 10, 15, 30)"),
        (
            dataclasses.replace(MODEL, ffn_hidden_size=7),
            Layout(tp=2),
            "model.ffn_hidden_size=7 does not split over layout.tp=2",
        ),
        (
            MODEL,
            Layout(tp=2, sequence_parallel=True),
            "model.seq_length=9 does not split over layout.tp=2",
        ),
        (
            dataclasses.replace(MODEL, seq_length=6),
            Layout(cp=2),
            "chunks for each of layout.cp=2, as layout.ring=zigzag needs; use a",
        ),
        (MODEL, Layout(cp=2, ring="rsa"), "model.seq_length=9 does not split over layout.cp=2"),
        (
            dataclasses.replace(MODEL, seq_length=12),
            Layout(cp=3, tp=5, sequence_parallel=True),
            "model.seq_length=12 does not split over layout.cp x layout.tp=15",
        ),
        (
            dataclasses.replace(MODEL, seq_length=12, attention="cudnn"),
            Layout(cp=2, ring="rsa"),
            "layout.ring=rsa has no fused attention kernel; use model.attention=xla",
        ),
        (
            dataclasses.replace(MODEL, seq_length=12, attention="cudnn"),
            Layout(row=2, ring="rsa"),
            "layout.ring=rsa has no fused attention kernel; use model.attention=xla",
        ),
        (
            dataclasses.replace(MODEL, seq_length=12, attention="cudnn"),
            Layout(col=2, attention2d="blocks"),
            "layout.attention2d=blocks has no fused attention kernel; use model.attention=xla",
        ),
        (MODEL, Layout(col=4), "model.num_heads=30 does not split over layout.col=4; use a size"),
        (MODEL, Layout(col=4), "or layout.attention2d=blocks"),
        (
            dataclasses.replace(MODEL, seq_length=12),
            Layout(cp=2, row=2),
            "two chunks for each of layout.cp x layout.row=4, as layout.ring=zigzag needs",
        ),
        (
            dataclasses.replace(MODEL, seq_length=6),
            Layout(row=4, ring="blockwise"),
            "model.seq_length=6 does not split over layout.row=4",
        ),
        (
            dataclasses.replace(MODEL, seq_length=6),
            Layout(row=2, col=4, attention2d="blocks"),
            "as layout.attention2d=blocks needs; use a multiple of 4",
        ),
        (
            dataclasses.replace(MODEL, seq_length=8),
            Layout(row=2, col=2, attention2d="blocks", matmul2d_slices=3),
            "layout.col=2, layout.matmul2d_slices=3, as layout.attention2d=blocks needs; use a mul",
        ),
    ],
)
def test_a_model_that_does_not_split(model, layout, words):
    with pytest.raises(UserError) as caught:
        check_layout(model, layout)
    assert words in str(caught.value)
    with pytest.raises(UserError):
        Config(model=model, layout=layout)


def test_a_model_that_splits():
    check_layout(MODEL, Layout(tp=3, dp=5, sequence_parallel=True))
    check_layout(MODEL, Layout(tp=2))  # an odd sequence matters only where it is cut
    assert Config(model=MODEL, layout=Layout(tp=3)).layout.num_devices == 3
    check_layout(MODEL, Layout(cp=3, ring="blockwise"))
    check_layout(dataclasses.replace(MODEL, seq_length=18), Layout(cp=9))


@pytest.mark.parametrize(("dp", "micro_batches"), [(4, 1), (1, 4), (2, 2), (3, 1)])
def test_a_batch_that_does_not_split(dp, micro_batches):
    layout, train = Layout(dp=dp), TrainConfig(global_batch_size=10, micro_batches=micro_batches)
    with pytest.raises(
        UserError, match=rf"global_batch_size=10 .*multiple of {dp * micro_batches}"
    ):
        Config(layout=layout, train=train)


def test_a_message_lists_few_divisors_however_large_the_number():
    with pytest.raises(UserError) as caught:
        ModelConfig(hidden_size=2**40 * 3**10, num_heads=7)
    assert "(1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 27)" in str(caught.value)


# --- Dicts


CHANGED = Config(
    model=ModelConfig(num_layers=2, dtype="bfloat16", ffn_hidden_size=24),
    layout=Layout(dp=2, tp=2, sequence_parallel=True, schedule="zb-v", stage_layers=(0, 2)),
    data=DataConfig(source=["a", "b"]),
    optimizer=OptimizerConfig(learning_rate=0.5),
    train=TrainConfig(steps=3),
    checkpoint=CheckpointConfig(resume="never"),
)


@pytest.mark.parametrize("config", [Config(), CHANGED])
def test_round_trip(config):
    plain = to_dict(config)
    assert list(plain) == list(SECTIONS)
    assert all(type(section) is dict for section in plain.values())
    assert from_dict(plain) == config


def test_what_is_left_out_has_its_default():
    assert from_dict({}) == Config()
    expected = dataclasses.replace(Config(), train=TrainConfig(steps=3))
    assert from_dict({"train": {"steps": 3}}) == expected


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"modle": {}}, "unknown section modle; the sections are model, layout"),
        ({"model": {"num_layer": 2}}, "unknown key model.num_layer"),
        ({"model": 3}, "model: expected a section of fields, got 3"),
        ({"model": {"num_layers": 0}}, "model.num_layers=0"),
        ({"layout": {"tp": 3}}, "model.num_heads=8 does not split over layout.tp=3"),
    ],
)
def test_bad_sections(sections, words):
    with pytest.raises(UserError) as caught:
        from_dict(sections)
    assert words in str(caught.value)


def test_the_module_keeps_no_state():
    public = [name for name in vars(config_module) if not name.startswith("_")]
    assert not [name for name in public if isinstance(vars(config_module)[name], dict | list | set)]
