"""The slowest process is named, with its host and phase; all times are injected."""

import json
import threading
from pathlib import Path

import pytest
from together import ROOT, Together, trainer

from jaxptd.distributed.launchers import World
from jaxptd.distributed.watchdog import Phase
from jaxptd.run import slowest as module
from jaxptd.run.folder import RunDir
from jaxptd.run.slowest import PhaseTimes, Slow, Slowest, slowest

READING, WAITING, LOOP = (p.value for p in (Phase.READING, Phase.WAITING, Phase.LOOP))


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_seconds_of_nested_phases_add_up() -> None:
    clock = Clock()
    times = PhaseTimes(clock=clock)
    clock.now += 50  # starting counts nowhere
    for step in times.steps(1, 2):
        clock.now += 1
        with times.phase(Phase.READING):
            clock.now += 10 * step
        with times.phase(Phase.COMPILING), times.phase(Phase.WAITING):
            clock.now += 3
        with pytest.raises(KeyError), times.phase(Phase.SAVING):
            clock.now += 7
            raise KeyError
    with times.phase(Phase.READING):
        clock.now += 2
        step, seconds = times.spent()
    assert (step, seconds) == (2, {LOOP: 2, READING: 32, WAITING: 6, "saving": 14})
    assert times.beat().phase is Phase.STARTING  # it still is a watchdog


def rate(reading: float, waiting: float, loop: float = 0.1) -> dict[str, float]:
    return {READING: reading, WAITING: waiting, LOOP: loop}


FAST = rate(0.1, 1.8)  # of a step of 2 s


@pytest.mark.parametrize(
    ("rates", "rank", "phase", "holds_up"),
    [
        ([FAST, FAST, rate(1.8, 0.1)], 2, READING, True),
        ([rate(0.1, 0.1, 1.8), FAST, FAST], 0, LOOP, True),
        ([FAST, rate(1.5, 0.4)], 1, READING, False),  # it still waits: it holds nobody up
        ([rate(1.8, 0.1), rate(1.8, 0.1)], 0, READING, False),  # all are slow
        ([rate(1.0, 0.1), rate(1.85, 0.0)], 1, READING, False),  # not twice as slow
        ([rate(1.8, 0.1), rate(1.85, 0.05), FAST, FAST, FAST], 1, READING, True),
    ],
)
def test_which_process_holds_the_others_up(rates, rank, phase, holds_up) -> None:
    found = slowest(dict(enumerate(rates)), 2.0)
    assert (found.rank, found.phase, found.holds_up) == (rank, phase, holds_up)


def test_the_figures_of_the_slowest() -> None:
    found = slowest({0: FAST, 1: rate(0.2, 1.7), 2: FAST, 3: rate(1.8, 0.1)}, 2.0)
    assert found == Slow(3, READING, 1.8, 0.1, pytest.approx(1.7), True)
    assert slowest({0: FAST}, 2.0) is None


