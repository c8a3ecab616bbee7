"""Times the steps of a run and holds their metrics."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxptd.analysis.hardware import peak_flops
from jaxptd.models.families import family_of, work_of
from jaxptd.run.progress.time_left import Pause, TimeLeft
from jaxptd.step import Program

# In the order of a row of metrics.jsonl; the loss scale exists in float16 only.
METRICS = ("loss", "grad_norm", "learning_rate", "skipped", "loss_scale")
COUNTS = ("skipped", "skipped_in_row")

Values = dict[str, float]


class Meter:
    """Times steps, excluding compilation, evaluations and checkpoints, and holds their metrics.

    The first step's time includes its compilation if that step is logged by itself.

    Args:
        program: runs the steps.
        step: the steps after this one are measured.
        check: called with the number and metrics of each step once it has ended; may raise.
        waiting: makes the context in which the meter waits for a step.
    """

    def __init__(
        self,
        program: Program,
        step: int,
        *,
        check: Callable[[int, Values], None] = lambda step, metrics: None,
        waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._program, self._check, self._waiting = program, check, waiting
        model = program.config.model
        self._terms = tuple(family_of(model).losses(model))  # there if they are several
        self._first, self._first_seconds = step + 1, 0.0
        self._step, self._metrics = step, dict[str, jax.Array]()
        self._left, self._ended, self._end_time = TimeLeft(program.config), step, 0.0
        self.restart()

    def restart(self) -> None:
        """Starts a new measurement after the newest step."""
        self.wait()
        self._since, self._time = self._step, time.perf_counter()

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step just started, once the step before it has ended.

        So the device always has one step queued, and never more than one.
        """
        self.wait()
        self._step, self._metrics = step, metrics
        if step == self._first:
            self.wait()
            self._first_seconds = time.perf_counter() - self._time
            self.restart()

    def wait(self) -> Values:
        """Waits until the newest step has ended, checks its metrics and returns them."""
        with self._waiting():
            values = {n: int(x) if n in COUNTS else float(x) for n, x in self._metrics.items()}
        if values:
            self._note_end()
            self._check(self._step, values)
        return values

    def _note_end(self) -> None:
        """Measures the newest step, which has ended, once; not the first one, which compiles."""
        now, ended = time.perf_counter(), self._ended
        if self._step > ended:
            if self._step != self._first:
                self._left.add_step((now - self._end_time) / (self._step - ended))
            self._ended, self._end_time = self._step, now

    def seconds_left(self) -> float | None:
        """Seconds until the end of the run, with evaluations and saves; None if unknown so far."""
        return self._left.after(self._step)

    def row(self) -> dict[str, Any]:
        """Returns the newest step's row of metrics.jsonl, and starts a new measurement.

        `step_time` is the mean since the last row. A value that is not finite, which only a skipped
        step has, is None.
        """
        values = self.wait()
        names = (*METRICS[:1], *self._terms, *METRICS[1:])
        shown = {n: values[n] for n in names if n in values}
        finite = {n: x if math.isfinite(x) else None for n, x in shown.items()}
        row = {"step": self._step, **finite, **self._speed()}
        self.restart()
        return row

    @property
    def skipping(self) -> bool:
        """True if the newest step was skipped.

        Its state is sound, but may be what makes the steps unsound, so a checkpoint of this state
        should not replace an older one.
        """
        return bool(self.wait()["skipped_in_row"])

    @contextlib.contextmanager
    def paused(self, pause: Pause | None) -> Iterator[None]:
        """Excludes the time spent inside from the step times.

        Args:
            pause: an evaluation or a save, of which the run has more; None: nothing that returns.
        """
        self.wait()
        before = time.perf_counter()
        yield
        spent = time.perf_counter() - before
        self._time += spent
        self._end_time += spent
        if pause:
            self._left.add_pause(pause, spent)

    def _speed(self) -> dict[str, Any]:
        config, model = self._program.config.train, self._program.config.model
        steps = self._step - self._since
        seconds = (time.perf_counter() - self._time) / steps if steps else self._first_seconds
        tokens, flops = (config.global_batch_size * each for each in work_of(model))
        peak = peak_flops(self._program.mesh)
        return {
            "tokens": self._step * tokens,
            "tokens_per_second": tokens / seconds,
            "step_time": seconds,
            "mfu": flops / seconds / peak if peak else None,
        }
