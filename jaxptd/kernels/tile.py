"""Tiles of an array `[R, D]`, which programs of a kernel read and write; how kernels are called.

A program has groups of 32 threads ("warps"), whose registers hold a tile. Letters: R rows (tokens),
D numbers of a row.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


class Places(NamedTuple):
    """Indices of a tile, of its rows and of their numbers, each with which of them there are."""

    both: tuple[Any, Array]
    rows: tuple[Any, Array]
    numbers: tuple[Any, Array]

    def of_part(self, part: int) -> tuple[Any, Array]:
        """The tile in part number `part` of an array `[R, parts, D]`."""
        (row, column), there = self.both
        return (row, part, column), there


@dataclasses.dataclass(frozen=True)
class Tile:
    """Neighbouring rows, and neighbouring numbers of each.

    Args:
        rows: number of them.
        width: numbers of each, a power of two.
        warps: that share it.
    """

    rows: int
    width: int
    warps: int

    def grid(self, rows: int, size: int) -> tuple[int, int]:
        """The numbers of tiles along rows and along the numbers of each."""
        return pl.cdiv(rows, self.rows), pl.cdiv(size, self.width)

    def places(self, row: Any, column: Any, rows: int, size: int) -> Places:
        """The places of tile (row, column) in an array of so many rows of so many numbers."""
        row, column = (
            number * each + jnp.arange(each)
            for number, each in ((row, self.rows), (column, self.width))
        )
        there = (row < rows), (column < size)
        both = (row[:, None], column[None]), there[0][:, None] & there[1][None]
        return Places(both, (row, there[0]), (column, there[1]))


def call(
    kernel: Any,
    inputs: Any,
    shapes: Sequence[Any],
    *,
    grid: tuple[int, ...],
    warps: int,
    interpret: bool,
    over: Mapping[int, int] | None = None,
) -> Any:
    """Runs a kernel, whose results vary over the axes over which its inputs do.

    Args:
        kernel: a function, or a partial one, of references to inputs and results.
        inputs: a tree of arrays.
        shapes: of the results, with their types.
        grid: of programs.
        warps: of each.
        interpret: runs the kernel's operations one by one, on any device.
        over: inputs over which results are written, {number: number}.
    """
    like = jax.typeof(inputs[0]).manual_axis_type
    return pl.pallas_call(
        kernel,
        [jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=like) for s in shapes],
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=warps),
        interpret=interpret,
        input_output_aliases=dict(over or {}),
        name=getattr(kernel, "func", kernel).__name__.removeprefix("_"),
    )(*inputs)


def load(array: Any, places: tuple[Any, Any], other: float | None = 0.0) -> Array:
    """Numbers of an array in float32, `other` where there are none."""
    index, there = places
    return triton.load(array.at[index], mask=there, other=other).astype(jnp.float32)


def store(array: Any, places: tuple[Any, Any], values: Array) -> None:
    """Writes numbers of an array, in its type."""
    index, there = places
    triton.store(array.at[index], values.astype(array.dtype), mask=there)
