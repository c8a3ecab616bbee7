"""Products of matrices held in blocks on a row x col grid of devices: A B, A B^T, A^T B.

Every matrix is cut alike: its rows over `row`, its columns over `col`, operand or result. Let K be
the dim that is summed over, in panels k = 0, 1, ...: A's lie along `col`, B's along `row`.

| form  | what moves                                                                    |
|-------|-------------------------------------------------------------------------------|
| A B   | at each step device (i, j) gets A[i, k] and B[k, j], and adds their product   |
| A B^T | it gets B[k, j]; its A[i, j] B[k, j]^T is its part of C[i, k], summed over j  |
| A^T B | it gets A[i, k]; its A[i, k]^T B[i, j] is its part of C[k, j], summed over i  |

The derivatives of each form are products of the other two. So backward moves blocks again and
nothing but the operands' own blocks is kept: autodiff would keep every block that arrived.

An algorithm is one way to spread the panels of A along a row of devices, one to spread those of B
along a column, and the order of k. To bring the parts of a sum home is to spread, turned round.

| algorithm | A along a row         | B along a column | k at step t on (i, j) | grid   |
|-----------|-----------------------|------------------|-----------------------|--------|
| `fox`     | broadcast             | ring             | i + t                 | square |
| `cannon`  | skewed, then ring     | skewed, ring     | i + j + t             | square |
| `summa`   | broadcast             | broadcast        | t                     | any    |
| `gather`  | all-gather, in slices | all-gather       | all of a slice        | any    |

What the next step needs is under way during a step's product; barriers keep it at one step ahead.

Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, algorithm 1 (Fox et al., 1987);
Cannon, 1969; van de Geijn and Watts, SUMMA, 1997; Nam et al., MeshSlice, ISCA 2025.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxptd.collectives import alike, broadcast, reduce_to, shift
from jaxptd.mesh import Axis, Matmul2D

SQUARE: tuple[Matmul2D, ...] = ("fox", "cannon")  # they need as many rows as columns


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


# ---- the three forms ------------------------------------------------------------------------


def matmul(a: Array, b: Array, grid: Grid) -> Array:
    """A B: a[.., M/row, K/col], b[K/row, N/col] -> [.., M/row, N/col].

    Leading dims of a are rows. b moves in a's precision; products are summed in float32 at least.
    A gradient has the precision of its operand, and devices add their parts of it in that, too.
    """
    a_MK, b_KN = _matrices(a, b, grid)
    return _ab(a_MK, b_KN, grid).reshape(*a.shape[:-1], -1)


def matmul_nt(a: Array, b: Array, grid: Grid) -> Array:
    """A B^T: a[.., M/row, K/col], b[N/row, K/col] -> [.., M/row, N/col]. Else as `matmul`."""
    a_MK, b_NK = _matrices(a, b, grid)
    return _abt(a_MK, b_NK, grid).reshape(*a.shape[:-1], -1)


def matmul_tn(a: Array, b: Array, grid: Grid) -> Array:
    """A^T B: a[.., K/row, M/col], b[.., K/row, N/col] -> [M/row, N/col]. Else as `matmul`."""
    return _atb(*_matrices(a, b, grid), grid)


def _matrices(a: Array, b: Array, grid: Grid) -> tuple[Array, Array]:
    """Leading dims joined, both varying over what one of them or the grid does."""
    a, b, *_ = alike(a, b, lax.axis_index(grid.row), lax.axis_index(grid.col))
    return a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])


Kept = tuple[Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ab(a: Array, b: Array, grid: Grid) -> Array:
    return _times(a, b.astype(a.dtype), grid, a.dtype)


def _ab_bwd(grid: Grid, kept: Kept, dc: Array) -> Kept:
    a, b = kept
    da = _times_transposed(dc, b.astype(a.dtype), grid, a.dtype)
    return da, _transposed_times(a, dc, grid, b.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _abt(a: Array, b: Array, grid: Grid) -> Array:
    return _times_transposed(a, b.astype(a.dtype), grid, a.dtype)


def _abt_bwd(grid: Grid, kept: Kept, dc: Array) -> Kept:
    a, b = kept
    return _times(dc, b.astype(a.dtype), grid, a.dtype), _transposed_times(dc, a, grid, b.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _atb(a: Array, b: Array, grid: Grid) -> Array:
    return _transposed_times(a, b.astype(a.dtype), grid, a.dtype)


def _atb_bwd(grid: Grid, kept: Kept, dc: Array) -> Kept:
    a, b = kept
    return _times_transposed(b.astype(a.dtype), dc, grid, a.dtype), _times(a, dc, grid, b.dtype)


def _keep(form: Any, a: Array, b: Array, grid: Grid) -> tuple[Array, Kept]:
    return form(a, b, grid), (a, b)


_ab.defvjp(partial(_keep, _ab), _ab_bwd)
_abt.defvjp(partial(_keep, _abt), _abt_bwd)
_atb.defvjp(partial(_keep, _atb), _atb_bwd)


def _times(a_MK: Array, b_KN: Array, grid: Grid, dtype: DTypeLike) -> Array:
    along_row, along_column = ways(grid)

    def visit(step: int, total: Any, a_Mk: Array, b_kN: Array) -> Any:
        return total + _dot("mk,kn->mn", a_Mk, b_kN)

    return _steps(visit, 0, (along_row, a_MK, 1), (along_column, b_KN, 0)).astype(dtype)


def _times_transposed(a_MN: Array, b_KN: Array, grid: Grid, dtype: DTypeLike) -> Array:
    along_row, along_column = ways(grid)

    def visit(step: int, sums: Any, b_kN: Array) -> Any:
        part = _dot("mn,kn->mk", a_MN, b_kN).astype(dtype)
        return _collect(along_row, 1, step, sums), part

    return _home(along_row, 1, _steps(visit, None, (along_column, b_KN, 0)))


def _transposed_times(a_MK: Array, b_MN: Array, grid: Grid, dtype: DTypeLike) -> Array:
    along_row, along_column = ways(grid, first=1)

    def visit(step: int, sums: Any, a_Mk: Array) -> Any:
        part = _dot("mk,mn->kn", a_Mk, b_MN).astype(dtype)
        return _collect(along_column, 0, step, sums), part

    return _home(along_column, 0, _steps(visit, None, (along_row, a_MK, 1)))


def _dot(sums: str, a: Array, b: Array) -> Array:
    return jnp.einsum(sums, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


# ---- steps: what is moved, one ahead ----------------------------------------------------------


def _steps(visit: Any, total: Any, *spread: tuple["Way", Array, int]) -> Any:
    """`total` after `visit(step, total, *panels)` at each step; (way, x, dim of K) are spread."""
    steps, matrices = spread[0][0].steps, [x for _, x, _ in spread]
    panels = [way.fetch(x, dim, 0, None) for way, x, dim in spread]
    for step in range(steps - 1):
        ahead = [
            way.fetch(x, dim, step + 1, panel)
            for (way, _, dim), x, panel in zip(spread, matrices, panels, strict=True)
        ]
        total = visit(step, total, *panels)
        total, panels, matrices = lax.optimization_barrier((total, ahead, matrices))
    return visit(steps - 1, total, *panels)


def _collect(way: "Way", dim: int, step: int, sums: Any) -> Any:
    """Sums on their way home, with the parts of the step before `step`."""
    if step == 0:
        return None
    total, part = sums
    return way.collect(total, part, dim, step - 1)


def _home(way: "Way", dim: int, sums: Any) -> Array:
    return way.home(_collect(way, dim, way.steps, sums), dim)


class Way(Protocol):
    """How panels of K are spread along one axis of the grid, and parts of sums brought home."""

    steps: int

    def fetch(self, x: Array, dim: int, step: int, previous: Array | None) -> Array:
        """The panel of a step, cut along `dim`, out of all devices' x; previous: the last step's."""

    def collect(self, total: Any, part: Array, dim: int, step: int) -> Any:
        """`total` (None at first) with this device's part of the sum that a step made."""

    def home(self, total: Any, dim: int) -> Array:
        """The whole sum of this device's own block, once all steps are in `total`."""


