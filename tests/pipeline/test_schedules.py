"""Each schedule against what the papers say of it; the check against a replay; the file."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxptd.errors import UserError
from jaxptd.pipeline.schedules import (
    MAX_CELLS,
    SCHEDULES,
    Operation,
    Schedule,
    check,
    make_schedule,
    read_csv,
    to_csv,
)

STAGES = [1, 2, 3, 4, 8]
F, B, W = Operation.F, Operation.B, Operation.W


def all_sizes(name: str, p: int) -> list[Schedule]:
    """The schedule of 1 to 4p micro-batches, interleaved with 2 and 3 chunks."""
    chunks = (2, 3) if name == "interleaved" else (None,)
    return [
        make_schedule(name, stages=p, micro_batches=m, virtual_stages=V)
        for V in chunks
        for m in range(1, 4 * p + 1)
    ]


def replay(schedule: Schedule) -> bool:
    """Whether a table can be carried out and does everything once: an account of its own."""
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    done: set[tuple[str, int, int]] = set()  # at earlier ticks
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


def cells(schedule: Schedule, stage: int) -> list[tuple[int, int, int]]:
    """What a stage does, in order, without its pauses."""
    return [tuple(cell) for cell in schedule.table[:, stage].tolist() if cell[0]]


def held(schedule: Schedule) -> np.ndarray:
    """The most chunk activations of each stage, from F to its last operation."""
    operation = schedule.table[..., 0]
    last = W if (operation == W).any() else B
    return ((operation == F).astype(int) - (operation == last)).cumsum(0).max(0)


# --- The schedules


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_carried_out(name, p):
    for schedule in all_sizes(name, p):
        assert schedule.name == name
        assert schedule.table.dtype == np.int32
        assert schedule.table.shape == (schedule.ticks, p, 3)
        assert replay(schedule)
        assert passes(schedule)
        assert schedule.splits == name.startswith("zb")
        assert not schedule.table[schedule.table[..., 0] == 0].any()
        assert schedule.table.any((1, 2)).all(), "a tick at which nobody works"


@pytest.mark.parametrize("p", STAGES)
def test_gpipe_runs_all_forwards_then_all_backwards(p):
    for schedule in all_sizes("gpipe", p):
        m = schedule.micro_batches
        assert schedule.ticks == 2 * (m + p - 1)
        for s in range(p):
            ticks = np.flatnonzero(schedule.table[:, s, 0])
            assert ticks.tolist() == [
                *range(s, s + m),
                *range(m + 2 * (p - 1) - s, 2 * m + 2 * (p - 1) - s),
            ]
            forward, backward = ([(kind, i, 0) for i in range(m)] for kind in (F, B))
            assert cells(schedule, s) == forward + backward
        assert held(schedule).tolist() == [m] * p


@pytest.mark.parametrize("p", STAGES)
def test_1f1b_has_its_closed_form(p):
    for schedule in all_sizes("1f1b", p):
        m = schedule.micro_batches
        assert schedule.ticks == 2 * (m + p - 1)
        assert held(schedule).tolist() == [min(m, p - s) for s in range(p)]
        for s in range(p):
            for i in range(m):
                assert schedule.table[s + 2 * i, s].tolist() == [F, i, 0]
                assert schedule.table[2 * p - 1 - s + 2 * i, s].tolist() == [B, i, 0]


@pytest.mark.parametrize("p", STAGES)
def test_with_1f1b_only_every_other_pair_of_stages_exchanges_at_a_tick(p):
    for schedule in all_sizes("1f1b", p):
        for tick, row in enumerate(schedule.table[..., 0].tolist()):
            down = [s for s in range(p - 1) if row[s] == F]
            up = [s - 1 for s in range(1, p) if row[s] == B]
            assert all(s % 2 == tick % 2 for s in down + up)


def megatron_order(p: int, s: int, m: int, V: int) -> list[tuple[int, int, int]]:
    """Narayanan et al., section 2.2, as Megatron-LM's `get_model_chunk_id` counts it out."""
    total, warm_up = m * V, min(2 * (p - s - 1) + (V - 1) * p, m * V)

    def cell(operation: int, k: int) -> tuple[int, int, int]:
        group, rest = divmod(k, p * V)
        chunk, i = divmod(rest, p)
        return operation, group * p + i, chunk if operation == F else V - 1 - chunk

    order = [cell(F, k) for k in range(warm_up)]
    for k in range(total - warm_up):
        order += [cell(F, warm_up + k), cell(B, k)]
    return order + [cell(B, k) for k in range(total - warm_up, total)]


