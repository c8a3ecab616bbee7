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

    The devices have ended the steps before the window when the trace begins, and those of the
    window when it ends, so the trace has these steps and no others. A resumed run traces the rest
    of the window. As a context manager, ends a trace whose window was cut short.

    Args:
        config: has the window.
        path: of the run directory.
        watchdog: of the thread that runs the steps.
        say: prints a line.
    """

    def __init__(
        self, config: Config, path: Path, watchdog: Watchdog, *, say: Callable[[str], None]
    ) -> None:
        window = config.train.profile if coordination.is_first() else None
        self._first, self._last = window or (0, -1)
        self._folder, self._watchdog, self._say = path / "profile", watchdog, say
        self._since: int | None = None  # the first step of the trace, while there is one
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
        """Begins a step, and before the first one of the window the trace."""
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
        """Ends a step, and after the last one of the window the trace."""
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
        """Inside, what the profiler cannot do is a line, and the run continues."""
        try:
            yield
        except (RuntimeError, OSError) as error:  # another trace is going on, or the disk is full
            self._last = -1
            self._say(f"warning: no trace in {self._folder}: {' '.join(str(error).split())[:300]}")