class Run:
    """Processes without a coordination service, each with a clock of its own."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch, *, factor: float = 2.0) -> None:
        stored: dict[str, str] = {}
        monkeypatch.setattr(module.coordination, "put", stored.__setitem__)
        monkeypatch.setattr(
            module.coordination,
            "get_all",
            lambda folder: {key.removeprefix(f"{folder}/"): x for key, x in stored.items()},
        )
        self.lines: list[str] = []
        self.clocks = [Clock() for _ in range(count)]
        self.times = [PhaseTimes(clock=clock) for clock in self.clocks]
        self.all = [
            Slowest(World(count, rank), times, factor=factor, report=self.lines.append)
            for rank, times in enumerate(self.times)
        ]
        self.step = 0

    def steps(self, number: int, delays: dict[int, tuple[Phase, float]]) -> None:
        """Runs steps of 2 s, then sends all times; delays: seconds by process, in a phase."""
        for rank, (times, clock) in enumerate(zip(self.times, self.clocks, strict=True)):
            phase, seconds = delays.get(rank, (Phase.READING, 0.0))
            for _ in times.steps(self.step + 1, self.step + number):
                for each, took in ((phase, seconds), (Phase.WAITING, 1.9 - seconds)):
                    with times.phase(each):
                        clock.now += took
                clock.now += 0.1
        self.step += number
        for each in reversed(self.all):
            each.exchange()


def test_one_line_until_it_changes(monkeypatch) -> None:
    monkeypatch.setattr(module.socket, "gethostname", lambda: "node07")
    run = Run(3, monkeypatch)
    run.steps(5, {2: (Phase.READING, 1.9)})
    assert (run.lines, run.all[0].row()) == ([], {})  # nothing to compare with
    for _ in range(3):
        run.steps(5, {2: (Phase.READING, 1.9)})
    assert run.lines == [
        "warning: the others wait for process 2 of 3 on node07: reading data takes it 1.9 s per "
        "step, the others 0 s (processes.slow_factor=2)"
    ]
    assert run.all[0].row() == {
        "slowest_process": 2,
        "slowest_seconds": pytest.approx(1.9),
    }
    assert run.all[1].row() == {}
    run.steps(5, {})
    assert run.all[0].row()["slowest_seconds"] == pytest.approx(0)
    run.steps(5, {2: (Phase.READING, 1.9)})
    assert len(run.lines) == 1
    run.steps(5, {2: (Phase.SAVING, 1.9)})
    run.steps(5, {1: (Phase.SAVING, 1.9)})
    assert [line.split(" per step")[0].partition("wait for ")[2] for line in run.lines[1:]] == [
        "process 2 of 3 on node07: saving takes it 1.9 s",
        "process 1 of 3 on node07: saving takes it 1.9 s",
    ]


def test_too_few_steps_are_not_compared(monkeypatch) -> None:
    run = Run(2, monkeypatch)
    run.steps(5, {})
    run.steps(2, {1: (Phase.READING, 1.9)})
    assert run.all[0].row() == {}
    run.steps(1, {1: (Phase.READING, 1.9)})
    assert run.all[0].row()["slowest_process"] == 1


def test_all_processes_are_compared_or_none(monkeypatch) -> None:
    run = Run(3, monkeypatch)
    run.steps(5, {})
    last = run.all.pop()
    run.steps(5, {})
    assert run.all[0].row() == {}  # the last one has sent nothing since
    last.exchange()
    run.all[0].exchange()
    assert run.all[0].row()["slowest_seconds"] == pytest.approx(0)


def test_the_thread_ends_with_the_run(monkeypatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.001)
    sent = threading.Event()
    before = threading.active_count()
    slowest = Slowest(World(2, 1), PhaseTimes(), factor=2.0, report=print)
    monkeypatch.setattr(slowest, "exchange", sent.set)
    with slowest.watching():
        assert sent.wait(60)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.parametrize(("world", "factor"), [(World(), 2.0), (World(2, 0), 0.0)])
def test_no_thread_where_nothing_is_compared(world, factor, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(module.threading.Thread, "start", lambda thread: started.append(thread))
    with Slowest(world, PhaseTimes(), factor=factor, report=print).watching():
        assert started == []


# Process 1 reads data slowly, by a clock that only the phases advance.
DELAY = """
from jaxptd.api.run import Run
from jaxptd.distributed.watchdog import Phase
from jaxptd.run import slowest
now = [0.0]
class Injected(slowest.PhaseTimes):
    def __init__(self, stuck_after):
        super().__init__(stuck_after, clock=lambda: now[0])
    def _enter(self, phase):
        before = super()._enter(phase)
        if phase is (Phase.READING if RANK else Phase.WAITING):
            now[0] += 1.0
        return before
import jaxptd.train
jaxptd.train.PhaseTimes = Injected
slowest.INTERVAL = 1e6
row = Training._row
def exchanged(self, step, meter, *, last):
    self.slowest.exchange()
    return row(self, step, meter, last=last)
Training._row = exchanged
"""


@pytest.mark.slow
def test_two_real_processes_and_an_injected_delay(tmp_path: Path) -> None:
    argv = ["--config", str(ROOT / "configs" / "test-tiny.yaml"), "--layout.dp=2"]
    options = {"train.run_dir": tmp_path / "run", "train.steps": 20, "train.sample_tokens": 0}
    options |= {"data.source": tmp_path / "text.txt", "checkpoint.every": 0}
    (tmp_path / "text.txt").write_text("def f(a, b): return a + b\n" * 400)
    argv += [f"--{name}={value}" for name, value in options.items()]
    first, second = Together(trainer(DELAY), argv, tmp_path).ended()
    assert (first.code, second.code) == (0, 0), first.err + second.err
    (line,) = (x for x in first.lines if "the others wait for" in x)
    assert line.startswith("warning: the others wait for process 1 of 2 on ")
    assert ": reading data takes it 1 s per step, the others 0 s" in line
    rows = [row for row in RunDir(tmp_path / "run").metrics() if "slowest_process" in row]
    assert {row["slowest_process"] for row in rows} == {1}
    assert json.dumps(rows[-1]["slowest_seconds"]) == "1.0"