@pytest.mark.parametrize("p", STAGES)
def test_interleaved_has_megatrons_order(p):
    for schedule in all_sizes("interleaved", p):
        m, V = schedule.micro_batches, schedule.chunks
        ideal = 2 * (m * V + p - 1)
        if m % p:  # a smaller last group: more bubble, but not more than a full one would take
            assert ideal <= schedule.ticks <= 2 * (V * p * -(-m // p) + p - 1)
            assert (held(schedule) <= [p * V + p - 2 * s - 1 for s in range(p)]).all()
            continue
        assert schedule.ticks == ideal
        for s in range(p):
            assert cells(schedule, s) == megatron_order(p, s, m, V)
            assert held(schedule)[s] == min(m * V, p * V + p - 2 * s - 1)


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize(
    ("name", "memory", "pause"),
    [("zb-h1", lambda p: p, lambda p: p - 1), ("zb-h2", lambda p: 2 * p - 1, lambda p: 0)],
)
def test_zero_bubble_schedules(name, memory, pause, p):
    """Qi et al., section 2: F, B, W take a tick each; H1 pauses p-1 ticks, H2 does not."""
    for schedule in all_sizes(name, p):
        m = schedule.micro_batches
        assert held(schedule).tolist() == [min(m, memory(p))] * p
        if m >= p:
            assert schedule.ticks == 3 * m + p - 1
        if m >= memory(p):
            assert max(pauses(schedule)) == pause(p)


@pytest.mark.parametrize("p", STAGES)
def test_zb_v_has_no_bubble_and_the_memory_of_1f1b(p):
    for schedule in all_sizes("zb-v", p):
        m = schedule.micro_batches
        assert (schedule.chunks, schedule.placement) == (2, "v")
        assert held(schedule).tolist() == [min(2 * m, 2 * p)] * p
        if m >= 2 * p - 1:
            assert schedule.ticks == 6 * m + p - 1
            assert pauses(schedule) == [0] * p


@pytest.mark.parametrize(
    ("p", "more"),
    [
        (2, [2, 0]),
        (3, [5, 2, 0, 1]),
        (4, [8, 4, 2, 0, 2, 0]),
        (8, [20, 16, 12, 8, 6, 4, 2, 0, 6, 4, 2, 0, 0, 0]),
    ],
)
def test_zb_v_with_few_micro_batches(p, more):
    """No more ticks than were counted once; with one micro-batch no schedule has fewer."""
    for m, extra in enumerate(more, start=1):
        schedule = make_schedule("zb-v", stages=p, micro_batches=m)
        assert schedule.ticks <= 6 * m + p - 1 + extra
    assert 6 + p - 1 + more[0] == 4 * p + 1


def pauses(schedule: Schedule) -> list[int]:
    """Idle ticks of each stage between its first and last operation."""
    worked = [np.flatnonzero(column) for column in schedule.table[..., 0].T]
    return [int(ticks[-1] - ticks[0] + 1 - len(ticks)) for ticks in worked]


def test_a_large_schedule_takes_no_time():
    for name in SCHEDULES:
        start = time.process_time()
        check(make_schedule(name, stages=16, micro_batches=128))
        assert time.process_time() - start < 2  # a tenth of it here


# --- Placement


def test_parts_of_megatrons_example():
    """8 layers, 2 stages, 2 chunks: two layers a part, stage 0 has [0,1] [4,5], 1 [2,3] [6,7]."""
    schedule = make_schedule("interleaved", stages=2, micro_batches=2)
    layers = [[2 * q, 2 * q + 1] for q in range(schedule.parts)]
    of_stages = [[layers[schedule.part(s, c)] for c in range(2)] for s in range(2)]
    assert of_stages == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_parts_of_a_v():
    schedule = make_schedule("zb-v", stages=3, micro_batches=1)
    assert [[schedule.part(s, c) for c in range(2)] for s in range(3)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_where_is_the_inverse_of_part(name):
    schedule = make_schedule(name, stages=4, micro_batches=2)
    places = [schedule.where(q) for q in range(schedule.parts)]
    assert [schedule.part(*place) for place in places] == list(range(schedule.parts))
    assert sorted(places) == [(s, c) for s in range(4) for c in range(schedule.chunks)]


# --- The check

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
def test_a_table_with_two_cells_swapped_is_refused_unless_it_can_be_carried_out(data):
    schedule = data.draw(st.sampled_from(SMALL))
    tick, stage = st.integers(0, schedule.ticks - 1), st.integers(0, schedule.stages - 1)
    a, b = data.draw(st.tuples(tick, stage)), data.draw(st.tuples(tick, stage))
    table = schedule.table
    swapped = changed(schedule, (a, table[b].tolist()), (b, table[a].tolist()))
    assert passes(swapped) == replay(swapped)


@pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name} {s.stages}")
def test_a_table_with_a_cell_too_few_or_too_many_is_refused(schedule):
    busy = [tuple(place) for place in np.argwhere(schedule.table[..., 0] > 0).tolist()]
    more = np.concatenate([schedule.table, np.zeros((1, schedule.stages, 3), np.int32)])
    longer = dataclasses.replace(schedule, table=more)
    assert passes(longer)
    for place in busy:
        assert not passes(changed(schedule, (place, [0, 0, 0])))
        again = (schedule.ticks, place[1])
        assert not passes(changed(longer, (again, schedule.table[place].tolist())))


def test_a_value_cannot_be_used_at_the_tick_at_which_it_is_sent():
    schedule = make_schedule("gpipe", stages=2, micro_batches=1)
    table = np.delete(schedule.table, 1, axis=0)
    table[0] = [[F, 0, 0], [F, 0, 0]]
    with pytest.raises(UserError, match="F0 of stage 1, chunk 0, is at tick 0, but F0 of stage 0"):
        check(dataclasses.replace(schedule, table=table))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"placement": "z"}, "schedule 1f1b: placement=z: use one of loop, v"),
        ({"placement": "v"}, "placement=v has 2 chunks per stage, not 1; use placement=loop"),
        ({"stages": 3}, r"a table of shape \[4, 2, 3\]; use \[ticks, 3, 3\]"),
        ({"table": np.zeros((4, 2), int)}, r"a table of shape \[4, 2\]; use"),
        ({"table": np.full((4, 2, 3), 4)}, "there is no operation 4; use 0 .idle., 1 .F., 2"),
        ({"table": np.full((4, 2, 3), -1)}, "there is no operation -1"),
        ({"micro_batches": 2}, "F1 of stage 0, chunk 0, is missing; add it"),
        ({"chunks": 2}, "F0 of stage 0, chunk 1, is missing; add it"),
    ],
)
def test_a_table_that_does_not_fit_its_sizes(fields, words):
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
def test_an_unknown_micro_batch_or_chunk(cell, words):
    schedule = make_schedule("1f1b", stages=2, micro_batches=1)
    with pytest.raises(UserError, match=words):
        check(changed(schedule, ((1, 1), cell)))


