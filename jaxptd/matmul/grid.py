"""Moves panels of matrices over a row x col grid of devices, and reduces partial sums.

A matmul on the grid sums over K in panels k = 0, 1, ...: blocks of columns of A or of rows of B. An
algorithm consists of a way to move A's panels along a row of devices, a way to move B's along a
column, and the order of k. Reducing partial sums is the transpose of moving panels.

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
    """The devices that hold a matrix in blocks, and the algorithm by which they multiply.

    Args:
        algorithm: fox, summa, cannon or gather.
        slices: number of steps of `gather`; more steps need less memory and overlap better.
        row: the mesh axis over which the rows of a matrix are sharded.
        col: the mesh axis over which its columns are sharded.
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
        """Rows and columns; call inside a shard_map."""
        return lax.axis_size(self.row), lax.axis_size(self.col)


class PanelMove(Protocol):
    """Moves panels along one axis of the grid, and reduces partial sums along it."""

    @property
    def steps(self) -> int:
        """The number of steps of a matmul."""

    def fetch(self, x: Array, dim: int, step: int, previous: Array | None) -> Array:
        """The panel of a step, of x sharded along `dim`; previous: the last step's panel."""

    def reduce(self, total: Any, partial_sum: Array, dim: int, step: int) -> Any:
        """Adds this device's partial sum of a step to `total` (None at first)."""

    def finish(self, total: Any, dim: int) -> Array:
        """This device's block of the sum, after the last step."""


def panel_moves(grid: Grid, *, first: int = 0) -> tuple[PanelMove, PanelMove]:
    """Moves of panels along a row of devices, and along a column. first: offset of k."""
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
    """All-gathers and reduce-scatters, one slice per step. other: size of the grid's other axis.

    A slice must hold the same k of A and of B, whose blocks differ in length. So it takes a piece
    of every section, a length that divides both kinds of block.
    """

    axis: str
    other: int
    steps: int

    def fetch(self, x: Array, dim: int, step: int, previous: Array | None) -> Array:
        x = jnp.moveaxis(x, dim, 0)
        pieces = x.reshape(self._sections, self.steps, -1, x.shape[-1])[:, step]
        local = pieces.reshape(-1, x.shape[-1])
        return jnp.moveaxis(lax.all_gather(local, self.axis, axis=0, tiled=True), 0, dim)

    def reduce(self, total: Any, partial_sum: Array, dim: int, step: int) -> Any:
        x = jnp.moveaxis(partial_sum, dim, 0)
        local = lax.psum_scatter(x, self.axis, scatter_dimension=0, tiled=True)
        return [*(total or ()), local]

    def finish(self, total: Any, dim: int) -> Array:
        slices = [x.reshape(self._sections, -1, x.shape[-1]) for x in total]
        x = jnp.stack(slices, axis=1)
        return jnp.moveaxis(x.reshape(-1, x.shape[-1]), 0, dim)

    @property
    def _sections(self) -> int:
        size = lax.axis_size(self.axis)
        return math.lcm(size, self.other) // size


@dataclasses.dataclass(frozen=True)
class _Broadcast:
    """Broadcasts one panel per step from the device that holds it; reduces its sum to that device.

    dim: 1 along a row, 0 along a column. start: k of step 0; None: 0.
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
        local = lax.slice_in_dim(x, number * width, (number + 1) * width, axis=dim)
        return broadcast(local, self.axis, source)

    def reduce(self, total: Any, partial_sum: Array, dim: int, step: int) -> Any:
        target, number = self._owner(step)
        total = total or [0] * self._each
        local = total[number] + reduce_to(partial_sum, self.axis, target)
        return [*total[:number], local, *total[number + 1 :]]

    def finish(self, total: Any, dim: int) -> Array:
        return jnp.concatenate(total, axis=dim)

    @property
    def _each(self) -> int:
        """Panels per device."""
        return self.steps // lax.axis_size(self.axis)

    def _owner(self, step: int) -> tuple[int | Array, int]:
        """The device that holds the panel of a step, and the panel's index there."""
        if self.start is not None:
            return (self.start + step) % self.steps, 0
        return divmod(step, self._each)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Each step receives the next device's panel; partial sums travel in the same direction.

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

    def reduce(self, total: Any, partial_sum: Array, dim: int, step: int) -> Any:
        return partial_sum if total is None else self._shift(total) + partial_sum

    def finish(self, total: Any, dim: int) -> Array:
        return self._move(total, [(at, self._at(*at, self.first - 1)) for at in self._devices])

    def _shift(self, x: Array) -> Array:
        return shift(x, self.grid.axes[self.dim], by=-1)

    @property
    def _devices(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.steps) for j in range(self.steps)]

    def _at(self, i: int, j: int, first: int) -> tuple[int, int]:
        """The device along this axis that holds panel `k` of device (i, j)."""
        k = (i + first + (j if self.skewed else 0)) % self.steps
        return (i, k) if self.dim == 1 else (k, j)

    def _move(self, x: Array, pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> Array:
        """Permutes x; a no-op if each device keeps its own."""
        if all(source == target for source, target in pairs):
            return x
        numbers = [(i * self.steps + j, to_i * self.steps + to_j) for (i, j), (to_i, to_j) in pairs]
        return permute(x, self.grid.axes, numbers)
