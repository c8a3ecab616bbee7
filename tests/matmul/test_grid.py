"""The panels of each step against a table; reducing is the transpose of fetching."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from turns import by_turns, slow

from jaxptd.matmul.grid import Grid, PanelMove, panel_moves
from jaxptd.matmul.padding import padded, panels
from jaxptd.mesh import Axis, Layout, make_mesh

WIDTH = 2  # of one panel
# (rows, columns, algorithm, panel at step t on device (i, j)).
ORDERS = [
    (2, 2, Grid("fox"), lambda i, j, t: (i + t) % 2),
    (2, 2, Grid("cannon"), lambda i, j, t: (i + j + t) % 2),
    (2, 4, Grid("summa"), lambda i, j, t: t),
    (4, 2, Grid("summa"), lambda i, j, t: t),
]
GATHER = [(2, 4, Grid("gather", 3)), (4, 2, Grid("gather", 2)), (2, 2, Grid("gather"))]
NAMES = [f"{rows}x{cols}-{grid.algorithm}" for rows, cols, grid, *_ in [*ORDERS, *GATHER]]


def on_grid(rows: int, cols: int, body: Callable, *whole: Array, outs: P) -> np.ndarray:
    mapped = jax.shard_map(
        body,
        mesh=make_mesh(Layout(row=rows, col=cols)),
        in_specs=(P(Axis.ROW, Axis.COL),) * len(whole),
        out_specs=outs,
        check_vma=True,
    )
    return np.asarray(jax.jit(mapped)(*whole))


def each_step(move: PanelMove, x: Array, dim: int) -> list[Array]:
    fetched: list[Array] = []
    for step in range(move.steps):
        fetched.append(move.fetch(x, dim, step, fetched[-1] if fetched else None))
    return fetched


def numbered(rows: int, cols: int, dim: int) -> np.ndarray:
    """A matrix filled with the indices of its columns (dim 1) or rows (dim 0)."""
    size = panels(rows, cols, 6) * WIDTH
    return np.broadcast_to(np.arange(size) if dim else np.arange(size)[:, None], (size, size))


def arriving(rows: int, cols: int, grid: Grid, dim: int, first: int = 0) -> np.ndarray:
    """Indices along K `[rows, cols, step, k]` that arrive at each device."""

    def body(x: Array) -> Array:
        along = panel_moves(grid, first=first)[1 - dim]
        fetched = each_step(along, x, dim)
        return jnp.stack([p[0] if dim else p[:, 0] for p in fetched])[None, None]

    spec = P(Axis.ROW, Axis.COL)
    return on_grid(rows, cols, body, jnp.asarray(numbered(rows, cols, dim)), outs=spec)


@pytest.mark.parametrize("first", [slow(0), 1])
@pytest.mark.parametrize(("rows", "cols", "grid", "order"), ORDERS, ids=NAMES[: len(ORDERS)])
def test_the_panel_of_each_step_is_the_tables(rows, cols, grid, order, first: int) -> None:
    found = [arriving(rows, cols, grid, dim, first) for dim in (1, 0)]
    count = math.lcm(rows, cols)
    width = found[0].shape[-1]
    for i, j, t in np.ndindex(rows, cols, count):
        k = order(i, j, t + (first if grid.algorithm != "summa" else 0))
        for numbers in found:  # A along the row and B along the column: the same
            np.testing.assert_array_equal(numbers[i, j, t], k * width + np.arange(width))


@pytest.mark.parametrize(("rows", "cols", "grid"), GATHER, ids=NAMES[len(ORDERS) :])
def test_a_slice_has_the_same_k_of_both_matrices_on_every_device(rows, cols, grid) -> None:
    a, b = (arriving(rows, cols, grid, dim) for dim in (1, 0))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, np.broadcast_to(a[0, 0], a.shape))
    assert sorted(a[0, 0].ravel()) == list(range(a[0, 0].size))


@pytest.mark.parametrize(("first", "dim"), by_turns([0, 1], [0, 1]))
@pytest.mark.parametrize(
    ("rows", "cols", "grid"), [case[:3] for case in [*ORDERS, *GATHER]], ids=NAMES
)
def test_to_reduce_is_the_transpose_of_fetching(rows, cols, grid, first: int, dim: int) -> None:
    """<y, fetch x> = <reduce y, x>, exactly, since x and y hold integers."""
    size = panels(rows, cols, grid.slices) * WIDTH
    x, y = np.random.default_rng(0).integers(-9, 9, (2, size, size)).astype(np.float32)

    def body(x: Array, y: Array) -> Array:
        move, total, fetched = panel_moves(grid, first=first)[1 - dim], None, jnp.zeros(())
        # one partial sum per step, with a panel's shape, different on every device
        for step, panel in enumerate(each_step(move, x, dim)):
            partial_sum = jnp.resize(y * (step + 1), panel.shape)
            fetched = fetched + jnp.vdot(partial_sum, panel)
            total = move.reduce(total, partial_sum, dim, step)
        reduced = jnp.vdot(move.finish(total, dim), x)
        return lax.psum(jnp.stack([fetched, reduced]), (Axis.ROW, Axis.COL))

    fetched, reduced = on_grid(rows, cols, body, jnp.asarray(x), jnp.asarray(y), outs=P())
    assert fetched == reduced != 0


@pytest.mark.parametrize(
    ("size", "grid", "each", "want"),
    [
        (12, (2, 4, 1), 1, 12),
        (13, (2, 4, 1), 1, 16),
        (13, (2, 2, 3), 1, 18),
        (30, (2, 2, 4), 64, 30),  # heads, whose units split into slices as they are
        (30, (4, 2, 1), 64, 32),
        (3, (2, 2, 4), 3, 8),
    ],
)
def test_no_more_is_padded_than_must_be(size: int, grid: tuple, each: int, want: int) -> None:
    """Blocks along both axes are equal, and their units split into panels and slices."""
    assert padded(size, grid, each) == want
    rows, cols, slices = grid
    assert want % rows == want % cols == want * each % (np.lcm(rows, cols) * slices) == 0
