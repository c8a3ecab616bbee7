"""What a process still says when it is aborted, in C++, by JAX."""

import ctypes
import signal
from collections.abc import Callable
from typing import Any


def on_abort(speak: Callable[[], None]) -> Callable[[], None]:
    """Has `speak` called when the process aborts; what it gives back ends that.

    JAX's client of the coordination service aborts the process as soon as the service is gone, or
    not all processes come in time. Its option for a function to call instead is neither public nor
    does it work (jaxlib 0.10, 0.12). Python's own handlers run between two instructions of the main
    thread: too late. A handler through ctypes runs in the thread that aborts, outside of Python.
    """
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = handler_type(lambda _: speak())
    libc: Any = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))

    def put_back(_: Any = handler) -> None:  # it also keeps the handler from being collected
        libc.signal(signal.SIGABRT, before)

    return put_back
