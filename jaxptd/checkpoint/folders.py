"""Lists, creates, replaces and deletes the folders of a run's checkpoints; and their errors.

See checkpoints.py for their names. With several processes, only process 0 changes anything.
"""

import errno
import os
import re
import shutil
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from jaxptd.errors import UserError

LONGEST = 80  # most characters of a value in a message


class CheckpointError(UserError):
    """A checkpoint cannot be written, read or used; the message names it and why."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint differs from what was saved: a file is missing, truncated or changed."""


def reason(error: BaseException) -> str:
    """The operating system's message behind an error, else the error's own, in one line.

    tensorstore reports the system's error number only within its message.
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
    """A value as messages show it: on one line, printable and short."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


# ---- files on the disk: synced, checksummed, removed ---------------------------------------------

CHUNK = 2**20  # bytes read at a time for the CRC: large enough for full disk speed


def sync_file(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file, after fsync."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return size_and_crc(file)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read. Raises OSError even for a pipe, which could block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return open(descriptor, "rb")


def sync_folder(path: Path) -> None:
    """Calls fsync on a folder, because fsync of its files does not store their names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_and_crc(file: BinaryIO) -> dict[str, int]:
    """Size in bytes and CRC-32 of what remains of an open file."""
    size = crc = 0
    while chunk := file.read(CHUNK):
        size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return {"size": size, "crc32": crc}


def remove(folder: Path) -> None:
    """Deletes a folder as far as possible; the rest is hidden, and the next save retries."""
    shutil.rmtree(folder, ignore_errors=True)


MANIFEST = "manifest.json"
STEP = "[0-9]{8,}"  # the name of a checkpoint's folder


class Folders:
    """One folder for each step in `directory`, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    def all(self) -> dict[int, Path]:
        """The folder of each step, complete or not, in ascending order."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(
                f"cannot look for checkpoints in {self.directory}: {reason(error)}"
            ) from error
        folders = {}
        for name in sorted(
            names
        ):  # "." sorts first, so that a new step overrides the one it replaces
            match = re.fullmatch(rf"({STEP})|\.({STEP})\.replaced", name)
            if match and os.path.isdir(self.directory / name):
                folders[int(match[1] or match[2])] = self.directory / name
        return dict(sorted(folders.items()))

    def complete(self) -> list[int]:
        """The steps whose folder has a manifest, ascending; reads no file."""
        return [step for step, folder in self.all().items() if os.path.isfile(folder / MANIFEST)]

    def folder(self, step: int) -> Path:
        """The folder of a step. Raises CheckpointError if there is none."""
        folders = self.all()
        if step not in folders:
            steps = f"it has steps {', '.join(map(str, folders))}" if folders else "it has none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; {steps}")
        return folders[step]

    def partial(self, step: int) -> Path:
        """The folder in which a step is written or deleted, which `all` ignores."""
        return self._hidden(step, "partial")

    def make_partial(self, step: int) -> None:
        """Creates an empty folder to write a step into; removes what killed saves left first."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()
        self.partial(step).mkdir()

    def move_into_place(self, step: int) -> None:
        """Renames a step's complete folder to its final name, replacing an older one."""
        final, replaced = self._final(step), self._hidden(step, "replaced")
        if final.exists():
            final.rename(replaced)  # a folder cannot be renamed onto a nonempty one
        self.partial(step).rename(final)
        sync_folder(self.directory)
        remove(replaced)

    def delete(self, step: int) -> None:
        """Deletes a step. Raises OSError if its folder cannot be renamed first."""
        doomed = self.partial(step)
        self._final(step).rename(
            doomed
        )  # so that it does not look damaged if killed while deleting
        remove(doomed)

    def set_aside(self, step: int) -> Path:
        """Renames a step so that `all` ignores it, and returns its new path.

        Raises:
            OSError: it cannot be renamed.
        """
        aside = self.directory / f"{step:08d}.aside"
        number = 1
        while aside.exists():
            number += 1
            aside = self.directory / f"{step:08d}.aside{number}"
        self.folder(step).rename(aside)
        return aside

    def _final(self, step: int) -> Path:
        return self.directory / f"{step:08d}"

    def _hidden(self, step: int, kind: str) -> Path:
        return self.directory / f".{step:08d}.{kind}"

    def _clear_leftovers(self) -> None:
        """Removes what killed saves left; restores a replaced step if its new one is missing."""
        for path in self.directory.iterdir():
            match = re.fullmatch(rf"\.({STEP})\.(partial|replaced)", path.name)
            if match and match[2] == "replaced" and not self._final(int(match[1])).exists():
                path.rename(self._final(int(match[1])))
            elif match:
                remove(path)
