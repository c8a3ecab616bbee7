"""Names the process that the others wait for, from the time that each one spends in its phases.

In each process a thread sends the seconds that its main thread has spent in each phase through the
coordination service, and the first process compares them. A step has no further synchronisation.

All processes take equally long for a step, since collectives wait for the slowest. What differs is
how that time splits: one that is slow in reading data or between two steps has no time left to wait
for its devices, while the others wait for it there. A device that computes slowly is not seen so:
all processes wait for theirs equally long. `jaxptd doctor --links` measures devices.
"""

import collections
import contextlib
import dataclasses
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxptd.distributed import coordination
from jaxptd.distributed.launchers import World
from jaxptd.distributed.watchdog import ENDLESS, Phase, Watchdog

INTERVAL = 10.0  # seconds between two messages of a process
FEWEST = 3  # steps to compare
IDLE = 0.1  # most of a step's time that the slowest process still waits for its devices
KEY = "times"


class PhaseTimes(Watchdog):
    """A watchdog that also adds up the seconds of each phase.

    The watchdog's own clock advances only every few seconds; phases of a step are shorter.

    Args:
        stuck_after: as in `Watchdog`.
        clock: seconds.
    """

    def __init__(
        self, stuck_after: float = 0.0, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(stuck_after)
        self._clock = clock
        self._lock = threading.Lock()
        self._spent: dict[Phase, float] = collections.defaultdict(float)
        self._current, self._entered = Phase.STARTING, clock()

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Inside, the main thread is in this phase; afterwards in the outer one again."""
        outer = self._enter(phase)
        try:
            with super().phase(phase):
                yield
        finally:
            self._enter(outer)

    def _enter(self, phase: Phase) -> Phase:
        """Begins a phase; returns the one before."""
        with self._lock:
            now, before = self._clock(), self._current
            self._spent[before] += now - self._entered
            self._current, self._entered = phase, now
        return before

    def spent(self) -> tuple[int, dict[str, float]]:
        """The step, and the seconds so far in each phase of a step; may be called in any thread."""
        with self._lock:
            seconds = dict(self._spent)
            now = self._clock() - self._entered
            seconds[self._current] = seconds.get(self._current, 0.0) + now
        return self.step, {p.value: s for p, s in seconds.items() if p not in ENDLESS}


@dataclasses.dataclass(frozen=True)
class Times:
    """The seconds of a process so far.

    Args:
        host: its name.
        step: the last step that was started.
        seconds: by phase, added up since the start.
    """

    host: str
    step: int
    seconds: Mapping[str, float]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Times":
        return cls(**json.loads(text))

    def since(self, earlier: "Times") -> dict[str, float] | None:
        """Seconds per step in each phase since an earlier message; None after too few steps."""
        steps = self.step - earlier.step
        if steps < FEWEST:
            return None
        return {p: (s - earlier.seconds.get(p, 0.0)) / steps for p, s in self.seconds.items()}


@dataclasses.dataclass(frozen=True)
class Slow:
    """The slowest process of a run.

    Args:
        rank: its number.
        phase: the phase in which it differs most from the others.
        seconds: per step in that phase.
        usual: the same of the others: their median.
        extra: seconds per step that it takes longer than the others, in all phases.
        holds_up: whether the others wait for it.
    """

    rank: int
    phase: str
    seconds: float
    usual: float
    extra: float
    holds_up: bool


def slowest(rates: Mapping[int, Mapping[str, float]], factor: float) -> Slow | None:
    """The process that takes longest apart from waiting for its devices; None of a single one.

    It holds the others up if that takes it more than `factor` times as long as them, and leaves it
    no more than a tenth of a step for waiting.

    Args:
        rates: seconds per step by phase, of each process.
        factor: see `processes.slow_factor`.
    """
    if len(rates) < 2:
        return None
    own = {
        rank: sum(s for p, s in rate.items() if p != Phase.WAITING) for rank, rate in rates.items()
    }
    rank = max(own, key=lambda each: (own[each], -each))
    others = [each for each in rates if each != rank]
    usual = statistics.median(own[each] for each in others)
    medians = {
        phase: statistics.median(rates[each].get(phase, 0.0) for each in others)
        for phase in rates[rank]
        if phase != Phase.WAITING
    }
    phase = max(medians, key=lambda each: rates[rank][each] - medians[each])
    step = sum(rates[rank].values())
    waits = rates[rank].get(Phase.WAITING, 0.0) > IDLE * step
    holds_up = own[rank] > factor * usual and not waits
    return Slow(rank, phase, rates[rank][phase], medians[phase], own[rank] - usual, holds_up)


class Slowest:
    """The thread of one process that sends its times, and in the first process compares them.

    Args:
        world: the processes.
        times: of the main thread.
        factor: see `processes.slow_factor`; 0 never compares.
        report: prints a line.
    """

    def __init__(
        self, world: World, times: PhaseTimes, *, factor: float, report: Callable[[str], None]
    ) -> None:
        self._world, self._times, self._factor, self._report = world, times, factor, report
        self._host = socket.gethostname()
        self._before: dict[int, Times] = {}
        self._found: Slow | None = None
        self._named: tuple[int, str] | None = None
        self._over = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the thread runs; not in a run of one process."""
        if self._world.alone or not self._factor:
            yield
            return
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
        thread.join()  # not after an error: the service may no longer answer

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # `Liveness` finds who has gone
                self.exchange()

    def exchange(self) -> None:
        """Sends this process's times; in the first process also compares those of all."""
        step, seconds = self._times.spent()
        coordination.put(f"{KEY}/{self._world.id}", Times(self._host, step, seconds).to_json())
        if self._world.id == 0:
            found = coordination.get_all(KEY)
            self._compare({int(rank): Times.from_json(text) for rank, text in found.items()})

    def _compare(self, now: Mapping[int, Times]) -> None:
        self._before = {**now, **self._before}
        since = {rank: times.since(self._before[rank]) for rank, times in now.items()}
        rates = {rank: rate for rank, rate in since.items() if rate is not None}
        if len(rates) < self._world.count:
            return  # until all have run enough steps
        self._before = dict(now)
        self._found = slowest(rates, self._factor)
        if self._found and self._found.holds_up:
            self._name(self._found, now[self._found.rank].host)

    def _name(self, slow: Slow, host: str) -> None:
        """Prints a line, unless the last one has named the same process and phase."""
        if self._named == (slow.rank, slow.phase):
            return
        self._named = slow.rank, slow.phase
        self._report(
            f"warning: the others wait for {self._world.name_of(slow.rank)} on {host}: "
            f"{slow.phase} takes it {slow.seconds:.3g} s per step, the others {slow.usual:.3g} s "
            f"(processes.slow_factor={self._factor:g})"
        )

    def row(self) -> dict[str, Any]:
        """Fields of a row of metrics.jsonl: the slowest process, and its extra seconds per step."""
        slow = self._found
        if slow is None:
            return {}
        return {"slowest_process": slow.rank, "slowest_seconds": slow.extra}
