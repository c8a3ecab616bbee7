"""One piece of work behind the one that goes on."""

import threading
from collections.abc import Callable


class Background:
    """Runs `work` in a thread at once; `wait` ends it.

    The thread does not keep the process: what ends it without `wait` ends the work too.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxptd-background", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the work is done after so many seconds (none: however long it takes).

        Raises:
            BaseException: what the work raised.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._failure = error
