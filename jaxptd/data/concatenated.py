"""Several token arrays read as one, without copying them together."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenated:
    """A sequence of 1D arrays or memmaps. Slices are views; `np.asarray` reads and copies."""

    arrays: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(len(array) for array in self.arrays)

    def __getitem__(self, index: slice) -> "Concatenated":
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise IndexError("only slices of step 1")
        views, first = [], 0
        for array in self.arrays:
            low, high = max(start - first, 0), min(stop - first, len(array))
            views += [array[low:high]] if low < high else []
            first += len(array)
        return Concatenated(tuple(views))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("concatenated arrays cannot be read without a copy")
        array = np.concatenate(self.arrays) if self.arrays else np.empty(0, np.uint16)
        return array.astype(dtype or array.dtype, copy=False)


def locate(tokens: np.ndarray | Concatenated, index: int) -> str:
    """Describes the position of token `index` in its file, or in an array, for a message."""
    if isinstance(tokens, Concatenated):
        for array in tokens.arrays:
            if index < len(array):
                return locate(array, index)
            index -= len(array)
        raise IndexError("beyond the last token")
    if not isinstance(tokens, np.memmap):
        return f"token {index} of the data"
    skipped = (_address(tokens) - _address(whole(tokens))) // tokens.itemsize
    return f"token {skipped + index} of {tokens.filename}"


def whole(tokens: np.memmap) -> np.memmap:
    """The mapping of a whole file that a slice was taken from."""
    while isinstance(tokens.base, np.memmap):
        tokens = tokens.base
    return tokens


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
