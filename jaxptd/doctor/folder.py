"""Checks of the file system of a run directory: its kind, its space, its locks and renames."""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxptd.analysis.memory_model import state
from jaxptd.config import Config
from jaxptd.display import bytes_text, count_text
from jaxptd.doctor.page import Row, judged, note, problem
from jaxptd.errors import UserError
from jaxptd.layout import Layout
from jaxptd.models.families import with_vocabulary
from jaxptd.models.stages import parameter_infos
from jaxptd.zero.plan import StateShapes

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = re.compile(r"^(nfs|lustre|gpfs|beegfs|ceph|fuse|smb|cifs|9p|afs|glusterfs|wekafs)")
IN_MEMORY = ("tmpfs", "ramfs")
WRITTEN = 2**26  # bytes of the file whose writing is timed
SLOW = 50e6  # bytes per second
LONG = 600.0  # seconds of a save
FEWEST = 10_000  # files that the file system should still have place for

# Run in another process: on NFS a process's own locks do not exclude each other.
TAKE = (
    "import fcntl, sys\n"
    "with open(sys.argv[1], 'r+') as file:\n"
    "    try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "    except BlockingIOError: print('held')\n"
    "    except OSError as error: print(f'error {error.errno}')\n"
    "    else: print('taken')\n"
)


def folder(path: Path, *, checkpoint: int | None, keep: int) -> list[Row]:
    """The rows of this section.

    Args:
        path: the run directory, which need not exist; its nearest folder is checked instead.
        checkpoint: bytes of one checkpoint. None: unknown.
        keep: number of checkpoints that are kept.
    """
    place = nearest(path)
    rows = [_place(path, place), _kind(place, MOUNTS)]
    if not place.is_dir():
        return [problem("run directory", f"{place} is a file", "name a directory")]
    if not os.access(place, os.W_OK):
        remedy = "use a directory that you may write to"
        return [*rows, problem("writing", f"{place} is not writable", remedy)]
    rows += [*_space(place, checkpoint, keep)]
    with _scratch(place) as scratch:
        if scratch is None:
            return [*rows, problem("writing", "no folder can be made", "free space or inodes")]
        for name, check in CHECKS.items():
            try:
                rows.append(check(scratch))
            except OSError as error:
                remedy = "use a local disk, or ask who runs the file system"
                rows.append(problem(name, error.strerror or str(error), remedy))
        rows.append(speed_row(written_per_second(scratch), checkpoint))
    return rows


def nearest(path: Path) -> Path:
    """A path, or the nearest folder above it that exists."""
    whole = path.absolute()
    return next(each for each in (whole, *whole.parents) if os.path.exists(each))


def checkpoint_bytes(config: Config | None) -> int | None:
    """Bytes of a checkpoint: parameters and the optimizer's moments; None: unknown."""
    if config is None:
        return None
    try:
        config = with_vocabulary(config)
    except UserError:  # its tokenizer is elsewhere
        return None
    alone = dataclasses.replace(config, layout=Layout())
    sizes = state(alone, StateShapes.of(alone, parameter_infos(alone)))
    return sizes["parameters"] + sizes["optimizer"]


def _place(path: Path, place: Path) -> Row:
    absent = "" if place == path.absolute() else f", which does not exist yet; checked {place}"
    return Row("run directory", f"{path}{absent}")


# ---- kind and space ------------------------------------------------------------------------------


def mounted(path: Path, mounts: str) -> tuple[str, str]:
    """The type of the file system of a path, and where it is mounted; empty if unknown.

    mounts: the content of `/proc/self/mountinfo`.
    """
    best = "", ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = fields[4].encode().decode("unicode_escape")  # a blank is \040
        is_above = Path(point) in (path, *path.parents)
        if is_above and len(point) >= len(best[1]):
            best = right.split()[0], point
    return best


def _kind(place: Path, mounts: Path) -> Row:
    try:
        kind, point = mounted(place.resolve(), mounts.read_text())
    except OSError:  # not Linux
        return Row("file system", "unknown")
    if kind in IN_MEMORY:
        remedy = "use a disk: checkpoints there take memory, and are gone after a restart"
        return note("file system", f"{kind} at {point}", remedy)
    return Row("file system", f"{kind} at {point}" + ", a network's" * bool(NETWORK.match(kind)))


