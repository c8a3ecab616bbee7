"""A function that a new process imports in no time."""

import sys
from typing import Any


def ended_with_number(share: Any, factor: int) -> None:
    """Ends the process with the number of its share, times a factor."""
    sys.exit(share.number * factor)
