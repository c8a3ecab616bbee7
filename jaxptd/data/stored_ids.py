"""Token ids of a `.bin` in an object store, read in blocks when a batch first needs them.

Each block is fetched once and kept on this machine's disk until the process ends, so a file is
downloaded at most once, and a run that has read all blocks is as fast as one from a disk.
"""

import contextlib
import dataclasses
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from jaxptd.errors import UserError
from jaxptd.stores import StorePath

BLOCK = 2**20  # bytes that are fetched at a time


class Blocks:
    """The bytes of an object, as far as they have been read, all of the same version.

    Args:
        url: of the object.
        size: its bytes.
    """

    def __init__(self, url: StorePath, size: int) -> None:
        self.url, self.size = url, size
        self._there = np.zeros(-(-size // BLOCK), bool)
        self._lock = threading.Lock()
        self._version = url.store.version(url.key)

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetches the missing blocks of some ranges of bytes, several at a time."""
        numbers = {n for a, b in ranges if a < b for n in range(a // BLOCK, -(-b // BLOCK))}
        with self._lock:
            missing = [number for number in sorted(numbers) if not self._there[number]]
            with self._explained():
                _ = self._file  # made here: threads that race for it would make several
            self.url.store.each(self._fetch, missing)
            if missing and self.url.store.version(self.url.key) != self._version:
                raise UserError(
                    f"data.source: {self.url} was changed while the run read it; put the object "
                    "back as it was, and start the run again"
                )
            self._there[missing] = True

    def read(self, start: int, stop: int) -> bytes:
        """Some bytes. Raises UserError if they cannot be fetched or the disk is full."""
        self.fetch([(start, stop)])
        parts = []
        while start < stop:  # the system reads at most 2 GiB at a time
            parts.append(os.pread(self._file, stop - start, start))
            assert parts[-1]
            start += len(parts[-1])
        return b"".join(parts)

    def _fetch(self, number: int) -> None:
        start = number * BLOCK
        try:
            data = self.url.store.read_range(self.url.key, start, min(start + BLOCK, self.size))
        except FileNotFoundError as error:
            raise UserError(f"data.source: {self.url} was deleted; put it there again") from error
        with self._explained():
            while data:
                written = os.pwrite(self._file, data, start)
                data, start = data[written:], start + written

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"data.source: cannot keep a part of {self.url} on this machine: "
                f"{error.strerror or error}; the folder of TMPDIR needs room for the file"
            ) from error

    @cached_property
    def _file(self) -> int:
        descriptor, path = tempfile.mkstemp(prefix="jaxptd-")
        os.unlink(path)  # its room is free once it is closed
        weakref.finalize(self, os.close, descriptor)
        return descriptor


@dataclasses.dataclass(frozen=True, eq=False)
class StoredIds:
    """A 1D array of ids. Slices are views; `np.asarray` reads.

    Args:
        blocks: of the object.
        dtype: of an id.
        offset: byte of the object at which the array begins.
        count: number of ids.
        skipped: ids of the file before the array.
    """

    blocks: Blocks
    dtype: np.dtype
    offset: int
    count: int
    skipped: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: slice) -> "StoredIds":
        start, stop, step = index.indices(self.count)
        if step != 1:
            raise IndexError("only slices of step 1")
        offset = self.offset + start * self.dtype.itemsize
        count = max(0, stop - start)
        return StoredIds(self.blocks, self.dtype, offset, count, self.skipped + start)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("ids in a store cannot be read without a copy")
        data = self.blocks.read(*self._bytes(0, self.count))
        return np.frombuffer(data, self.dtype).astype(dtype or self.dtype)

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetches what some ranges of ids need, all at once."""
        self.blocks.fetch(self._bytes(max(a, 0), min(b, self.count)) for a, b in ranges)

    def _bytes(self, start: int, stop: int) -> tuple[int, int]:
        size = self.dtype.itemsize
        return self.offset + start * size, self.offset + stop * size
