"""How panels of matrices are spread over a row x col grid of devices, and sums brought home.

A product on the grid sums over K, in panels k = 0, 1, ...; A's lie along `col`, B's along `row`. An
algorithm is one way to spread A's panels along a row of devices, one to spread B's along a column,
and the order of k. To bring the parts of a sum home is to spread, turned round.

| algorithm | A along a row         | B along a column | k at step t on (i, j) | grid   |
|-----------|-----------------------|------------------|-----------------------|--------|
| `fox`     | broadcast             | ring             | i + t                 | square |
| `cannon`  | skewed, then ring     | skewed, ring     | i + j + t             | square |
| `summa`   | broadcast             | broadcast        | t                     | any    |
| `gather`  | all-gather, in slices | all-gather       | all of a slice        | any    |

Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, algorithm 1 (Fox et al., 1987);
Cannon, 1969; van de Geijn and Watts, SUMMA, 1997; Nam et al., MeshSlice, ISCA 2025.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import broadcast, permute, reduce_to, shift
from jaxptd.mesh import SQUARE, Axis, Matmul2D


@dataclasses.dataclass(frozen=True)
class Grid:
    """The devices that hold a matrix in blocks, and how they multiply.

    Args:
        algorithm: fox, summa, cannon or gather.
        slices: parts in which `gather` gathers; more need less memory and overlap better.
        row: the mesh axis along which the blocks of a column of the matrix lie.
        col: the mesh axis along which those of a row lie.
    """

    algorithm: Matmul2D = "gather"
    slices: int = 1
    row: str = Axis.ROW
    col: str = Axis.COL

    @property
    def axes(self) -> tuple[str, str]:
        return self.row, self.col

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns; inside a shard_map."""
        return lax.axis_size(self.row), lax.axis_size(self.col)


def panels(rows: int, cols: int, slices: int = 1) -> int:
    """A dim of a matrix splits over the grid if this divides it."""
    return math.lcm(rows, cols) * slices


