"""The layers of each part, and their rows in the stages' stacks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.errors import UserError
from jaxptd.pipeline.placement import part_sizes, rows_of_layers
from jaxptd.pipeline.schedules import SCHEDULES, make_schedule


def stacks(name: str, p: int, sizes: tuple[int, ...]) -> list[list[int | None]]:
    """The layers of each stage's stack by row; None for an unused row."""
    schedule = make_schedule(name, stages=p, micro_batches=2)
    rows, depth = rows_of_layers(schedule, sizes), schedule.chunks * max(sizes)
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
