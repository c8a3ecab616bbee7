"""A layout that cannot run a model is an error with a remedy; sizes need not divide evenly."""

import dataclasses
import re

import pytest

from jaxptd.config import Config, ModelConfig, check_layout, from_dict, nested
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

MODEL = ModelConfig(hidden_size=60, num_heads=30, seq_length=9)
LATENT = ModelConfig(family="deepseek_v3", hidden_size=60, num_heads=30, seq_length=12)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
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
        (
            dataclasses.replace(MODEL, seq_length=12, attention_sinks=True),
            Layout(cp=2, ring="rsa"),
            "model.attention_sinks=true with layout.ring=rsa: it makes whole rows of scores, and",
        ),
        (
            dataclasses.replace(MODEL, seq_length=12, attention_softcap=9.0),
            Layout(col=2, attention2d="blocks"),
            "model.attention_softcap=9.0 with layout.attention2d=blocks: it makes whole rows",
        ),
        (
            MODEL,
            Layout(ulysses=4),
            "layout.ulysses=4 does not split the heads of a device along tp, 30 of queries and 30 "
            "of keys; use one of 1, 2, 3, 5, 6, 10, 15, 30;",
        ),
        (
            dataclasses.replace(MODEL, family="llama", num_kv_heads=3),
            Layout(ulysses=4, tp=3),
            "10 of queries and 1 of keys; use one of 1, 2, 5, 10;",
        ),
        (
            dataclasses.replace(MODEL, family="llama", num_kv_heads=6),
            Layout(ulysses=2, tp=5),
            "layout.ulysses=2 with layout.tp=5: model.num_heads=30 and num_kv_heads=6 need padding",
        ),
        (
            LATENT,
            Layout(row=2, col=2),
            "model.latent with a grid (layout.row, layout.col): a grid splits every matrix over",
        ),
    ],
)
def test_a_model_that_a_layout_cannot_run(model, layout, words):
    with pytest.raises(UserError) as caught:
        check_layout(model, layout)
    assert words in f"{caught.value};"
    with pytest.raises(UserError):
        Config(model=model, layout=layout)


def test_a_model_that_splits():
    check_layout(MODEL, Layout(tp=3, dp=5, sequence_parallel=True))
    check_layout(dataclasses.replace(MODEL, ffn_hidden_size=7), Layout(tp=2))  # it is padded
    check_layout(dataclasses.replace(MODEL, num_kv_heads=6), Layout(tp=4))  # heads are padded
    check_layout(dataclasses.replace(MODEL, seq_length=16), Layout(col=4))
    check_layout(MODEL, Layout(tp=2))  # tp alone does not split the odd sequence
    assert Config(model=MODEL, layout=Layout(tp=3)).layout.num_devices == 3
    for layout in (Layout(cp=2), Layout(tp=2, sequence_parallel=True), Layout(row=2, col=2)):
        check_layout(MODEL, layout)  # these do, and pad it


REMEDIES = [
    # What does not fit, and the text before the numbers that the message proposes.
    ("model.hidden_size=250", {"model.num_heads": 8}, "model.num_heads that divides 250 ("),
    ("model.hidden_size=250", {"model.num_heads": 8}, "model.hidden_size="),
    ("model.hidden_size=5", {"model.num_heads": 8}, "model.hidden_size="),
    ("model.num_heads=12", {"model.num_kv_heads": 5}, "model.num_kv_heads that divides 12 ("),
    ("model.num_heads=12", {"model.num_kv_heads": 5}, "model.num_heads="),
    ("model.images.window=5", {"model.family": "swin", "model.num_heads": 3}, "images.window of "),
    ("model.images.size=222", {"model.family": "swin", "model.num_heads": 3}, "multiple of "),
    ("train.global_batch_size=9", {"layout.dp": 2}, "multiple of "),
]


@pytest.mark.parametrize(("field", "others", "before"), REMEDIES)
def test_each_number_of_a_remedy_is_one(field, others, before):
    """Tries each number that the message proposes; each leaves nothing else wrong."""
    name, number = field.split("=")
    values = {"model.hidden_size": 240, "model.num_heads": 4, **others, name: int(number)}
    with pytest.raises(UserError) as caught:
        made(values)
    remedy = str(caught.value).partition("; ")[2]
    meant = before.split()[0] if " that divides " in before else name
    listed = re.match(r"[\d, or]+", remedy.partition(before)[2])
    assert listed, remedy
    numbers = [int(each) for each in re.findall(r"\d+", listed[0])]
    assert numbers
    for each in numbers:
        assert made({**values, meant: each})


def made(values):
    return from_dict(nested(values))


def test_a_message_lists_few_divisors_however_large_the_number():
    with pytest.raises(UserError) as caught:
        ModelConfig(hidden_size=2**20 * 3**6, num_heads=7)
    assert "(1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 27)" in str(caught.value)
