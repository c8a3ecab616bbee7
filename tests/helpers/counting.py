"""Counts the calls of functions, as a measure of work that no busy machine changes."""

import sys
from collections.abc import Callable
from typing import Any


def calls(work: Callable[[], Any]) -> int:
    """Number of Python and C functions that this thread calls while it does some work."""
    count = 0

    def count_one(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_one)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
