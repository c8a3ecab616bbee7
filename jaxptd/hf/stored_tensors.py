"""A safetensors file in an object store: its header, and slices of its tensors by range requests.

The format: bytes of the header u64, little-endian; the header, a JSON object that has dtype, shape
and first and last byte after the header of each tensor; the tensors, in row-major order.

Source: https://github.com/huggingface/safetensors, "Format".
"""

import dataclasses
import errno
import itertools
import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxptd.stores import StorePath

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
}
LONGEST = 10**8  # bytes of a header, as the library allows
GAP = 2**20  # bytes between two slices that are read with them, instead of by two requests
SPAN = 2**25  # bytes that one request reads at most


class StoredTensors:
    """The tensors of one file; as much of `safetensors.safe_open` as is used here.

    Args:
        url: of the file.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """

    def __init__(self, url: StorePath) -> None:
        if (size := url.store.size(url.key)) is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object")
        begin = url.store.read_range(url.key, 0, min(8, size))
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
        if not 0 < length <= min(LONGEST, size - 8):
            raise ValueError("it has no header of safetensors")
        header = json.loads(url.store.read_range(url.key, 8, 8 + length))
        header.pop("__metadata__", None)
        self._url, self._tensors, first = url, {}, 8 + length
        for name, each in header.items():
            start, stop = each["data_offsets"]
            kind, shape = DTYPES.get(each["dtype"]), tuple(each["shape"])
            count = math.prod(shape)
            if not 0 <= start <= stop <= size - first or (
                kind is not None and count * np.dtype(kind).itemsize != stop - start
            ):
                raise ValueError(f"{name} has {stop - start} bytes, which do not fit its shape")
            self._tensors[name] = StoredTensor(url, each["dtype"], shape, first + start)

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return sorted(self._tensors)

    def get_slice(self, name: str) -> "StoredTensor":
        """A tensor, of which nothing is read yet."""
        return self._tensors[name]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor; `tensor[slices]` reads what these slices need, rows with small gaps as a whole.

    Args:
        url: of its file.
        kind: its precision, in safetensors' words.
        shape: of the tensor.
        offset: its first byte in the file.
    """

    url: StorePath
    kind: str
    shape: tuple[int, ...]
    offset: int

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.kind

    def __getitem__(self, slices: Any) -> np.ndarray:
        given = slices if isinstance(slices, tuple) else (slices,)
        given = (*given, *(slice(None),) * (len(self.shape) - len(given)))
        ranges = [each.indices(n) for each, n in zip(given, self.shape, strict=True)]
        if any(step != 1 for *_, step in ranges):
            raise IndexError("only slices of step 1")
        dtype = np.dtype(DTYPES[self.kind])
        held = [max(0, stop - start) for start, stop, _ in ranges]
        if 0 in held:
            return np.empty(held, dtype)
        # Of the dims before `dim` one entry at a time is read, of those after it all entries.
        dim = next(k for k in range(len(held) + 1) if self._is_whole_after(k, held, dtype))
        if dim == len(held):
            return np.frombuffer(self._bytes([(0, dtype.itemsize)])[0], dtype).reshape(held)
        row = math.prod(self.shape[dim + 1 :]) * dtype.itemsize
        outer = itertools.product(*(range(start, stop) for start, stop, _ in ranges[:dim]))
        runs, (first, last, _) = [], ranges[dim]
        for index in outer:
            before = 0
            for number, size in zip(index, self.shape, strict=False):
                before = before * size + number
            begin = before * self.shape[dim] * row
            runs.append((begin + first * row, begin + last * row))
        rows = [np.frombuffer(data, dtype) for data in self._bytes(runs)]
        whole = np.concatenate(rows).reshape(*held[: dim + 1], *self.shape[dim + 1 :])
        return whole[(*(slice(None),) * (dim + 1), *given[dim + 1 :])]

    def _is_whole_after(self, dim: int, held: Sequence[int], dtype: np.dtype) -> bool:
        """True if the entries of a dim are all needed, or so small that they are read whole."""
        inner = tuple(self.shape[dim + 1 :])
        small = math.prod(inner) * dtype.itemsize <= GAP
        return dim == len(held) or small or tuple(held[dim + 1 :]) == inner

    def _bytes(self, runs: Sequence[tuple[int, int]]) -> list[bytes]:
        """Some ranges of the tensor's bytes, several at a time."""
        cut = [(number, part) for number, run in enumerate(runs) for part in _cut(*run)]
        read = self.url.store.read_range

        def fetch(each: tuple[int, tuple[int, int]]) -> bytes:
            start, stop = each[1]
            return read(self.url.key, self.offset + start, self.offset + stop)

        parts: list[list[bytes]] = [[] for _ in runs]
        for (number, _), data in zip(cut, self.url.store.each(fetch, cut), strict=True):
            parts[number].append(data)
        return [b"".join(each) for each in parts]


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, SPAN):
        yield first, min(first + SPAN, stop)
