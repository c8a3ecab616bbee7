"""The lock of a run directory: only one run at a time writes there.

The lock is a file that says which process holds it. It is created with O_EXCL, which is atomic even
on network file systems. Where the file system supports it, the holder also keeps a `flock` on it,
which ends with the process: that reveals a live holder in another container, whose pid means
nothing here.

A lock left behind by a killed process is taken over on the same host. Whether a process on another
host is alive, only a person can find out: the error names its lock and what to do.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxptd.atomic_files import shown
from jaxptd.distributed.coordination import first_only
from jaxptd.errors import UserError
from jaxptd.run.folder import run_dir_errors
from jaxptd.run.holder import Holder
from jaxptd.run.store import StoreLock
from jaxptd.stores import StorePath, place


def lock_of(run_dir: str, *, say: Callable[[str], None]) -> "RunLock | StoreLock":
    """The lock of a run directory on disk or in a store."""
    where = place(run_dir, field="train.run_dir", say=say)
    return (StoreLock if isinstance(where, StorePath) else RunLock)(where, say=say)  # type: ignore[arg-type]


LOCK = "lock.json"
LONGEST = 4096  # most bytes read from a lock
PATIENCE = 0.5  # seconds for a process that has just created a lock to write it
POLL_INTERVAL = 0.05


class RunLock:
    """The lock of one run directory; a run's first process takes it for all.

    Args:
        folder: the run directory, which need not exist.
        say: prints a line.
    """

    def __init__(self, folder: Path | str, *, say: Callable[[str], None]) -> None:
        self.path = Path(folder) / LOCK
        self._say = say
        self._file: int | None = None
        self._made: list[Path] = []

    @first_only
    def check(self) -> None:
        """Raises UserError if another run holds the lock; writes nothing."""
        with run_dir_errors(self.path.parent), self._opened() as file:
            if file is not None:
                self._require_stale(file)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock inside. Creates the run directory if it does not exist.

        Raises:
            UserError: another run holds the lock, or the run directory cannot be written.
        """
        try:
            self._take()
            yield
        finally:
            self.release()

    def require(self) -> None:
        """Does nothing: no other run takes a lock over while its process runs."""

    @first_only
    def release(self) -> None:
        """Removes the lock, and the folders created for it if they hold nothing else."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                if self._is_at_path(file):
                    self.path.unlink()
            os.close(file)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    @first_only
    def _take(self) -> None:
        folder = self.path.parent
        with run_dir_errors(folder):
            self._made = [each for each in (folder, *folder.parents) if not each.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            while not self._created():
                self._remove_stale()

    def _created(self) -> bool:
        """Creates the lock; False if there already is one."""
        try:
            self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError:
            return False
        _flock(self._file)
        os.write(self._file, Holder.this_process().to_json().encode())
        os.fsync(self._file)
        return True

    def _remove_stale(self) -> None:
        """Removes the lock of a process that has ended. Raises UserError for any other lock."""
        with self._opened() as file:
            if file is None:
                return
            holder = self._require_stale(file)
            if self._is_at_path(file):  # not a lock created since the old one was removed
                self.path.unlink()
                self._say(
                    f"took train.run_dir={shown(self.path.parent)} over from {holder}, "
                    "which ended without releasing it"
                )

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Yields a file descriptor of the lock, or None if there is no lock."""
        try:
            file = self._open()
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        try:
            yield file
        finally:
            os.close(file)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        except IsADirectoryError:
            raise UserError(self._damaged()) from None
        except PermissionError:  # it belongs to another user: it can still be named
            return os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def _require_stale(self, file: int) -> Holder:
        """Returns the holder of a lock if it has ended.

        From then on this process holds the lock's `flock`, so that no other takes it over.

        Raises:
            UserError: it may be running.
        """
        where, holder = f"train.run_dir={shown(self.path.parent)}", _read(file)
        if holder is None:
            raise UserError(self._damaged())
        if not holder.is_of_this_host():
            raise UserError(
                f"{where} is locked by {holder}; if it is no longer running there (ssh "
                f"{holder.host} ps -p {holder.pid}), delete {shown(self.path)}"
            )
        if holder.is_running() or not _flock(file):
            raise UserError(
                f"{where} is in use by {holder}; wait until it ends, stop it, or use another "
                "directory"
            )
        return holder

    def _damaged(self) -> str:
        folder, path = shown(self.path.parent), shown(self.path)
        return (
            f"train.run_dir={folder} is locked, but {path} does not name the process; if no run "
            "uses the directory, delete that file"
        )

    def _is_at_path(self, file: int) -> bool:
        """True if the lock's path still leads to an open file."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except FileNotFoundError:
            return False


def _read(file: int) -> Holder | None:
    """The holder that a lock names; None if it names none even after a while."""
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(ValueError, OSError):  # a pipe or a device, for example
            return Holder.from_json(os.pread(file, LONGEST, 0))
        if time.monotonic() > end:
            return None
        time.sleep(POLL_INTERVAL)


def _flock(file: int) -> bool:
    """Takes the `flock` of an open file; False if another process has it.

    Also True if the file system lacks `flock`; then only the pid counts.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
