"""Files and folders on the disk: synced, checksummed, removed."""

import errno
import os
import shutil
import stat
import zlib
from pathlib import Path
from typing import BinaryIO

CHUNK = 2**20  # bytes read at a time for the CRC: large enough for full disk speed


def sync_file(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file, after fsync."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return size_and_crc(file)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read. Raises OSError also for a pipe, on which a read would wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return open(descriptor, "rb")


def sync_folder(path: Path) -> None:
    """Calls fsync on a folder: fsync of its files does not put their names on the disk."""
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
    """Deletes a folder as far as possible; the rest has a hidden name, the next save retries."""
    shutil.rmtree(folder, ignore_errors=True)
