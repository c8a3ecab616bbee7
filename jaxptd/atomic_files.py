"""Writes files completely or not at all: under a temporary name, then moved into place."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from jaxptd.errors import UserError


@contextlib.contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Turns the system's errors inside into a `UserError`: what failed, why, and the remedy."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}; {remedy}") from error
    except ValueError as error:  # a name that has a null byte, or that the system cannot encode
        raise UserError(f"{what}: not a valid file name ({error}); {remedy}") from error


def shown(path: Path | str) -> str:
    """A path as messages show it: quoted if it has unprintable characters."""
    return str(path) if str(path).isprintable() else repr(str(path))


def write_whole(
    files: Mapping[Path, bytes], explain: Callable[[Path], AbstractContextManager[None]]
) -> None:
    """Writes several files, all or none: under temporary names first, then moved into place.

    Several processes may write the same file: it is what one of them wrote, as a whole.

    Args:
        files: the content of each file.
        explain: makes the error context of one file, see `explained`.
    """
    for path in files:
        with explain(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    aside = {path: path.with_name(f".{path.name}.{os.getpid()}.partial") for path in files}
    try:
        for path, data in files.items():
            with explain(path):
                aside[path].unlink(missing_ok=True)  # writing to a pipe could block
                aside[path].write_bytes(data)
        for path in files:
            with explain(path):
                os.replace(aside[path], path)
    finally:
        for partial in aside.values():
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def append_whole(path: Path, data: bytes) -> None:
    """Appends bytes to a file, all or none of them. Raises OSError."""
    with path.open("ab", 0) as file:
        end = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(end)
            raise
