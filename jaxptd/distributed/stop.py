"""A person or a scheduler asks a run to stop: every process stops after the same step.

A process that is asked while it is in step s settles with the others on s + AHEAD. That is late
enough for all to hear of it, and none can have gone further:

- A step ends on no device before all processes have started it, and the loop looks for the others'
  word in each step, once it has started it and the step before has ended (`Meter.add`).
- The process that was asked writes its word before it starts step s + 1. Whoever looks in step
  s + 2 knows that step s + 1 has ended, so that it was started everywhere, after the word.
- So each process reads the word in step s + 2 at the latest, and goes on until that step: all start
  the same steps, and none waits for a step that another one has not started.

Of several words the first counts. Past the last step there is nothing to stop.
"""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from jaxptd.distributed import coordination as processes

AHEAD = 2  # steps


class Stop:
    """Set by SIGINT or SIGTERM; a second one ends the process at once.

    Args:
        alone: whether the run is this process only.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.asked = False
        self._alone = alone
        self._at: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
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
        """Whether the run stops after this step, which has started; asked once in every step."""
        if self._alone:
            return self.asked
        if self._at is None:
            self._at = self._word(step)
        if self._at is not None and self._at < step:
            raise RuntimeError(f"stop at step {self._at} was heard of in step {step}")
        return self._at == step

    def _word(self, step: int) -> int | None:
        word = processes.put_first("stop", str(step + AHEAD)) if self.asked else None
        word = word or processes.get_first("stop")
        return None if word is None else int(word)

    def asked_anywhere(self) -> bool:
        """Whether a process was asked while the steps ran; the same answer in all of them."""
        if self._alone:
            return self.asked
        if self.asked:
            processes.put_first("stop", "0")
        processes.barrier("stop")
        return processes.get_first("stop") is not None
