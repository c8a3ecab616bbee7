"""Padding of sizes to equal shards, on a row x col grid of devices or over tp; panels of a grid."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jaxptd.layout import Layout


def rounded_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not less than `size`."""
    return -(-size // unit) * unit


def panels(rows: int, cols: int, slices: int = 1) -> int:
    """The number of panels; a dim of a matrix splits over the grid if this divides it."""
    return math.lcm(rows, cols) * slices


def padded(size: int, grid: tuple[int, int, int], each: int = 1) -> int:
    """Rounds `size` up to a multiple that splits over a grid of (rows, cols, slices).

    each: rows or columns of the matrix per unit of `size`: H for an attention head.
    """
    unit = panels(*grid)
    unit = math.lcm(panels(*grid[:2]), unit // math.gcd(unit, each))
    return rounded_up(size, unit)


def padded_for(layout: Layout, size: int, each: int = 1) -> int:
    """Rounds a size up to equal shards, over tp or on the layout's grid; see `padded`."""
    if layout.has_grid:
        return padded(size, (layout.row, layout.col, layout.matmul2d_slices), each)
    return rounded_up(size, layout.tp)


class HeadCounts(NamedTuple):
    """Numbers of heads over all devices.

    Args:
        queries: N with padding.
        keys: K, heads of keys and values, with padding.
        gathered: whether each device computes a slice of every kv head, then gathers the slices.
    """

    queries: int
    keys: int
    gathered: bool = False


def padded_heads(
    heads: int, kv_heads: int, *, devices: int, padded: Callable[[int], int]
) -> HeadCounts:
    """Rounds numbers of heads up so that each device's query heads read its own kv heads.

    Whole groups are padded: K is rounded up, and N grows by as many groups. A padding query head
    must read a padding kv head, or its output would not be zero. Where N already splits, and a
    device's query heads are whole groups or parts of one, nothing is padded and the kv heads are
    gathered.

    Args:
        heads: N.
        kv_heads: K.
        devices: how many share the heads.
        padded: rounds a number of heads up to equal shards.

    >>> up = lambda size: -(-size // 4) * 4
    >>> padded_heads(6, 6, devices=4, padded=up)
    HeadCounts(queries=8, keys=8, gathered=False)
    >>> padded_heads(12, 6, devices=4, padded=up)
    HeadCounts(queries=16, keys=8, gathered=False)
    >>> padded_heads(12, 2, devices=4, padded=up)
    HeadCounts(queries=12, keys=2, gathered=True)
    """
    groups, keys = heads // kv_heads, padded(kv_heads)
    fits = kv_heads % devices == 0 or devices % kv_heads == 0
    if groups > 1 and keys > kv_heads and fits and padded(heads) == heads:
        return HeadCounts(heads, kv_heads, gathered=True)
    return HeadCounts(groups * keys, keys)


def heads_for(layout: Layout, heads: int, kv_heads: int, head_size: int) -> HeadCounts:
    """Rounds numbers of heads up for a layout whose devices hold whole heads; see `padded_heads`.

    head_size: H.
    """
    padded = partial(padded_for, layout, each=head_size)
    return padded_heads(heads, kv_heads, devices=layout.tp * layout.col, padded=padded)
