"""Remarks at a run's start: fields without effect, schedules that could be shorter."""

import dataclasses

import pytest
import tiny

from jaxptd.config import OptimizerConfig, TrainConfig
from jaxptd.mesh import Layout, make_mesh
from jaxptd.run import warnings
from jaxptd.run.warnings import remarks
from jaxptd.step import Program


def test_fields_without_effect_are_named() -> None:
    program = tiny.program(Layout(ring="rsa", zero=2), remat_layers=1)
    assert list(remarks(program)) == [
        "layout.ring=rsa has no effect without a ring, layout.cp or layout.row of 2 or more",
        "layout.zero=2 has no effect without layout.dp, layout.ep, layout.cp or layout.ulysses "
        "of 2 or more",
        "model.remat_layers=1 has no effect without model.remat",
    ]


def test_padding_of_sequences_is_named() -> None:
    choice = {**tiny.T5, "seq_length": 15, "encoder_decoder.seq_length": 9}
    words = (
        "every sequence is padded to {} to split over the devices; a multiple of 4 needs no padding"
    )
    assert list(remarks(tiny.program(Layout(cp=2), **choice))) == [
        f"model.seq_length=15: {words.format(16)}",
        f"model.encoder_decoder.seq_length=9: {words.format(12)}",
    ]


def test_axes_that_leave_an_nvlink_domain_are_named(monkeypatch) -> None:
    monkeypatch.setattr(warnings, "known_domains", lambda devices: [0, 0, 1, 1][: len(devices)])
    (said,) = remarks(tiny.program(Layout(tp=4)))
    assert said.startswith("layout.tp=4: each group lies in 2 NVLink domains of 2 devices")
    assert list(remarks(tiny.program(Layout(dp=2, tp=2)))) == []


@pytest.mark.parametrize(("schedule", "remarked"), [("1f1b", True), ("zb-v", False)])
def test_rows_of_layers_in_vain_are_named(schedule: str, remarked: bool) -> None:
    found = list(remarks(tiny.program(Layout(pp=2, schedule=schedule), **tiny.T5, num_layers=4)))
    assert found == remarked * [
        "layout.schedule=1f1b uses 7 of the 14 rows of layers on its stages: a stage has one "
        "chunk, but the model has 2 stacks; use interleaved or zb-v, which have two chunks"
    ]


@pytest.mark.parametrize(("micro_batches", "remarked"), [(4, False), (5, True)])
def test_a_schedule_that_could_be_shorter_is_named(micro_batches, remarked) -> None:
    layout = Layout(pp=4, schedule="interleaved")
    sizes = {"num_layers": 8, "batch": micro_batches, "micro_batches": micro_batches}
    found = list(remarks(tiny.program(layout, **sizes)))
    assert found == remarked * [
        "layout.schedule=interleaved takes 32 ticks where 26 would do, since train.micro_batches=5 "
        "is not a multiple of layout.pp=4; use 4 or 8 micro-batches"
    ]


def of_run(steps: int, warmup: int) -> list[str]:
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=warmup)
    sections = {"optimizer": optimizer, "train": TrainConfig(steps=steps)}
    config = dataclasses.replace(tiny.config(Layout()), **sections)
    return list(remarks(Program(config, make_mesh(config.layout))))


@pytest.mark.parametrize(
    ("steps", "warmup", "reached"),
    [
        (50, 100, "0.0005, below its peak of 0.001"),
        (100, 100, "its peak"),
        (101, 100, None),
        (1, 1, None),
        (2, 0, None),
    ],
)
def test_a_warm_up_that_does_not_end_is_named(steps, warmup, reached) -> None:
    words = f"optimizer.warmup_steps={warmup} with train.steps={steps}: the learning rate rises "
    rest = f"until the last step, to {reached}; use fewer warm-up steps"
    assert of_run(steps, warmup) == ([words + rest] if reached else [])


@pytest.mark.parametrize(("length", "remarked"), [(8, False), (9, True)])
def test_a_sequence_beyond_the_positions_of_the_weights_is_named(length, remarked) -> None:
    found = list(
        remarks(tiny.program(Layout(), family="llama", max_positions=8, seq_length=length))
    )
    assert found == remarked * [
        "model.seq_length=9 exceeds model.max_positions=8, the longest sequence that the model "
        "was trained for; use 8 or less, unless you train it on longer ones"
    ]


@pytest.mark.parametrize(
    ("layout", "kv_heads", "padded"),
    [
        (Layout(tp=4), None, "8 to"),
        (Layout(tp=2), None, None),
        (Layout(row=1, col=4), None, "8 to"),
        (Layout(row=1, col=4, attention2d="blocks"), None, None),  # slices of every head
        (Layout(tp=4), 3, "8 (3 KV heads to 4) to"),
        (Layout(tp=2), 2, None),
    ],
)
def test_padded_heads_are_named(layout, kv_heads, padded) -> None:
    sizes = {"hidden_size": 24, "num_heads": 6, "num_kv_heads": kv_heads}
    found = list(remarks(tiny.program(layout, **sizes)))
    assert found == ([] if padded is None else [
        f"6 attention heads are padded to {padded} split over 4 devices, which wastes compute; "
        f"use a layout.tp or layout.col that divides {kv_heads or 6}"
    ])  # fmt: skip
    device_heads = {"attention.qkv.w", "attention.q.w"}
    infos = tiny.program(layout, **sizes).infos.items()
    shapes = [
        info.stored_shape for name, info in infos if name.removeprefix("blocks.") in device_heads
    ]
    assert shapes
    assert all((8 in shape) == (padded is not None) for shape in shapes)


@pytest.mark.parametrize(("multiple", "remarked"), [(1, False), (13, False), (16, True)])
def test_a_vocabulary_with_many_unused_rows_is_named(multiple, remarked) -> None:
    found = list(remarks(tiny.program(Layout(), vocab_multiple=multiple)))
    words = "model.vocab_size=13 is padded to 16; use a smaller model.vocab_multiple"
    assert found == remarked * [words]
