"""Several token arrays read as one, without copying them together."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """1D arrays, memmaps, one after the other. A slice is `Joined` views; `np.asarray` reads it."""

    parts: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, part: slice) -> "Joined":
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise IndexError("only slices of step 1")
        views, first = [], 0
        for array in self.parts:
            low, high = max(start - first, 0), min(stop - first, len(array))
            views += [array[low:high]] if low < high else []
            first += len(array)
        return Joined(tuple(views))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("joined arrays cannot be read without a copy")
        array = np.concatenate(self.parts) if self.parts else np.empty(0, np.uint16)
        return array.astype(dtype or array.dtype, copy=False)


def locate(tokens: np.ndarray | Joined, index: int) -> str:
    """Where token `index` stands, in words: its place in its file, or in the array."""
    if isinstance(tokens, Joined):
        for array in tokens.parts:
            if index < len(array):
                return locate(array, index)
            index -= len(array)
        raise IndexError("beyond the last token")
    if not isinstance(tokens, np.memmap):
        return f"token {index} of the data"
    whole = tokens
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    skipped = (_address(tokens) - _address(whole)) // tokens.itemsize
    return f"token {skipped + index} of {tokens.filename}"


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
