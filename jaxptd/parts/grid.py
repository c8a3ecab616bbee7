"""Predicts the collectives of matmuls on a row x col grid.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, m = b*T/(cp*row) tokens
on a device; K and `out` padded rows and columns of a matrix.
Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025; for the algorithms see
`matmul/grid.py`.
"""

import dataclasses
import math
from collections.abc import Iterator

from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.layout import Axis, Layout
from jaxptd.parts.scenario import Scenario


@dataclasses.dataclass(frozen=True)
class Panels:
    """The collectives that move panels of matrices along one axis of a grid.

    Args:
        layout: holds the grid and its algorithm.
        on_gpus: whether XLA broadcasts; CPUs all-reduce instead.
    """

    layout: Layout
    on_gpus: bool

    def spread(self, axis: Axis, size: int, *, times: int, itemsize: int) -> Iterator[Collective]:
        """Sends every device along `axis` the others' blocks of `size` elements."""
        broadcast = BROADCAST if self.on_gpus else ALL_REDUCE
        yield from self._move(axis, size * itemsize, times, (ALL_GATHER, broadcast))

    def collect(self, axis: Axis, size: int, *, times: int, itemsize: int) -> Iterator[Collective]:
        """Reduces partial sums to the devices that own their blocks of `size` elements."""
        yield from self._move(axis, size * itemsize, times, (REDUCE_SCATTER, ALL_REDUCE))

    def _move(
        self, axis: Axis, block: int, times: int, kinds: tuple[str, str]
    ) -> Iterator[Collective]:
        """Moves `block` bytes; kinds: the collectives of gather and of summa."""
        layout = self.layout
        devices, whole = layout.sizes[axis], block * layout.sizes[axis] * times
        ring = Collective(PERMUTE, (axis,), times * (devices - 1), whole - block * times)
        if layout.matmul2d == "gather":
            yield Collective(kinds[0], (axis,), times * layout.matmul2d_slices, whole)
        elif layout.matmul2d == "summa":
            steps = math.lcm(layout.row, layout.col)
            yield Collective(kinds[1], (axis,), times * steps, whole)
        elif layout.matmul2d == "cannon":
            yield Collective(PERMUTE, (axis,), times * devices, whole)  # one of them the skew
        elif axis is Axis.ROW:
            yield ring
        else:  # fox: a source that differs by row is not a broadcast, see collectives.py
            yield Collective(ALL_REDUCE, (axis,), times * devices, whole)


def product(
    step: Scenario, contract: int, out: int, *, forwards: int, times: int
) -> Iterator[Collective]:
    """Collectives of x[m, K] w[K, out], run `forwards` times, and of its backward.

    Forward spreads x and w. Backward spreads w again for the gradient of x, and x for the gradient
    of w; it collects the gradient of x, and that of w in master precision.
    """
    layout, sizes, panels = step.config.layout, step.sizes, Panels(step.config.layout, step.on_gpus)
    x = sizes.rows * contract // layout.col
    w = contract * out // (layout.row * layout.col)
    spread = times * (forwards + 1)
    yield from panels.spread(Axis.COL, x, times=spread, itemsize=sizes.itemsize)
    yield from panels.spread(Axis.ROW, w, times=spread, itemsize=sizes.itemsize)
    yield from panels.collect(Axis.COL, x, times=times, itemsize=sizes.itemsize)
    yield from panels.collect(Axis.ROW, w, times=times, itemsize=sizes.master_itemsize)
