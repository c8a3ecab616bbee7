"""Writes files completely or not at all: under another name first, then moved into place."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from jaxptd.errors import UserError


@contextlib.contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Inside, the system's errors become a `UserError` with what failed, why, and the remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}; {remedy}") from error


def write_whole(
    files: Mapping[Path, bytes], explain: Callable[[Path], AbstractContextManager[None]]
) -> None:
    """Writes all files under other names, then moves them into place; all of them or none.

    Args:
        files: the content of each file.
        explain: makes the context for the errors of one file, see `explained`.
    """
    for path in files:
        with explain(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    aside = {path: path.with_name(f".{path.name}.partial") for path in files}
    try:
        for path, data in files.items():
            with explain(path):
                aside[path].write_bytes(data)
        for path in files:
            with explain(path):
                os.replace(aside[path], path)
    finally:
        for partial in aside.values():
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