def padded(size: int, grid: tuple[int, int, int], each: int = 1) -> int:
    """The least number, of `size` or more, that splits over a grid of (rows, cols, slices).

    each: rows or columns of the matrix that belong to one of `size`, as to an attention head.
    """
    unit = panels(*grid)
    unit = math.lcm(panels(*grid[:2]), unit // math.gcd(unit, each))
    return -(-size // unit) * unit


class PanelMove(Protocol):
    """How panels of K are spread along one axis of the grid, and parts of sums brought home."""

    @property
    def steps(self) -> int:
        """How many a product takes."""

    def fetch(self, x: Array, dim: int, step: int, previous: Array | None) -> Array:
        """The panel of a step, out of all devices' x, cut along `dim`; previous: the last one."""

    def collect(self, total: Any, part: Array, dim: int, step: int) -> Any:
        """`total` (None at first) with this device's part of the sum that a step made."""

    def home(self, total: Any, dim: int) -> Array:
        """The whole sum of this device's own block, once all steps are in `total`."""


def panel_moves(grid: Grid, *, first: int = 0) -> tuple[PanelMove, PanelMove]:
    """How panels move along a row of devices and along a column; `first` is added to k."""
    rows, cols = grid.shape
    if grid.algorithm in SQUARE and rows != cols:
        raise ValueError(f"{grid.algorithm} needs a square grid, not {rows} x {cols}")
    if grid.algorithm == "gather":
        steps = grid.slices
        return _Gather(grid.col, rows, steps), _Gather(grid.row, cols, steps)
    if grid.algorithm == "summa":
        steps = math.lcm(rows, cols)
        return _Broadcast(grid, 1, steps, None), _Broadcast(grid, 0, steps, None)
    ring = partial(_Ring, grid, first=first, skewed=grid.algorithm == "cannon")
    if grid.algorithm == "cannon":
        return ring(1), ring(0)
    if grid.algorithm == "fox":
        return _Broadcast(grid, 1, cols, lax.axis_index(grid.row) + first), ring(0)
    raise ValueError(f"no algorithm {grid.algorithm!r}")


@dataclasses.dataclass(frozen=True)
class _Gather:
    """Slice by slice, each of all devices. `other`: devices along the other axis of the grid.

    A slice is made of the same k for A as for B, whose blocks differ in length: so it is taken out
    of each of the parts into which both kinds of block can be cut.
    """

    axis: str
    other: int
    steps: int

    def fetch(self, x: Array, dim: int, step: int, previous: Array | None) -> Array:
        part = jnp.moveaxis(x, dim, 0)
        part = part.reshape(self._parts, self.steps, -1, part.shape[-1])[:, step]
        part = part.reshape(-1, part.shape[-1])
        return jnp.moveaxis(lax.all_gather(part, self.axis, axis=0, tiled=True), 0, dim)

    def collect(self, total: Any, part: Array, dim: int, step: int) -> Any:
        part = jnp.moveaxis(part, dim, 0)
        own = lax.psum_scatter(part, self.axis, scatter_dimension=0, tiled=True)
        return [*(total or ()), own]

    def home(self, total: Any, dim: int) -> Array:
        slices = [x.reshape(self._parts, -1, x.shape[-1]) for x in total]
        x = jnp.stack(slices, axis=1)
        return jnp.moveaxis(x.reshape(-1, x.shape[-1]), 0, dim)

    @property
    def _parts(self) -> int:
        size = lax.axis_size(self.axis)
        return math.lcm(size, self.other) // size


@dataclasses.dataclass(frozen=True)
class _Broadcast:
    """One panel at a time, from the device that has it to all.

    dim: 1 along a row, 0 along a column. start: k of step 0, if not 0.
    """

    grid: Grid
    dim: int
    steps: int
    start: Array | None

    @property
    def axis(self) -> str:
        return self.grid.axes[self.dim]

    def fetch(self, x: Array, dim: int, step: int, previous: Array | None) -> Array:
        source, number = self._owner(step)
        width = x.shape[dim] // self._each
        own = lax.slice_in_dim(x, number * width, (number + 1) * width, axis=dim)
        return broadcast(own, self.axis, source)

    def collect(self, total: Any, part: Array, dim: int, step: int) -> Any:
        target, number = self._owner(step)
        total = total or [0] * self._each
        own = total[number] + reduce_to(part, self.axis, target)
        return [*total[:number], own, *total[number + 1 :]]

    def home(self, total: Any, dim: int) -> Array:
        return jnp.concatenate(total, axis=dim)

    @property
    def _each(self) -> int:
        """Panels of a device."""
        return self.steps // lax.axis_size(self.axis)

    def _owner(self, step: int) -> tuple[int | Array, int]:
        """The device that has the panel of a step, and the panel's number there."""
        if self.start is not None:
            return (self.start + step) % self.steps, 0
        return divmod(step, self._each)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """A panel goes on to the device before this one; sums travel the same way.

    dim: 1 along a row, 0 along a column. skewed: k of step 0 is i + j + first, else i + first.
    """

    grid: Grid
    dim: int
    first: int
    skewed: bool

    @property
    def steps(self) -> int:
        return self.grid.shape[0]

    def fetch(self, x: Array, dim: int, step: int, previous: Array | None) -> Array:
        if previous is None:
            return self._move(x, [(self._at(*to, self.first), to) for to in self._devices])
        return self._shift(previous)

    def collect(self, total: Any, part: Array, dim: int, step: int) -> Any:
        return part if total is None else self._shift(total) + part

    def home(self, total: Any, dim: int) -> Array:
        return self._move(total, [(at, self._at(*at, self.first - 1)) for at in self._devices])

    def _shift(self, x: Array) -> Array:
        return shift(x, self.grid.axes[self.dim], by=-1)

    @property
    def _devices(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.steps) for j in range(self.steps)]

    def _at(self, i: int, j: int, first: int) -> tuple[int, int]:
        """The device along this axis that has panel `k` of device (i, j)."""
        k = (i + first + (j if self.skewed else 0)) % self.steps
        return (i, k) if self.dim == 1 else (k, j)

    def _move(self, x: Array, pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> Array:
        """x, from device to device; nothing, if each has its own."""
        if all(source == target for source, target in pairs):
            return x
        numbers = [(i * self.steps + j, to_i * self.steps + to_j) for (i, j), (to_i, to_j) in pairs]
        return permute(x, self.grid.axes, numbers)
