"""Work in a thread, whose failure is raised where the caller waits for it."""

import threading
from collections.abc import Callable


class Background:
    """Runs `work` in a daemon thread, started at once.

    The process may exit without `wait`; the work then ends with it.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxptd-background", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the work, at most so many seconds (None: without limit); whether it is done.

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
