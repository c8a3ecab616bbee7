"""Tensors in MXFP4, as gpt-oss stores its experts: read slice by slice into float32.

A matrix `[.., R, C]` is two tensors of bytes: `NAME_blocks`, `[.., R, C / 32, 16]`, with two 4-bit
numbers in a byte, the even one in the lower half; and `NAME_scales`, `[.., R, C / 32]`, the
exponent plus 127 of a power of two for each 32 numbers. The tensor that they stand for is
transposed, `[.., C, R]`. Every number is exact in float32, and in bfloat16.

Source: OCP Microscaling Formats 1.0, sections 5.3 and 6.3; `integrations/mxfp4.py` of transformers
5.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

NAME = "MXFP4"  # the precision in reports
BITS = 4 + 8 / 32
BLOCKS, SCALES = "_blocks", "_scales"
IN_BLOCK = 32  # numbers with one scale
BIAS = 127
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # two bits of exponent
VALUES = np.concatenate([_POSITIVE, -_POSITIVE])  # by the number's four bits, the sign first


@dataclasses.dataclass(frozen=True)
class Packed:
    """A tensor in MXFP4; `packed[slices]` reads these slices, and whole blocks of numbers.

    Args:
        blocks: `[.., R, C / 32, 16]`.
        scales: `[.., R, C / 32]`.
        shape: of `blocks`.
    """

    blocks: Any
    scales: Any
    shape: tuple[int, ...]

    @property
    def unpacked_shape(self) -> tuple[int, ...]:
        """`[.., C, R]`."""
        *leading, rows, blocks, _ = self.shape
        return (*leading, blocks * IN_BLOCK, rows)

    def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
        *leading, columns, rows = slices
        begin, end, _ = columns.indices(self.unpacked_shape[-2])
        first, last = begin // IN_BLOCK, math.ceil(end / IN_BLOCK)
        held = (*leading, rows, slice(first, last))
        byte = np.asarray(self.blocks[(*held, slice(None))])
        exponent = np.asarray(self.scales[held]).astype(np.int32) - BIAS
        pairs = np.stack([byte & 15, byte >> 4], -1).reshape(*byte.shape[:-1], IN_BLOCK)
        with np.errstate(over="ignore"):  # numbers that are not finite are refused by name
            x = np.ldexp(VALUES[pairs], exponent[..., None])
        x = x.reshape(*x.shape[:-2], x.shape[-2] * IN_BLOCK)
        return x[..., begin - first * IN_BLOCK : end - first * IN_BLOCK].swapaxes(-1, -2)


def packed_names(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Name of each tensor in MXFP4 -> those of its blocks and scales."""
    stored = set(names)
    pairs = {
        name.removesuffix(BLOCKS): (name, f"{name.removesuffix(BLOCKS)}{SCALES}")
        for name in sorted(stored)
        if name.endswith(BLOCKS)
    }
    return {name: pair for name, pair in pairs.items() if pair[1] in stored and name not in stored}


def fits(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> bool:
    """True if blocks and scales of these shapes and precisions belong together."""
    (*of_blocks, half), of_scales = shapes
    return 2 * half == IN_BLOCK and of_blocks == [*of_scales] and set(dtypes) == {"U8"}


def replaced(names: Mapping[str, Any], packed: Mapping[str, tuple[str, str]]) -> list[str]:
    """The names of all tensors, where blocks and scales stand for one."""
    parts = {part for pair in packed.values() for part in pair}
    return [*(name for name in names if name not in parts), *packed]