def _space(place: Path, checkpoint: int | None, keep: int) -> Iterator[Row]:
    free = shutil.disk_usage(place).free
    finding = f"{bytes_text(free)} free"
    if checkpoint is None:
        yield Row("space", finding)
    else:
        whole = (keep + 1) * checkpoint  # a new one is written before an old one is deleted
        finding += f"; a checkpoint takes {bytes_text(checkpoint)}, and {keep} are kept"
        needed = bytes_text(whole)
        remedy = f"free space: {keep} checkpoints and the one being written take {needed}"
        few, tight = free < 2 * checkpoint, free < whole
        yield judged("space", finding, bad=remedy if few else "", remark=remedy if tight else "")
    with contextlib.suppress(OSError):
        files = os.statvfs(place)
        if files.f_files and files.f_favail < FEWEST:
            left = f"{count_text(files.f_favail)} more"
            yield note("number of files", left, "delete some: a checkpoint has many")


# ---- what runs rely on ---------------------------------------------------------------------------


@contextlib.contextmanager
def _scratch(place: Path) -> Iterator[Path | None]:
    """Makes a folder and removes it; None if it cannot be made."""
    try:
        made = tempfile.mkdtemp(prefix=".jaxptd-doctor-", dir=place)
    except OSError:
        yield None
        return
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def locks(scratch: Path) -> Row:
    """Takes a lock, and sees whether it keeps another process out."""
    path = scratch / "lock"
    path.touch()
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return _unsupported()
        answer = other_takes(path)
    if answer == "held":
        return Row("locks", "keep other processes out")
    if answer == "taken":
        remedy = "let no two runs use the same directory: a second one on this host is not noticed"
        return problem("locks", "are granted to two processes at once", remedy)
    return _unsupported()


def other_takes(path: Path) -> str:
    """The answer of another process that tries to lock a file: held, taken, or an error."""
    command = [sys.executable, "-I", "-S", "-c", TAKE, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def _unsupported() -> Row:
    remedy = "nothing to do on one host: the lock's file and process number still protect a run"
    return note("locks", "the file system has none", remedy)


def exclusive(scratch: Path) -> Row:
    """Sees whether a file is created only once."""
    path = scratch / "once"
    path.touch(exist_ok=False)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return Row("exclusive files", "are created once")
    remedy = "let no two runs use the same directory, or use another file system"
    return problem("exclusive files", "are created twice", remedy)


def renames(scratch: Path) -> Row:
    """Sees whether a file replaces another at once, and a renamed folder has its files."""
    new, old, partial, done = (scratch / name for name in ("new", "old", ".1.partial", "1"))
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    os.replace(new, old)
    partial.mkdir()
    (partial / "file").write_bytes(b"whole")
    os.rename(partial, done)
    whole = old.read_bytes() == b"new" and (done / "file").read_bytes() == b"whole"
    if whole and not new.exists() and not partial.exists():
        return Row("renames", "files are replaced, folders keep their content")
    remedy = "use another file system: checkpoints become valid by a rename"
    return problem("renames", "do not show their result", remedy)


CHECKS: dict[str, Callable[[Path], Row]] = {
    "locks": locks,
    "exclusive files": exclusive,
    "renames": renames,
}


def written_per_second(scratch: Path) -> float:
    """Bytes per second of one file, until they are on the disk."""
    data = os.urandom(2**20)  # some file systems compress
    start = time.perf_counter()
    with (scratch / "data").open("wb", 0) as file:
        for _ in range(WRITTEN // len(data)):
            file.write(data)
        os.fsync(file.fileno())
    return WRITTEN / (time.perf_counter() - start)


def speed_row(speed: float, checkpoint: int | None) -> Row:
    """A row on how fast one process writes.

    Args:
        speed: bytes per second.
        checkpoint: bytes of one. None: unknown.
    """
    finding = f"{bytes_text(speed)} per second by one process"
    remedy = "use a faster disk, or a larger checkpoint.every"
    long = checkpoint is not None and checkpoint / speed > LONG
    if checkpoint is not None:
        finding += f", {checkpoint / speed:.0f} s for a checkpoint"
    return judged("writing", finding, remark=remedy if long or speed < SLOW else "")
