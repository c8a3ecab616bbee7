"""Layers of each part, and their rows in the stages' stacks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.errors import UserError
from jaxptd.pipeline.placement import chunk_rows, part_sizes, rows_of_layers, stack_sizes
from jaxptd.pipeline.schedules import SCHEDULES, Schedule, make_schedule


def stacks(name: str, p: int, sizes: tuple[int, ...]) -> list[list[int | None]]:
    """The layers of each stage's stack by row; None marks an unused row."""
    schedule = make_schedule(name, stages=p, micro_batches=2)
    rows, depth = rows_of_layers(schedule, sizes), chunk_rows(schedule, sizes)[-1]
    assert len(set(rows)) == sum(sizes)
    held = {row: layer for layer, row in enumerate(rows)}
    assert set(held) <= set(range(p * depth))
    return [[held.get(s * depth + row) for row in range(depth)] for s in range(p)]


def test_megatrons_eight_layers_on_two_stages_of_two_chunks() -> None:
    """Narayanan et al., arXiv 2104.04473, section 2.2."""
    sizes = part_sizes(8, 4)
    assert sizes == (2, 2, 2, 2)
    assert stacks("interleaved", 2, sizes) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_stacks_of_a_v() -> None:
    assert stacks("zb-v", 2, part_sizes(8, 4)) == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_smaller_parts_leave_rows_unused() -> None:
    assert stacks("1f1b", 3, (1, 3, 2)) == [[0, None, None], [1, 2, 3], [4, 5, None]]
    assert stacks("interleaved", 2, (1, 2, 0, 1)) == [[0, None, None, None], [1, 2, 3, None]]
    assert stacks("zb-v", 2, (2, 1, 1, 0)) == [[0, 1, None, None], [2, None, 3, None]]


@pytest.mark.parametrize(
    ("layers", "parts", "sizes"),
    [
        (5, 1, (5,)),
        (5, 2, (3, 2)),
        (5, 4, (1, 2, 1, 1)),
        (6, 4, (1, 2, 2, 1)),
        (7, 4, (2, 2, 2, 1)),
        (7, 3, (2, 3, 2)),
        (8, 3, (3, 3, 2)),
    ],
)
def test_the_remainder_goes_to_the_middle_then_to_the_first_part(layers, parts, sizes) -> None:
    assert part_sizes(layers, parts) == sizes


@given(st.integers(1, 12), st.integers(0, 40))
def test_sizes_are_as_equal_as_possible(parts: int, more: int) -> None:
    sizes = part_sizes(parts + more, parts)
    assert sum(sizes) == parts + more
    assert len(sizes) == parts
    assert min(sizes) >= 1
    assert max(sizes) <= min(sizes) + 1
    assert sizes[-1] == min(sizes)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_two_layers_have_the_same_row(name: str) -> None:
    for p, seed in ((1, 0), (2, 1), (3, 2), (4, 3)):
        parts = make_schedule(name, stages=p, micro_batches=1).parts
        stacks(name, p, tuple(1 + (seed + part * part) % 3 for part in range(parts)))


def test_sizes_may_be_given() -> None:
    assert part_sizes(6, 3, [4, 0, 2]) == (4, 0, 2)


def test_errors_of_periods_quote_the_layers_that_were_given() -> None:
    """Three parts of four layers, where the pipeline has two, and each period has two layers."""
    words = r"stage_layers=\[4, 4, 4\]: use 2 .* model.num_layers=12 in periods of 2"
    with pytest.raises(UserError, match=words):
        stack_sizes(
            {"blocks": 6}, make_schedule("1f1b", stages=2, micro_batches=2), (2, 2, 2), period=2
        )
    with pytest.raises(UserError, match=r"num_layers=2 in periods of 2 leaves some .* 2 parts"):
        stack_sizes({"blocks": 1}, make_schedule("1f1b", stages=2, micro_batches=2), period=2)


@pytest.mark.parametrize(
    ("given", "parts"), [([3, 3], 3), ([3, 2, 2], 3), ([7, -1], 2), ([2, 2, 2, 0], 3)]
)
def test_impossible_sizes_are_refused(given: list[int], parts: int) -> None:
    words = f"use {parts} numbers, one for each part .* that add up to model.num_layers=6"
    with pytest.raises(UserError, match=words) as caught:
        part_sizes(6, parts, given)
    assert f"layout.stage_layers={given}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_few_layers_are_refused() -> None:
    words = "model.num_layers=3 leaves some of the pipeline's 4 parts .* empty; use more layers"
    with pytest.raises(UserError, match=words) as caught:
        part_sizes(3, 4)
    assert "\n" not in str(caught.value)
    assert part_sizes(3, 4, [1, 1, 1, 0]) == (1, 1, 1, 0)


