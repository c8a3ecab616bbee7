"""Estimates how long a run still takes, from its recent steps, evaluations and saves."""

from collections import deque
from typing import Literal

from jaxptd.config import Config

Pause = Literal["evaluation", "save"]
RECENT = 120.0  # seconds of steps that count
FEWEST = 10  # steps that count, however long they are
PAUSES = 3  # evaluations, or saves, that count
FORWARD = 1 / 3  # of the FLOPs of a step
SLOWER = 1.5  # times the expected duration: the most that a first evaluation, compiled, counts


class TimeLeft:
    """The steps, evaluations and saves that a run still has, times their recent durations.

    Compilation does not come again, so it must not count: the caller leaves out the first step;
    the first evaluation, whose duration includes compilation, counts until there is a second.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        train, data = config.train, config.data
        self._end = train.steps
        self._every: dict[Pause, int] = {
            "evaluation": train.eval_every if data.validation_fraction else 0,
            "save": config.checkpoint.every,
        }
        self._batches = train.eval_batches
        self._steps, self._seconds = deque[float](), 0.0
        self._pauses: dict[Pause, list[float]] = {"evaluation": [], "save": []}

    def add_step(self, seconds: float) -> None:
        """Counts the duration of a step, without evaluations and saves."""
        self._steps.append(seconds)
        self._seconds += seconds
        while len(self._steps) > FEWEST and self._seconds > RECENT:
            self._seconds -= self._steps.popleft()

    def add_pause(self, pause: Pause, seconds: float) -> None:
        """Counts the duration of an evaluation or a save."""
        self._pauses[pause].append(seconds)

    def after(self, step: int) -> float | None:
        """Seconds from the end of a step to the end of the run; None before a step is measured."""
        if step >= self._end:
            return 0.0
        if not self._steps:
            return None
        seconds = self._seconds / len(self._steps)
        pauses = (self._number(p, step) * self._duration(p, seconds) for p in self._pauses)
        return (self._end - step) * seconds + sum(pauses)

    def _number(self, pause: Pause, step: int) -> int:
        """Evaluations or saves after a step; the last step of a run always has one."""
        every = self._every[pause]
        return -(-self._end // every) - step // every if every else 0

    def _duration(self, pause: Pause, step_seconds: float) -> float:
        """Seconds of an evaluation or a save."""
        first, later = self._pauses[pause][:1], self._pauses[pause][1:][-PAUSES:]
        if later:
            return sum(later) / len(later)
        if pause == "save":
            return sum(first)
        expected = self._batches * step_seconds * FORWARD
        return min([*first, SLOWER * expected]) if first else expected
