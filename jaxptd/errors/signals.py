"""Notices signals while the main thread is inside JAX, where Python's handlers have to wait.

A step or a compilation may take minutes, and Python runs a handler only between two instructions of
its own. The system's part of a handler runs at once, though: it writes the signal's number into the
wakeup file descriptor, which a thread reads here.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

OVER = b"\0"  # no signal has this number
ANSWER = 1.0  # seconds in which the main thread ends by itself, unless it is inside JAX


@contextlib.contextmanager
def signal_watch(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Inside, calls a function with the number of each signal that Python handles, in a thread.

    Only the main thread may enter this.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_read, args=(reader, on_signal), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, OVER)
        thread.join()
        os.close(reader)
        os.close(writer)


def _read(reader: int, on_signal: Callable[[int], None]) -> None:
    while (number := os.read(reader, 1)) != OVER:
        on_signal(number[0])


@contextlib.contextmanager
def ending_at_once(say: Callable[[], int]) -> Iterator[None]:
    """Inside, SIGINT ends the process even if the main thread does not answer.

    Args:
        say: called then; tells why, and returns the exit code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    answered = threading.Event()

    def end(number: int) -> None:
        if number == signal.SIGINT and not answered.wait(ANSWER):
            os._exit(say())

    with signal_watch(end):
        try:
            yield
        finally:
            answered.set()
