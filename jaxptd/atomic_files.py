"""Files that are whole or not there: written aside, then moved into place."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from jaxptd.errors import UserError


@contextlib.contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Within it the system's errors are a `UserError`: what, why, and the remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}; {remedy}") from error


def write_whole(
    files: Mapping[Path, bytes], explain: Callable[[Path], AbstractContextManager[None]]
) -> None:
    """Writes all files aside, then moves them into place; if one cannot be written, none is.

    Args:
        files: what to write where.
        explain: a context in which the errors of one file are raised, see `explained`.
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
