"""Reads small files of text that a person names; pipes, folders and large files are refused."""

import os
from pathlib import Path

from jaxptd.errors.messages import UserError, quoted

LARGEST = 10**6  # bytes


def read_small(path: str | Path, *, remedy: str, what: str = "") -> str:
    """The text of a file, without a byte order mark, which spreadsheets write.

    Args:
        path: of a regular file of at most `LARGEST` bytes.
        remedy: end of the messages.
        what: word before the path in them.

    Raises:
        UserError: it is no such file, cannot be read, is larger, or is no text.
    """
    name = f"{what} {quoted(str(path), 255)}".strip()
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe, say, would never end
        raise UserError(f"{name} is no file on disk; {remedy}")
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        words = getattr(error, "strerror", None) or error
        raise UserError(f"{name}: {words}; {remedy}") from error
    if len(content) > LARGEST:
        raise UserError(f"{name} has more than {LARGEST} bytes; {remedy}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not text; {remedy}") from error
