"""A model whose sizes a layout does not divide is an error with the remedy."""

import dataclasses

import pytest

from jaxptd.config import Config, ModelConfig, check_layout
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

MODEL = ModelConfig(hidden_size=60, num_heads=30, seq_length=9)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
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
        (
            dataclasses.replace(MODEL, seq_length=16),
            Layout(cp=3),
            "layout.cp=3, as layout.ring=zigzag needs; use a multiple of 6;",
        ),
        (
            dataclasses.replace(MODEL, seq_length=9),
            Layout(cp=3),
            "; use a multiple of 6, or layout.ring=blockwise;",
        ),
        (MODEL, Layout(cp=2, ring="rsa"), "model.seq_length=9 does not split over layout.cp=2"),
        (
            dataclasses.replace(MODEL, family="t5", seq_length=8, decoder_seq_length=6),
            Layout(cp=2),
            "model.decoder_seq_length=6 does not split into two chunks for each of layout.cp=2",
        ),
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
            dataclasses.replace(MODEL, seq_length=4),
            Layout(row=1, col=4, cp=2, attention2d="blocks"),
            "layout.cp=2, as layout.attention2d=blocks needs; use a multiple of 8",
        ),
        (
            dataclasses.replace(MODEL, seq_length=8),
            Layout(row=2, col=2, attention2d="blocks", matmul2d_slices=3),
            "layout.matmul2d_slices=3, layout.cp=1, as layout.attention2d=blocks needs; use a mult",
        ),
    ],
)
def test_a_model_that_does_not_split(model, layout, words):
    with pytest.raises(UserError) as caught:
        check_layout(model, layout)
    assert words in f"{caught.value};"
    with pytest.raises(UserError):
        Config(model=model, layout=layout)


def test_a_model_that_splits():
    check_layout(MODEL, Layout(tp=3, dp=5, sequence_parallel=True))
    check_layout(dataclasses.replace(MODEL, ffn_hidden_size=7), Layout(tp=2))  # it is padded
    check_layout(dataclasses.replace(MODEL, num_kv_heads=6), Layout(tp=4))  # and heads are
    check_layout(dataclasses.replace(MODEL, seq_length=16), Layout(col=4))
    check_layout(MODEL, Layout(tp=2))  # an odd sequence matters only where it is cut
    assert Config(model=MODEL, layout=Layout(tp=3)).layout.num_devices == 3
    check_layout(MODEL, Layout(cp=3, ring="blockwise"))
    check_layout(dataclasses.replace(MODEL, seq_length=18), Layout(cp=9))


def test_a_message_lists_few_divisors_however_large_the_number():
    with pytest.raises(UserError) as caught:
        ModelConfig(hidden_size=2**20 * 3**6, num_heads=7)
    assert "(1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 27)" in str(caught.value)
