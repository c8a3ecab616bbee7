"""Stops a run on SIGINT or SIGTERM: every process stops after the same step.

A process that gets the signal in step s writes "stop after step s + AHEAD" for all to read. That is
late enough for all to read it, and no process can have gone beyond that step:

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
from collections.abc import Iterator
from typing import Any

from jaxptd.distributed import coordination

AHEAD = 2  # steps


class Stop:
    """A request to stop, made by SIGINT or SIGTERM; a second signal ends the process at once.

    Args:
        alone: whether the run has one process only.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.asked = False
        self._alone = alone
        self._at: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGINT and SIGTERM are requests to stop; only the main thread can take them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in signals}

        def ask(number: int, _: Any) -> None:
            self.asked = True
            for each in signals:
                signal.signal(each, before[each])

        for number in signals:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number in signals:
                signal.signal(number, before[number])

    def after(self, step: int) -> bool:
        """True if the run stops after this step, which has started; to be called in every step."""
        if self._alone:
            return self.asked
        if self._at is None:
            self._at = self._agreed(step)
        if self._at is not None and self._at < step:
            raise RuntimeError(f"stop after step {self._at} was read in step {step}")
        return self._at == step

    def _agreed(self, step: int) -> int | None:
        """The step after which all processes stop, if any process was asked to."""
        stop = coordination.put_first("stop", str(step + AHEAD)) if self.asked else None
        stop = stop or coordination.get_first("stop")
        return None if stop is None else int(stop)

    def asked_anywhere(self) -> bool:
        """True, in all processes, if any of them was asked while the steps ran."""
        if self._alone:
            return self.asked
        if self.asked:
            coordination.put_first("stop", "0")
        coordination.barrier("stop")
        return coordination.get_first("stop") is not None
