"""`Config`: sections that fit each other; conversion to nested dicts and back."""

import dataclasses
import importlib

import pytest

from jaxptd.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    from_dict,
    to_dict,
)
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

CHANGED = Config(
    model=ModelConfig(num_layers=2, dtype="bfloat16", ffn_hidden_size=24),
    layout=Layout(pp=2, tp=2, sequence_parallel=True, schedule="zb-v", stage_layers=(0, 2, 0, 0)),
    data=DataConfig(source=["a", "b"]),
    optimizer=OptimizerConfig(learning_rate=0.5),
    train=TrainConfig(steps=3),
    checkpoint=CheckpointConfig(resume="never"),
)


APART = {"data": {"documents": "apart"}}
WHOLE = {"data": {"documents": "whole"}}
RESTART = {"data": {"documents": "apart", "restart_positions": True}}
PLACED = {"cp": 2, "ring": "gather", "balance": "tokens"}


@pytest.mark.parametrize("config", [Config(), CHANGED])
def test_round_trip(config):
    plain = to_dict(config)
    assert list(plain) == [field.name for field in dataclasses.fields(Config)]
    assert all(type(section) is dict for section in plain.values())
    assert from_dict(plain) == config


def test_omitted_fields_have_their_defaults():
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
        ({"layout": {"dp": 3}}, "train.global_batch_size=8 does not split over layout.dp=3 x t"),
        ({"layout": {"dp": 2, "ep": 8}}, "over layout.dp=2 x layout.ep=8 x train.micro_batches=1"),
        (
            {"layout": {"balance": "samples"}},
            "layout.balance=samples arranges work that differs b",
        ),
        ({"data": {"restart_positions": True}}, "use data.documents=apart as well"),
        (
            RESTART | {"model": {"positions": "rope"}},
            "has no effect with model.positions=rope, wh",
        ),
        (
            WHOLE | {"layout": {"col": 2}},
            "data.documents=whole, whose positions begin at 0 in each",
        ),
        (
            {"data": {"documents": "whole", "restart_positions": True}},
            "data.restart_positions=true has no effect with data.documents=whole; leave it out",
        ),
        (RESTART | {"layout": {"col": 2}}, "data.restart_positions=true with a grid (layout.row"),
        (APART | {"layout": PLACED | {"ring": "rsa"}}, "use layout.ring=gather, or layout.ulysses"),
        (APART | {"layout": PLACED | {"row": 2}}, "layout.balance=tokens with a grid (layout.row"),
        (
            APART | {"layout": PLACED, "model": {"seq_length": 10}},
            "cuts sequences into 4 blocks for layout.cp=2, which model.seq_length=10 does not split"
            " into; use a multiple of 4",
        ),
        (
            APART | {"layout": PLACED, "model": {"seq_length": 3002}},
            "cuts sequences into 6 blocks for layout.cp=2, which model.seq_length=3002 does not "
            "split into; use a multiple of 1024",
        ),
    ],
)
def test_bad_sections(sections, words):
    with pytest.raises(UserError) as caught:
        from_dict(sections)
    assert words in str(caught.value)


@pytest.mark.parametrize("module", ["model", "run", "training"])
def test_a_module_keeps_no_state(module):
    members = vars(importlib.import_module(f"jaxptd.config.{module}"))
    public = {name: value for name, value in members.items() if not name.startswith("_")}
    assert not [name for name, value in public.items() if isinstance(value, dict | list | set)]


@pytest.mark.parametrize(("dp", "micro_batches"), [(4, 1), (1, 4), (2, 2), (3, 1)])
def test_a_batch_that_does_not_split(dp, micro_batches):
    layout, train = Layout(dp=dp), TrainConfig(global_batch_size=10, micro_batches=micro_batches)
    with pytest.raises(
        UserError, match=rf"global_batch_size=10 .*multiple of {dp * micro_batches}"
    ):
        Config(layout=layout, train=train)


@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"ulysses": 2}, {"pp": 2}])
def test_tokens_are_placed_only_along_cp(layout):
    """So a config runs on fewer devices, where samples are dealt all the same."""
    config = from_dict(APART | {"layout": {"balance": "tokens", **layout}})
    assert not config.layout.places_tokens