# --- The file


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_comes_back_from_its_file(name, tmp_path):
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


def test_a_file_may_have_spaces_empty_lines_and_lines_of_different_length(tmp_path):
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
def test_a_file_that_is_no_schedule(tmp_path, text, words):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_csv(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
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
def test_a_file_for_other_sizes(tmp_path, sizes, words):
    path = tmp_path / "table.csv"
    path.write_text(to_csv(make_schedule("1f1b", stages=2, micro_batches=3)))
    assert make_schedule(str(path), stages=2, micro_batches=3).ticks == 8
    with pytest.raises(UserError, match=words):
        make_schedule(str(path), **sizes)


# --- What cannot be


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("2f2b", {}, "schedule=2f2b: use one of 1f1b, gpipe, interleaved, zb-h1, .* or a .csv"),
        ("1f1b", {"stages": 0}, "stages=0: use 1 or more"),
        ("1f1b", {"micro_batches": -1}, "micro_batches=-1: use 1 or more"),
        ("interleaved", {"virtual_stages": 0}, "virtual_stages=0: use 1 or more"),
        ("interleaved", {"virtual_stages": 1}, "use 2 or more, or schedule=1f1b"),
        ("1f1b", {"virtual_stages": 2}, "1f1b has virtual_stages=1, not 2; leave .* out, or use"),
        ("zb-v", {"virtual_stages": 1}, "zb-v has virtual_stages=2, not 1"),
        ("gpipe", {"micro_batches": MAX_CELLS}, "and 1 chunks per stage is too large"),
        ("1f1b", {"stages": MAX_CELLS}, "use fewer"),
    ],
)
def test_sizes_that_cannot_be(name, sizes, words):
    with pytest.raises(UserError, match=words):
        make_schedule(name, **{"stages": 2, "micro_batches": 2, **sizes})


@pytest.mark.parametrize("name", SCHEDULES)
def test_virtual_stages_may_be_said_where_they_are_the_schedules_own(name):
    default = make_schedule(name, stages=2, micro_batches=2)
    said = make_schedule(name, stages=2, micro_batches=2, virtual_stages=default.chunks)
    np.testing.assert_array_equal(said.table, default.table)
