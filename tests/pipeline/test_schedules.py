"""Named schedules against the papers' statements; impossible sizes are refused."""

import numpy as np
import pytest
from counting import calls
from turns import slow

from jaxptd.errors import UserError
from jaxptd.pipeline.schedules import (
    MAX_CELLS,
    SCHEDULES,
    Operation,
    Schedule,
    check,
    make_schedule,
)
from tests.pipeline.test_table import passes, replay

STAGES = [1, 2, 3, 4, slow(8)]
F, B, W = Operation.F, Operation.B, Operation.W


def all_sizes(name: str, p: int) -> list[Schedule]:
    """The schedule with 1 to 4p micro-batches; interleaved also with 2 and 3 chunks."""
    chunks = (2, 3) if name == "interleaved" else (None,)
    return [
        make_schedule(name, stages=p, micro_batches=m, virtual_stages=V)
        for V in chunks
        for m in range(1, 4 * p + 1)
    ]


def cells(schedule: Schedule, stage: int) -> list[tuple[int, int, int]]:
    """A stage's operations in order, without idle ticks."""
    return [tuple(cell) for cell in schedule.table[:, stage].tolist() if cell[0]]


def held(schedule: Schedule) -> np.ndarray:
    """The most activations that each stage holds, each from F to its last operation."""
    operation = schedule.table[..., 0]
    last = W if (operation == W).any() else B
    return ((operation == F).astype(int) - (operation == last)).cumsum(0).max(0)


def pauses(schedule: Schedule) -> list[int]:
    """Idle ticks of each stage between its first and last operation."""
    worked = [np.flatnonzero(column) for column in schedule.table[..., 0].T]
    return [int(ticks[-1] - ticks[0] + 1 - len(ticks)) for ticks in worked]


# ---- the schedules ------------------------------------------------------------------------------


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_run(name, p):
    for schedule in all_sizes(name, p):
        assert schedule.name == name
        assert schedule.table.dtype == np.int32
        assert schedule.table.shape == (schedule.ticks, p, 3)
        assert replay(schedule)
        assert passes(schedule)
        assert schedule.splits == name.startswith("zb")
        assert not schedule.table[schedule.table[..., 0] == 0].any()
        assert schedule.table.any((1, 2)).all(), "a tick at which all stages are idle"


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
def test_1f1b_has_a_closed_form(p):
    for schedule in all_sizes("1f1b", p):
        m = schedule.micro_batches
        assert schedule.ticks == 2 * (m + p - 1)
        assert held(schedule).tolist() == [min(m, p - s) for s in range(p)]
        for s in range(p):
            for i in range(m):
                assert schedule.table[s + 2 * i, s].tolist() == [F, i, 0]
                assert schedule.table[2 * p - 1 - s + 2 * i, s].tolist() == [B, i, 0]


@pytest.mark.parametrize("p", STAGES)
def test_with_1f1b_every_second_pair_of_stages_exchanges_values_at_a_tick(p):
    for schedule in all_sizes("1f1b", p):
        for tick, row in enumerate(schedule.table[..., 0].tolist()):
            down = [s for s in range(p - 1) if row[s] == F]
            up = [s - 1 for s in range(1, p) if row[s] == B]
            assert all(s % 2 == tick % 2 for s in down + up)


def megatron_order(p: int, s: int, m: int, V: int) -> list[tuple[int, int, int]]:
    """The order of Narayanan et al., section 2.2, from Megatron-LM's `get_model_chunk_id`."""
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
        if m % p:  # with a smaller last group: at most the ticks of a full one
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
def test_zb_h1_and_zb_h2_have_the_memory_and_the_idle_ticks_of_the_paper(name, memory, pause, p):
    """Qi et al., section 2: H1 has p-1 idle ticks between operations, H2 none."""
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
    """Pins the ticks that these take; with one micro-batch no schedule takes fewer."""
    for m, extra in enumerate(more, start=1):
        schedule = make_schedule("zb-v", stages=p, micro_batches=m)
        assert schedule.ticks <= 6 * m + p - 1 + extra
    assert 6 + p - 1 + more[0] == 4 * p + 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_work_to_make_and_check_a_schedule_grows_as_its_micro_batches(name):
    half, whole = (
        calls(lambda m=m: check(make_schedule(name, stages=16, micro_batches=m))) for m in (64, 128)
    )
    assert whole < 2.2 * half
    assert whole < 2_000_000  # measured: 600,000, in a tenth of a second


# ---- sizes --------------------------------------------------------------------------------------


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
def test_sizes_that_do_not_exist_are_refused(name, sizes, words):
    with pytest.raises(UserError, match=words):
        make_schedule(name, **{"stages": 2, "micro_batches": 2, **sizes})


@pytest.mark.parametrize("name", SCHEDULES)
def test_virtual_stages_may_be_set_to_the_default(name):
    default = make_schedule(name, stages=2, micro_batches=2)
    said = make_schedule(name, stages=2, micro_batches=2, virtual_stages=default.chunks)
    np.testing.assert_array_equal(said.table, default.table)
