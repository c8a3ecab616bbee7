"""Traces some steps of a run with JAX's profiler, as `train.profile` asks."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from jaxptd.config import Config
from jaxptd.distributed import coordination
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.run.progress import Meter


class StepTrace:
    """Traces a window of steps into `profile/` of the run directory, in the first process.

    The trace holds exactly these steps: it begins when the devices have ended the steps before the
    window, and ends when they have ended the window's. A resumed run traces the rest of the window.
    As a context manager, it ends a trace whose window was cut short.

    Args:
        config: has the window.
        path: the run directory.
        watchdog: of the thread that runs the steps.
        say: prints a line.
    """

    def __init__(
        self, config: Config, path: Path, watchdog: Watchdog, *, say: Callable[[str], None]
    ) -> None:
        window = config.train.profile if coordination.is_first() else None
        self._first, self._last = window or (0, -1)
        self._folder, self._watchdog, self._say = path / "profile", watchdog, say
        self._since: int | None = None  # the first step of the trace, while tracing
        self._newest = 0
        self._step = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def begin(self, step: int, meter: Meter) -> None:
        """Call before a step; starts the trace before the window's first step."""
        if not self._first <= step <= self._last:
            return
        if self._since is None:
            with meter.paused(None), self._watchdog.phase(Phase.SAVING), self._explained():
                jax.profiler.start_trace(str(self._folder))
                self._since = step
        self._newest = step
        if self._since is not None:
            self._step.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))

    def end(self, step: int, meter: Meter) -> None:
        """Call after a step; ends the trace after the window's last step."""
        if self._since is None:
            return
        if step == self._last:
            with meter.paused(None):
                self._step.close()
                self._stop()
        self._step.close()

    def _stop(self) -> None:
        if self._since is not None:
            self._step.close()
            first, self._since = self._since, None
            with self._watchdog.phase(Phase.SAVING), self._explained():
                jax.profiler.stop_trace()
                self._say(f"the trace of steps {first} to {self._newest} is in {self._folder}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns the profiler's errors inside into a warning; the run continues."""
        try:
            yield
        except (RuntimeError, OSError) as error:  # another trace is running, or the disk is full
            self._last = -1
            self._say(f"warning: no trace in {self._folder}: {' '.join(str(error).split())[:300]}")
