"""What the main thread is in, and for how long: so that a hang is told from slow compilation.

The loop enters phases (`with watchdog.phase(Phase.READING):`). Each has a limit; a process that is
longer in one than that is stuck. Compiling has none: it takes what it takes, and a line says so.
"""

import contextlib
import dataclasses
import enum
import json
import math
import statistics
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

PATIENT = 10  # how much longer than `stuck_after` phases may take whose length nobody knows
STEPS = 10  # how many step times a step may take
PACKAGE = str(Path(__file__).parents[1])


class Phase(enum.StrEnum):
    """What a process does; the value ends the sentence "it has been ..."."""

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
    """A sign of life.

    Args:
        step: the last one that was started.
        phase: what it does.
        seconds: for how long.
        limit: how long it may, in seconds; None is for ever.
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
    """Knows the phase of the thread that made it.

    Its clock is told to tick. It stands still while the whole process does (a suspended machine,
    SIGSTOP and SIGCONT), which is no hang of anything in it.

    Args:
        stuck_after: seconds; 0 sets no limits.
    """

    def __init__(self, stuck_after: float = 0.0) -> None:
        self.stuck_after = stuck_after
        self.now = 0.0
        self.step = 0
        self._thread = threading.get_ident()
        self._phase, self._since = Phase.STARTING, 0.0
        self._waited = 0.0  # in this step
        self._waits: deque[float] = deque(maxlen=9)  # in the last steps

    def tick(self, seconds: float) -> None:
        self.now += seconds

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Within it the process does this; afterwards what it did before, anew."""
        outer = self._phase
        self._phase, self._since = phase, self.now
        try:
            yield
        finally:
            self._waited += self.now - self._since if phase is Phase.WAITING else 0.0
            self._phase, self._since = outer, self.now

    def steps(self, first: int, last: int) -> Iterator[int]:
        """The numbers of the steps, as the loop comes to them."""
        with self.phase(Phase.LOOP):
            for self.step in range(first, last + 1):
                self._waited = 0.0
                yield self.step
                self._waits.append(self._waited)

    def beat(self) -> Beat:
        phase, since = self._phase, self._since
        return Beat(self.step, phase, self.now - since, self._limit(phase))

    def _limit(self, phase: Phase) -> float | None:
        """Waiting is for a step: the median of the last ones says how long they take."""
        if self.stuck_after == 0 or phase in ENDLESS:
            return None
        if phase in (Phase.READING, Phase.LOOP):
            return self.stuck_after
        if phase is Phase.WAITING and self._waits:
            return max(self.stuck_after, STEPS * statistics.median(self._waits))
        return PATIENT * self.stuck_after

    def where(self) -> str:
        """The innermost line of this package that the thread is in: ` (file.py:12 in name)`."""
        frame = sys._current_frames().get(self._thread)
        stack = traceback.extract_stack(frame) if frame else []
        for each in reversed(stack):
            if each.filename.startswith(PACKAGE):
                return f" ({Path(each.filename).name}:{each.lineno} in {each.name})"
        return ""


def stuck(beats: Mapping[int, Beat]) -> int | None:
    """Which process holds the run up, by the last beat of each; None if none does.

    Who waits for the devices waits for the others. So it is one that is late with something else;
    or, if all wait, none compiles or saves, and all do so for too long, the one at the lowest step.
    """
    waiting = {rank: beat for rank, beat in beats.items() if beat.phase is Phase.WAITING}
    late = {rank: beat for rank, beat in beats.items() if beat.is_late}
    if found := [rank for rank in late if rank not in waiting]:
        return max(found, key=lambda rank: late[rank].seconds)
    if len(waiting) == len(beats) == len(late):
        return min(beats, key=lambda rank: (beats[rank].step, rank))
    return None


def long_phases(beats: Mapping[int, Beat], stuck_after: float) -> dict[int, int]:
    """How often each process has doubled `stuck_after` in what it does; for a line each time."""
    if stuck_after == 0:
        return {}
    doubled = {r: math.log2(max(b.seconds, 1e-9) / stuck_after) for r, b in beats.items()}
    return {rank: int(times) + 1 for rank, times in doubled.items() if times >= 0}
