"""Sizes of matrices on a row x col grid of devices: the number of panels, and padding."""

import math

from jaxptd.layout import Layout


def panels(rows: int, cols: int, slices: int = 1) -> int:
    """The number of panels: a dim of a matrix splits over the grid if this divides it."""
    return math.lcm(rows, cols) * slices


def padded(size: int, grid: tuple[int, int, int], each: int = 1) -> int:
    """Rounds `size` up to a number that splits over a grid of (rows, cols, slices).

    each: rows or columns of the matrix that belong to one of `size`: H for an attention head.
    """
    unit = panels(*grid)
    unit = math.lcm(panels(*grid[:2]), unit // math.gcd(unit, each))
    return -(-size // unit) * unit


def padded_for(layout: Layout, size: int, each: int = 1) -> int:
    """Rounds a size up to equal shards, over tp or on the layout's grid; arguments of `padded`."""
    if layout.has_grid:
        return padded(size, (layout.row, layout.col, layout.matmul2d_slices), each)
    return -(-size // layout.tp) * layout.tp
