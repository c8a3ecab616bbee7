"""Stops a run on a signal, one of `errors.SIGNALS`: every process stops after the same step.

A process that gets the signal in step s publishes "stop after step s + AHEAD", with the signal's
number. That is late enough for all processes to read it, and none can be past that step:

- A step ends on no device before all processes have started it, and the loop reads the stop step
  once in each step, after it has started this step and the step before has ended (`Meter.add`).
- The signalled process writes the stop step before it starts step s + 1. A process that reads in
  step s + 2 knows that step s + 1 has ended, so every process had started it, after the write.
- So each process reads the stop step in step s + 2 at the latest, and runs until that step: all
  start the same steps, and none waits for a step that another one has not started.

If several processes write a stop step, the first one counts. A stop step beyond the last step of
the run has no effect.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxptd.distributed import coordination
from jaxptd.errors import ANSWER, INSISTING, SIGNALS, signal_watch

AHEAD = 2  # steps


class Stop:
    """A request to stop, made by a signal; a second SIGINT or SIGTERM ends the process at once.

    Args:
        alone: whether the run has only one process.
        on_asked: called at the first signal inside `watching`, in another thread.
        end: ends the process with an exit code; called at the second SIGINT or SIGTERM if the main
            thread is inside JAX. With None, that signal waits for the main thread.
    """

    def __init__(
        self,
        *,
        alone: bool = True,
        on_asked: Callable[[], None] = lambda: None,
        end: Callable[[int], object] | None = None,
    ) -> None:
        self.asked = False
        self._alone, self._on_asked, self._end = alone, on_asked, end
        self._number = int(signal.SIGTERM)  # of the signal
        self._at: int | None = None
        self._signals, self._insisting = 0, 0
        self._answered = threading.Event()

    @property
    def exit_code(self) -> int:
        """The exit code: 128 + the signal's number, as in shells, if asked to stop; else 0."""
        return 128 + self._number if self.asked else 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, `on_asked` and `end` are called even while the main thread is inside JAX."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with signal_watch(self._on_signal):
            try:
                yield
            finally:
                self._answered.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, `SIGNALS` are requests to stop; only the main thread can take them.

        A second SIGINT or SIGTERM does what it did before. SIGHUP stays ignored under `nohup`.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if before[signal.SIGHUP] == signal.SIG_IGN:
            del before[signal.SIGHUP]
        insisting = 0

        def ask(number: int, _: Any) -> None:
            nonlocal insisting
            insisting += number in INSISTING
            if insisting > 1:
                self._answered.set()
                self._restore(before)
                signal.raise_signal(number)
            elif not self.asked:
                self.asked, self._number = True, number

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            self._restore(before)

    @staticmethod
    def _restore(before: dict[signal.Signals, Any]) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int) -> None:
        """Called in a thread, even while the main thread is inside JAX."""
        if number not in SIGNALS:
            return
        self._signals += 1
        self._insisting += number in INSISTING
        if self._signals == 1:
            self._on_asked()
        again = number in INSISTING and self._insisting > 1
        if again and self._end and not self._answered.wait(ANSWER):
            self._end(128 + number)

    def after(self, step: int) -> bool:
        """True if the run stops after this step, which has started; call it in every step."""
        if self._alone:
            return self.asked
        if self._at is None:
            self._at = self._agreed(step)
        if self._at is not None and self._at < step:
            raise RuntimeError(f"stop after step {self._at} was read in step {step}")
        return self._at == step

    def _agreed(self, step: int) -> int | None:
        """The step after which all processes stop, if any process was asked to."""
        stop = self._ask_all(step + AHEAD) if self.asked else None
        stop = stop or coordination.get_first("stop")
        if stop is None:
            return None
        step, self._number = map(int, stop.split())
        self.asked = True
        return step

    def _ask_all(self, step: int) -> str:
        """Asks all processes to stop after a step, by this signal; returns the first request."""
        return coordination.put_first("stop", f"{step} {self._number}")

    def asked_anywhere(self) -> bool:
        """True in all processes if any of them was asked to stop while the steps ran."""
        if self._alone:
            return self.asked
        if self.asked:
            self._ask_all(0)
        coordination.barrier("stop")
        if stop := coordination.get_first("stop"):
            self.asked, self._number = True, int(stop.split()[1])
        return stop is not None