def ways(grid: Grid, *, first: int = 0) -> tuple[Way, Way]:
    """How panels move along a row of devices and along a column; `first` is added to k."""
    rows, cols = grid.shape
    if grid.algorithm in SQUARE and rows != cols:
        raise ValueError(f"{grid.algorithm} needs a square grid, not {rows} x {cols}")
    if grid.algorithm == "gather":
        steps = grid.slices
        return _Gather(grid.col, rows, steps), _Gather(grid.row, cols, steps)
    if grid.algorithm == "summa":
        steps = math.lcm(rows, cols)
        return _Broadcast(grid.col, steps, None), _Broadcast(grid.row, steps, None)
    ring = partial(_Ring, grid, first=first, skewed=grid.algorithm == "cannon")
    if grid.algorithm == "cannon":
        return ring(1), ring(0)
    return _Broadcast(grid.col, cols, lax.axis_index(grid.row) + first), ring(0)


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
        part = jnp.moveaxis(part.reshape(-1, part.shape[-1]), 0, dim)
        return lax.all_gather(part, self.axis, axis=dim, tiled=True)

    def collect(self, total: Any, part: Array, dim: int, step: int) -> Any:
        own = lax.psum_scatter(part, self.axis, scatter_dimension=dim, tiled=True)
        return [*(total or ()), own]

    def home(self, total: Any, dim: int) -> Array:
        slices = [jnp.moveaxis(x, dim, 0) for x in total]
        slices = [x.reshape(self._parts, -1, x.shape[-1]) for x in slices]
        x = jnp.stack(slices, axis=1)
        return jnp.moveaxis(x.reshape(-1, x.shape[-1]), 0, dim)

    @property
    def _parts(self) -> int:
        size = lax.axis_size(self.axis)
        return math.lcm(size, self.other) // size


@dataclasses.dataclass(frozen=True)
class _Broadcast:
    """One panel at a time, from the device that has it to all. start: k of step 0, if not 0."""

    axis: str
    steps: int
    start: Array | None

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
        return lax.ppermute(x, self.grid.axes, numbers)


# ---- whole matrices ---------------------------------------------------------------------------


def multiply(a: Array, b: Array, mesh: Mesh, grid: Grid) -> Array:
    """A B of whole matrices on a mesh: a[.., M, K], b[K, N] -> [.., M, N].

    They are zero-padded to sizes that split; the padding is cut off the result.
    """
    rows, cols = mesh.shape[grid.row], mesh.shape[grid.col]
    unit = panels(rows, cols, grid.slices)
    lead = [(0, 0)] * (a.ndim - 2)
    more = [-size % unit for size in (*a.shape[-2:], b.shape[-1])]
    a_MK = jnp.pad(a, [*lead, (0, more[0]), (0, more[1])])
    b_KN = jnp.pad(b, [(0, more[1]), (0, more[2])])
    blocks = P(*(None,) * len(lead), grid.row, grid.col)
    on_grid = jax.shard_map(
        partial(matmul, grid=grid),
        mesh=mesh,
        in_specs=(blocks, P(grid.row, grid.col)),
        out_specs=blocks,
        check_vma=True,
    )
    return on_grid(a_MK, b_KN)[..., : a.shape[-2], : b.shape[-1]]
