"""Errors of checkpoints, and the cause of an error in one line."""

import os
import re
from typing import Any

from jaxptd.errors import UserError

LONGEST = 80  # characters of a value in a message


class CheckpointError(UserError):
    """A checkpoint cannot be written, read or used; the message names it and the cause."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint differs from what was saved: a file is missing, truncated or changed."""


def reason(error: BaseException) -> str:
    """The operating system's message behind an error, else the error's own, in one line.

    tensorstore gives the operating system's error number only in its message.
    """
    if isinstance(error, UserError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if match := re.search(r"os_error_code='(\d+)'", str(cause)):
            return os.strerror(int(match[1]))
        cause = cause.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def quoted(value: Any) -> str:
    """A value as messages show it: on one line, printable, and not long."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
