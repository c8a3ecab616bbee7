"""Finds the process that blocks a run among those that only wait or compile."""

import contextlib
import threading

import pytest

from jaxptd.atomic_files import write_whole
from jaxptd.distributed.watchdog import Beat, Phase, Watchdog, long_phases, stuck

W, R, C = Phase.WAITING, Phase.READING, Phase.COMPILING


def beat(phase: Phase, seconds: float, *, limit: float | None = 40.0, step: int = 7) -> Beat:
    return Beat(step, phase, seconds, limit)


@pytest.mark.parametrize(
    ("beats", "rank"),
    [
        ([beat(W, 39), beat(W, 39)], None),
        ([beat(W, 41), beat(R, 41)], 1),  # the one that reads blocks the run
        ([beat(W, 90), beat(R, 10)], None),  # the one that reads began recently
        ([beat(W, 900), beat(C, 900, limit=None)], None),  # compiling has no limit
        ([beat(W, 41), beat(W, 39)], None),
        ([beat(W, 41), beat(W, 41, step=6)], 1),
        ([beat(W, 41), beat(W, 41)], 0),
        ([beat(R, 41), beat(R, 50), beat(W, 60)], 1),
        ([beat(R, 41)], 0),
        ([beat(C, 9e9, limit=None)], None),
    ],
)
def test_who_holds_the_run_up(beats, rank):
    assert stuck(dict(enumerate(beats))) == rank


def test_a_beat_goes_through_json():
    for each in (Beat(), beat(R, 1.5), beat(C, 2, limit=None)):
        assert Beat.from_json(each.to_json()) == each
    assert str(beat(R, 1.5)) == "reading data at step 7"


def test_phases_begin_anew_and_go_back_to_the_outer_one():
    watchdog = Watchdog(40)
    watchdog.tick(5)
    assert watchdog.beat() == Beat(0, Phase.STARTING, 5, None)
    with watchdog.phase(Phase.SAVING):
        watchdog.tick(3)
        assert watchdog.beat() == Beat(0, Phase.SAVING, 3, 400)
        with pytest.raises(KeyError), watchdog.phase(Phase.READING):
            watchdog.tick(2)
            assert watchdog.beat() == Beat(0, Phase.READING, 2, 40)
            raise KeyError
        assert watchdog.beat().phase is Phase.SAVING
    assert watchdog.beat() == Beat(0, Phase.STARTING, 0, None)


def limit(*waits: float, stuck_after: float = 40.0) -> float | None:
    """Limit on waiting after steps that waited this many seconds."""
    watchdog = Watchdog(stuck_after)
    steps = watchdog.steps(1, len(waits) + 1)
    for seconds in waits:
        next(steps)
        for part in (0.25, 0.75):  # in two parts
            with watchdog.phase(Phase.WAITING):
                watchdog.tick(part * seconds)
    next(steps)
    assert watchdog.beat().phase is Phase.LOOP
    with watchdog.phase(Phase.WAITING):
        return watchdog.beat().limit


def test_the_limit_of_a_step_follows_from_those_before():
    assert limit() == 400  # nothing measured yet
    assert limit(0.1) == 40
    assert limit(6, 6, 300, 6) == 60  # the others compiled during the long one
    assert limit(6, stuck_after=0) is None
    watchdog = Watchdog(0)
    with watchdog.phase(Phase.READING):
        assert watchdog.beat().limit is None


def test_what_takes_long_is_said_each_time_it_has_doubled():
    times = [
        long_phases({0: beat(C, seconds)}, 10).get(0, 0) for seconds in (9, 10, 19, 20, 39, 81)
    ]
    assert times == [0, 1, 1, 2, 2, 4]
    assert long_phases({0: beat(C, 100)}, 0) == {}


def test_it_says_in_which_line_of_the_package_the_thread_is(tmp_path):
    watchdog, found = Watchdog(40), []

    def look(_):
        thread = threading.Thread(target=lambda: found.append(watchdog.where()))
        thread.start()
        thread.join()
        return contextlib.nullcontext()

    write_whole({tmp_path / "file": b""}, look)  # any function from another folder
    assert found[0].startswith(" (atomic_files.py:")
    assert found[0].endswith(" in write_whole)")
    assert watchdog.where().startswith(" (watchdog.py:")
    assert watchdog.where().endswith(" in where)")
