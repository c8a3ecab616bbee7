"""Remarks at the start of a run: fields without effect, schedules that could be shorter."""

import pytest
import tiny

from jaxptd.mesh import Layout
from jaxptd.run.remarks import remarks


def test_fields_without_effect_are_named() -> None:
    program = tiny.program(Layout(ring="rsa", zero=2), remat_layers=1)
    assert list(remarks(program)) == [
        "layout.ring=rsa has no effect without a ring, layout.cp or layout.row of 2 or more",
        "layout.zero=2 has no effect without layout.dp or layout.cp of 2 or more",
        "model.remat_layers=1 has no effect without model.remat",
    ]


def test_padding_of_sequences_is_named() -> None:
    choice = {**tiny.T5, "seq_length": 15, "decoder_seq_length": 9}
    words = "every sequence is padded to {}, a multiple of 4, to split over the devices"
    assert list(remarks(tiny.program(Layout(cp=2), **choice))) == [
        f"model.seq_length=15: {words.format(16)}",
        f"model.decoder_seq_length=9: {words.format(12)}",
    ]


@pytest.mark.parametrize(("schedule", "remarked"), [("1f1b", True), ("zb-v", False)])
def test_rows_of_layers_in_vain_are_named(schedule: str, remarked: bool) -> None:
    found = list(remarks(tiny.program(Layout(pp=2, schedule=schedule), **tiny.T5, num_layers=4)))
    assert found == remarked * [
        "layout.schedule=1f1b has 14 rows of layers on its stages and uses 7, since a stage has "
        "one chunk and the model 2 stacks; interleaved and zb-v have two"
    ]


@pytest.mark.parametrize(("micro_batches", "remarked"), [(4, False), (5, True)])
def test_a_schedule_that_could_be_shorter_is_named(micro_batches, remarked) -> None:
    layout = Layout(pp=4, schedule="interleaved")
    sizes = {"num_layers": 8, "batch": micro_batches, "micro_batches": micro_batches}
    found = list(remarks(tiny.program(layout, **sizes)))
    assert found == remarked * [
        "layout.schedule=interleaved takes 32 ticks where 26 would do, since train.micro_batches=5 "
        "is no multiple of layout.pp=4; use 4 or 8 micro-batches"
    ]
