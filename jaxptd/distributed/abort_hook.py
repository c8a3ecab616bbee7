"""Calls a function when JAX aborts the process from C++."""

import ctypes
import signal
from collections.abc import Callable
from typing import Any


def on_abort(function: Callable[[], None]) -> Callable[[], None]:
    """Has `function` called when the process aborts; returns a function that removes this hook.

    JAX's client of the coordination service aborts the process as soon as the service is gone, or
    if some processes do not join in time. Its option for a callback is not public and does not work
    (jaxlib 0.10, 0.12). Python's own signal handlers run between two instructions of the main
    thread, which is too late. A handler through ctypes runs in the thread that aborts, outside of
    Python.
    """
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = handler_type(lambda _: function())
    libc: Any = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))

    def remove(_: Any = handler) -> None:  # the default keeps the handler from being collected
        libc.signal(signal.SIGABRT, before)

    return remove
