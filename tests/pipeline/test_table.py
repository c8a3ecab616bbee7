"""Schedules as tables: parts of stages, `check` against a replay, and files."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxptd.errors import UserError
from jaxptd.pipeline.schedules import SCHEDULES, make_schedule
from jaxptd.pipeline.table import F, Schedule, check, read_csv, to_csv


def replay(schedule: Schedule) -> bool:
    """True if every operation runs once, on inputs from earlier ticks; independent of `check`."""
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    done: set[tuple[str, int, int]] = set()  # in earlier ticks
    for row in schedule.table.tolist():
        now = []
        for s, (operation, i, chunk) in enumerate(row):
            if operation == 0:
                continue
            if not (0 <= i < m and 0 <= chunk < V):
                return False
            q = [s, 2 * p - 1 - s][chunk] if schedule.placement == "v" else s + chunk * p
            needs = {
                1: {("F", q - 1, i)} if q > 0 else set(),
                2: {("F", q, i), ("B", q + 1, i)} if q < p * V - 1 else {("F", q, i)},
                3: {("B", q, i)},
            }[operation]
            mine = (" FBW"[operation], q, i)
            if not needs <= done or mine in done:
                return False
            now.append(mine)
        done |= set(now)
    kinds = "FBW" if any(kind == "W" for kind, _, _ in done) else "FB"
    return done == {(kind, q, i) for kind in kinds for q in range(p * V) for i in range(m)}


def passes(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except UserError as error:
        assert "\n" not in str(error)
        return False
    return True


# ---- parts --------------------------------------------------------------------------------------


def test_the_parts_of_megatrons_example():
    """8 layers, 2 stages, 2 chunks: stage 0 has layers [0, 1] [4, 5], stage 1 [2, 3] [6, 7]."""
    schedule = make_schedule("interleaved", stages=2, micro_batches=2)
    layers = [[2 * q, 2 * q + 1] for q in range(schedule.parts)]
    of_stages = [[layers[schedule.part(s, c)] for c in range(2)] for s in range(2)]
    assert of_stages == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_the_parts_of_a_v():
    schedule = make_schedule("zb-v", stages=3, micro_batches=1)
    assert [[schedule.part(s, c) for c in range(2)] for s in range(3)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_where_is_the_inverse_of_part(name):
    schedule = make_schedule(name, stages=4, micro_batches=2)
    places = [schedule.where(q) for q in range(schedule.parts)]
    assert [schedule.part(*place) for place in places] == list(range(schedule.parts))
    assert sorted(places) == [(s, c) for s in range(4) for c in range(schedule.chunks)]


# ---- the check ----------------------------------------------------------------------------------

SMALL = [
    make_schedule(name, stages=p, micro_batches=m)
    for name in SCHEDULES
    for p, m in ((1, 2), (2, 3), (3, 4))
]


def changed(schedule: Schedule, *changes: tuple[tuple[int, int], list[int]]) -> Schedule:
    table = schedule.table.copy()
    for place, cell in changes:
        table[place] = cell
    return dataclasses.replace(schedule, table=table)


@given(st.data())
@settings(max_examples=300)
def test_a_table_with_two_cells_swapped_is_refused_unless_it_can_run(data):
    schedule = data.draw(st.sampled_from(SMALL))
    tick, stage = st.integers(0, schedule.ticks - 1), st.integers(0, schedule.stages - 1)
    a, b = data.draw(st.tuples(tick, stage)), data.draw(st.tuples(tick, stage))
    table = schedule.table
    swapped = changed(schedule, (a, table[b].tolist()), (b, table[a].tolist()))
    assert passes(swapped) == replay(swapped)


@pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name} {s.stages}")
def test_a_table_with_a_missing_or_an_extra_cell_is_refused(schedule):
    busy = [tuple(place) for place in np.argwhere(schedule.table[..., 0] > 0).tolist()]
    more = np.concatenate([schedule.table, np.zeros((1, schedule.stages, 3), np.int32)])
    longer = dataclasses.replace(schedule, table=more)
    assert passes(longer)
    for place in busy:
        assert not passes(changed(schedule, (place, [0, 0, 0])))
        again = (schedule.ticks, place[1])
        assert not passes(changed(longer, (again, schedule.table[place].tolist())))


def test_a_value_cannot_be_read_at_the_tick_at_which_it_is_sent():
    schedule = make_schedule("gpipe", stages=2, micro_batches=1)
    table = np.delete(schedule.table, 1, axis=0)
    table[0] = [[F, 0, 0], [F, 0, 0]]
    with pytest.raises(UserError, match="F0 of stage 1, chunk 0, is at tick 0, but F0 of stage 0"):
        check(dataclasses.replace(schedule, table=table))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"placement": "z"}, "schedule.placement=z: use one of loop, v"),
        ({"placement": "v"}, "placement=v has 2 chunks per stage, not 1; use placement=loop"),
        ({"stages": 0}, "schedule.stages=0: use 1 or more"),
        ({"stages": 2.5}, "schedule.stages=2.5: use a whole number"),
        ({"table": 3}, "schedule.table=3: use a NumPy array"),
        ({"table": np.zeros((4, 2, 3))}, "a table of float64; use int32"),
        ({"stages": 3}, r"a table of shape \[4, 2, 3\]; use \[ticks, 3, 3\]"),
        ({"table": np.zeros((4, 2), int)}, r"a table of shape \[4, 2\]; use"),
        ({"table": np.full((4, 2, 3), 4)}, "there is no operation 4; use 0 .idle., 1 .F., 2"),
        ({"table": np.full((4, 2, 3), -1)}, "there is no operation -1"),
        ({"micro_batches": 2}, "F1 of stage 0, chunk 0, is missing; add it"),
        ({"chunks": 2}, "F0 of stage 0, chunk 1, is missing; add it"),
    ],
)
def test_a_table_of_other_sizes_than_the_schedules_is_refused(fields, words):
    schedule = make_schedule("1f1b", stages=2, micro_batches=1)
    with pytest.raises(UserError, match=words):
        check(dataclasses.replace(schedule, **fields))


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ([F, 1, 0], "stage 1 at tick 1 has micro-batch 1; there are 1, use 0 to 0"),
        ([F, -1, 0], "stage 1 at tick 1 has micro-batch -1"),
        ([F, 0, 1], "stage 1 at tick 1 has chunk 1; there are 1, use 0 to 0"),
        ([F, 0, -1], "stage 1 at tick 1 has chunk -1"),
    ],
)
def test_an_unknown_micro_batch_or_chunk_is_refused(cell, words):
    schedule = make_schedule("1f1b", stages=2, micro_batches=1)
    with pytest.raises(UserError, match=words):
        check(changed(schedule, ((1, 1), cell)))


# ---- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_the_same_after_writing_and_reading(name, tmp_path):
    path = tmp_path / "table.csv"
    for p, m in ((1, 1), (2, 3), (4, 8)):
        schedule = make_schedule(name, stages=p, micro_batches=m)
        path.write_text(to_csv(schedule))
        back = make_schedule(str(path), stages=p, micro_batches=m, virtual_stages=schedule.chunks)
        np.testing.assert_array_equal(back.table, schedule.table)
        assert back.table.dtype == np.int32
        assert back.name == str(path)
        for field in ("stages", "micro_batches", "chunks", "placement"):
            assert getattr(back, field) == getattr(schedule, field)


def test_the_file_of_1f1b():
    text = to_csv(make_schedule("1f1b", stages=2, micro_batches=2))
    assert text == "F0,,F1,B0,,B1\n,F0,B0,F1,B1,\n"


def test_the_file_of_a_v():
    text = to_csv(make_schedule("zb-v", stages=1, micro_batches=1))
    assert text == "placement,v\nF0.0,F0.1,B0.1,W0.1,B0.0,W0.0\n"


def test_spaces_empty_lines_and_lines_of_different_length_are_read(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("placement, loop\n\n F0, , ,B0\r\n,F0 ,B0\n\n")
    schedule = read_csv(path)
    assert (schedule.stages, schedule.ticks, schedule.placement) == (2, 4, "loop")
    assert to_csv(schedule) == "F0,,,B0\n,F0,B0,\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; write a line per stage, with cells such as F0"),
        (",,\n", "is empty"),
        ("placement,v\n", "is empty"),
        ("F0,X0\n", "stage 0 has a cell 'X0'; write F0, B0 or W0, with a chunk F0.1, or nothing"),
        ("F0,B0\nF0,f1\n", "stage 1 has a cell 'f1'"),
        ("F0,B0.\n", "a cell 'B0.'"),
        ("F0,B²\n", "a cell 'B²'"),
        ("F0,B0,F1\n", "B1 of stage 0, chunk 0, is missing; add it"),
        ("F0,B0,B0\n", "B0 of stage 0, chunk 0, is done twice, at ticks 1 and 2"),
        ("F0,F1,B0,B1,W0\n", "W1 of stage 0, chunk 0, is missing"),
        ("F0,W0,B0\n", "W0 of stage 0, chunk 0, is at tick 1, but B0 of stage 0, chunk 0, which"),
        ("B0,F0\n", "which it needs, is at tick 1; move it to a later tick than that"),
        ("F0,,B0\n,F0,B0\n", "B0 of stage 0, chunk 0, is at tick 2, but B0 of stage 1"),
        ("F0,,B0\nF0,B0\n", "F0 of stage 1, chunk 0, is at tick 0, but F0 of stage 0"),
        ("placement,z\nF0,B0\n", "placement=z: use one of loop, v"),
        ("placement,v\nF0,B0\n", "placement=v has 2 chunks per stage, not 1"),
    ],
)
def test_a_file_that_is_not_a_schedule_is_refused(tmp_path, text, words):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_csv(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file or directory; name a .csv file"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(UserError, match="name a .csv file that can be read"):
        read_csv(tmp_path)
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not text"):
        read_csv(path)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"stages": 3, "micro_batches": 3}, "is a table for stages=2, not 3; use stages=2 or ano"),
        ({"stages": 2, "micro_batches": 4}, "is a table for micro_batches=3, not 4; use micro_"),
        (
            {"stages": 2, "micro_batches": 3, "virtual_stages": 2},
            "is a table for virtual_stages=1, not 2; use virtual_stages=1",
        ),
    ],
)
def test_a_file_for_other_sizes_is_refused(tmp_path, sizes, words):
    path = tmp_path / "table.csv"
    path.write_text(to_csv(make_schedule("1f1b", stages=2, micro_batches=3)))
    assert make_schedule(str(path), stages=2, micro_batches=3).ticks == 8
    with pytest.raises(UserError, match=words):
        make_schedule(str(path), **sizes)