# ---- several stacks -----------------------------------------------------------------------------

T5 = {"encoder": 4, "decoder": 4}


def both(name: str, p: int, layers: dict[str, int], **given: Any) -> dict[str, list]:
    """The layers of each stage's stacks, by stack and row."""
    schedule = make_schedule(name, stages=p, micro_batches=2, virtual_stages=given.pop("V", None))
    return {s: stacks(name, p, own) for s, own in stack_sizes(layers, schedule, **given).items()}


def test_two_chunks_of_a_stage_are_an_encoders_and_a_decoders() -> None:
    """No row is unused; in a V the decoder's first part shares a stage with the encoder's last."""
    found = both("interleaved", 2, T5)
    assert found == {"encoder": [[0, 1], [2, 3]], "decoder": [[0, 1], [2, 3]]}
    found = both("zb-v", 2, T5)
    assert found == {"encoder": [[0, 1], [2, 3]], "decoder": [[2, 3], [0, 1]]}


def test_with_one_chunk_half_of_the_rows_are_unused() -> None:
    empty = [None, None]
    found = both("1f1b", 4, T5)
    assert found == {
        "encoder": [[0, 1], [2, 3], empty, empty],
        "decoder": [empty, empty, [0, 1], [2, 3]],
    }


@pytest.mark.parametrize(
    ("layers", "chunks", "sizes"),
    [
        ({"encoder": 6, "decoder": 2}, 4, [(1,) * 6 + (0,) * 2, (0,) * 6 + (1,) * 2]),
        ({"encoder": 5, "decoder": 2}, 2, [(3, 2, 0, 0), (0, 0, 1, 1)]),
        ({"encoder": 3, "decoder": 3}, 1, [(3, 0), (0, 3)]),
        ({"encoder": 5, "decoder": 2}, 1, [(4, 1), (0, 2)]),
        ({"blocks": 5}, 2, [(1, 2, 1, 1)]),
        ({"dense": 1, "sparse": 3}, 2, [(1, 0, 0, 0), (0, 1, 1, 1)]),  # too few for whole chunks
        ({"encoder": 4, "decoder": 1}, 2, [(1, 2, 1, 0), (0, 0, 0, 1)]),
    ],
)
def test_chunks_are_divided_by_the_numbers_of_layers(layers, chunks, sizes) -> None:
    """Parts hold one stack given enough chunks and layers; otherwise a part may mix two."""
    table = np.zeros((0, 2, 3), np.int32)
    found = stack_sizes(layers, Schedule("", 2, 4, chunks, "loop", table))
    assert [*found.values()] == sizes


def test_given_numbers_are_those_of_the_encoder_then_of_the_decoder() -> None:
    schedule = make_schedule("1f1b", stages=3, micro_batches=2)
    found = stack_sizes({"encoder": 4, "decoder": 3}, schedule, (2, 4, 1))
    assert found == {"encoder": (2, 2, 0), "decoder": (0, 2, 1)}


@pytest.mark.parametrize(
    ("layers", "given", "words"),
    [
        ({"encoder": 4, "decoder": 3}, (2, 4), r"add up to a depth of 7 layers \(4 of encoder"),
        ({"encoder": 4, "decoder": 3}, (2, 4, 0, 0), ", 3 of decoder"),
        (
            {"encoder": 2, "decoder": 1},
            None,
            r"a depth of 3 layers \(.*\) leaves some of the pipel",
        ),
        ({"blocks": 3}, None, "model.num_layers=3 leaves some of the pipeline's 4 parts"),
    ],
)
def test_stacks_that_do_not_fill_their_parts_are_refused(layers, given, words) -> None:
    schedule = make_schedule("zb-v", stages=2, micro_batches=2)
    with pytest.raises(UserError, match=words):
        stack_sizes(layers, schedule, given)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_every_layer_of_every_stack_is_in_one_part(p: int, V: int, more: int, others: int) -> None:
    schedule = Schedule("", p, 1, V, "loop", np.zeros((0, p, 3), np.int32))
    layers = {"encoder": p * V + more, "decoder": p * V + others}
    found = stack_sizes(layers, schedule)
    assert {stack: sum(sizes) for stack, sizes in found.items()} == layers
    parts = [*zip(*found.values(), strict=True)]
    assert all(map(any, parts))
    order = [number for part in parts for number, size in enumerate(part) if size]
    assert order == sorted(order)
