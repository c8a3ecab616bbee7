"""Measures how long the main thread has been in its phase, to tell a hang from slow compilation.

The loop enters phases (`with watchdog.phase(Phase.READING):`). A process that exceeds the time
limit of its phase is stuck. Compilation has no limit; a line reports when it takes long.
"""

import contextlib
import ctypes
import dataclasses
import enum
import json
import math
import signal
import statistics
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def on_abort(function: Callable[[], None]) -> Callable[[], None]:
    """Calls `function` when the process aborts; returns a function that removes this hook.

    JAX's coordination client aborts the process as soon as the service is gone, or if some
    processes do not join in time. Its callback option is not public and does not work (jaxlib 0.10,
    0.12). Python's signal handlers run between two instructions of the main thread, which is too
    late; a ctypes handler runs in the aborting thread, outside of Python.
    """
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = handler_type(lambda _: function())
    libc: Any = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))

    def remove(_: Any = handler) -> None:  # the default keeps the handler from being collected
        libc.signal(signal.SIGABRT, before)

    return remove


PATIENT = 10  # times `stuck_after`: limit of phases whose usual length is unknown
STEPS = 10  # times the median: limit of a step
PACKAGE = str(Path(__file__).parents[1])  # jaxptd


class Phase(enum.StrEnum):
    """An activity of the main thread; the value completes the sentence "it has been ..."."""

    STARTING = "starting"
    COMPILING = "compiling"
    READING = "reading data"
    WAITING = "waiting for the devices"
    LOOP = "between two steps"
    EVALUATING = "evaluating"
    SAVING = "saving"
    SAMPLING = "sampling"
    ENDING = "looking for the process that has gone"


ENDLESS = {Phase.STARTING, Phase.COMPILING, Phase.SAMPLING, Phase.ENDING}


@dataclasses.dataclass(frozen=True)
class Beat:
    """The state of a process, as it is sent to the others.

    Args:
        step: the last step that was started.
        phase: of the main thread.
        seconds: time spent in this phase.
        limit: longest time in this phase, in seconds. None for no limit.
    """

    step: int = 0
    phase: Phase = Phase.STARTING
    seconds: float = 0.0
    limit: float | None = None

    @property
    def is_late(self) -> bool:
        return self.limit is not None and self.seconds > self.limit

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Beat":
        fields = json.loads(text)
        return cls(**{**fields, "phase": Phase(fields["phase"])})

    def __str__(self) -> str:
        return f"{self.phase} at step {self.step}"


class Watchdog:
    """Records the phase of the thread that made it.

    Its clock advances only by `tick`, so it stands still while the whole process is suspended
    (SIGSTOP, or a sleeping machine), which is not a hang.

    Args:
        stuck_after: seconds. With 0, phases have no limits.
    """

    def __init__(self, stuck_after: float = 0.0) -> None:
        self.stuck_after = stuck_after
        self.now = 0.0
        self.step = 0
        self._thread = threading.get_ident()
        self._phase, self._since = Phase.STARTING, 0.0
        self._waited = 0.0  # seconds of waiting in this step
        self._waits: deque[float] = deque(maxlen=9)  # the same of the last steps

    def tick(self, seconds: float) -> None:
        """Advances the clock."""
        self.now += seconds

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Inside, the main thread is in this phase; afterwards the outer phase starts afresh."""
        outer = self._phase
        self._phase, self._since = phase, self.now
        try:
            yield
        finally:
            self._waited += self.now - self._since if phase is Phase.WAITING else 0.0
            self._phase, self._since = outer, self.now

    def steps(self, first: int, last: int) -> Iterator[int]:
        """Yields the number of each step as the loop begins it."""
        with self.phase(Phase.LOOP):
            for self.step in range(first, last + 1):
                self._waited = 0.0
                yield self.step
                self._waits.append(self._waited)

    def beat(self) -> Beat:
        """The current state of the main thread."""
        phase, since = self._phase, self._since
        return Beat(self.step, phase, self.now - since, self._limit(phase))

    def _limit(self, phase: Phase) -> float | None:
        """Seconds that a phase may take; for waiting, derived from recent steps."""
        if self.stuck_after == 0 or phase in ENDLESS:
            return None
        if phase in (Phase.READING, Phase.LOOP):
            return self.stuck_after
        if phase is Phase.WAITING and self._waits:
            return max(self.stuck_after, STEPS * statistics.median(self._waits))
        return PATIENT * self.stuck_after

    def where(self) -> str:
        """The thread's innermost frame in this package: ` (file.py:12 in name)`; else empty."""
        frame = sys._current_frames().get(self._thread)
        stack = traceback.extract_stack(frame) if frame else []
        for each in reversed(stack):
            if each.filename.startswith(PACKAGE):
                return f" ({Path(each.filename).name}:{each.lineno} in {each.name})"
        return ""


def stuck(beats: Mapping[int, Beat]) -> int | None:
    """The rank of the process that blocks the run, from the last beat of each; None if none does.

    A process waiting for its devices waits for the other processes. So the blocking process is one
    that exceeds the limit of any other phase or, if all wait and exceed the limit, the one at the
    lowest step.
    """
    waiting = {rank: beat for rank, beat in beats.items() if beat.phase is Phase.WAITING}
    late = {rank: beat for rank, beat in beats.items() if beat.is_late}
    if silent := [rank for rank in late if rank not in waiting]:
        return max(silent, key=lambda rank: late[rank].seconds)
    if len(waiting) == len(beats) == len(late):
        return min(beats, key=lambda rank: (beats[rank].step, rank))
    return None


def long_phases(beats: Mapping[int, Beat], stuck_after: float) -> dict[int, int]:
    """Counts how often the time of each process in its phase has doubled since `stuck_after`."""
    if stuck_after == 0:
        return {}
    doubled = {r: math.log2(max(b.seconds, 1e-9) / stuck_after) for r, b in beats.items()}
    return {rank: int(times) + 1 for rank, times in doubled.items() if times >= 0}
