"""Matmuls of matrices in blocks on a row x col grid of devices: A B, A B^T, A^T B.

Every operand and result is sharded alike: rows over `row`, columns over `col`. K is the dim that A
B sums over, in panels k = 0, 1, ...

| form  | device (i, j) at each step                                               |
|-------|--------------------------------------------------------------------------|
| A B   | receives A[i, k] and B[k, j], and adds their product                     |
| A B^T | receives B[k, j]; A[i, j] B[k, j]^T is a partial sum of C[i, k], over j  |
| A^T B | receives A[i, k]; A[i, k]^T B[i, j] is a partial sum of C[k, j], over i  |

The derivatives of each form are matmuls of the other two. So backward moves panels again, and only
the operands' local blocks are saved; autodiff would save every panel that arrived.

The algorithm (`matmul/grid.py`) determines how panels move, and in which order. The next step's
panels are in flight during a step's matmul; barriers allow no more than one step ahead.

Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025; van de Geijn and Watts, SUMMA,
1997 (the three forms).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxptd.collectives import alike
from jaxptd.matmul.grid import Grid, PanelMove, panel_moves
from jaxptd.matmul.padding import panels
from jaxptd.matmul.precision import (
    COLUMNS_BY_COLUMNS,
    ROWS_BY_COLUMNS,
    ROWS_BY_ROWS,
    BlockMatmul,
    block_matmul,
)

__all__ = ["Grid", "matmul", "matmul_nt", "matmul_tn", "multiply"]

# ---- the three forms ------------------------------------------------------------------------


def matmul(a: Array, b: Array, grid: Grid, block_matmul: BlockMatmul = block_matmul) -> Array:
    """A B: a[.., M/row, K/col], b[K/row, N/col] -> [.., M/row, N/col].

    Leading dims of a count as rows. b moves in a's precision. Blocks are multiplied by
    `block_matmul` and accumulated in float32 or wider. A gradient is reduced, and returned, in its
    operand's precision.
    """
    a_MK, b_KN = _matrices(a, b, grid)
    return _ab(a_MK, b_KN, grid, block_matmul).reshape(*a.shape[:-1], -1)


def matmul_nt(a: Array, b: Array, grid: Grid, dtype: DTypeLike | None = None) -> Array:
    """A B^T: a[.., M/row, K/col], b[N/row, K/col] -> [.., M/row, N/col].

    Like `matmul`, but each device computes a partial sum over K, and these are reduced in `dtype`,
    the result's precision (default: a's).
    """
    a_MK, b_NK = _matrices(a, b, grid)
    return _abt(a_MK, b_NK, grid, dtype or a.dtype).reshape(*a.shape[:-1], -1)


def matmul_tn(a: Array, b: Array, grid: Grid) -> Array:
    """A^T B: a[.., K/row, M/col], b[.., K/row, N/col] -> [M/row, N/col].

    Like `matmul`, but each device computes a partial sum over K, and these are reduced in a's
    precision.
    """
    return _atb(*_matrices(a, b, grid), grid)


def _matrices(a: Array, b: Array, grid: Grid) -> tuple[Array, Array]:
    """Merges leading dims of both; the matrices vary over the same axes and the grid's."""
    a, b, *_ = alike(a, b, lax.axis_index(grid.row), lax.axis_index(grid.col))
    return a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])


Residuals = tuple[Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _ab(a: Array, b: Array, grid: Grid, block_matmul: BlockMatmul) -> Array:
    return _times(a, b.astype(a.dtype), grid, a.dtype, block_matmul)


def _ab_bwd(grid: Grid, block_matmul: BlockMatmul, residuals: Residuals, dc: Array) -> Residuals:
    a, b, dc = _pin_to_backward(residuals, dc)
    da = _times_transposed(dc, b.astype(a.dtype), grid, a.dtype, partial(block_matmul, gradient=0))
    return da, _transposed_times(a, dc, grid, b.dtype, partial(block_matmul, gradient=1))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _abt(a: Array, b: Array, grid: Grid, dtype: DTypeLike) -> Array:
    return _times_transposed(a, b.astype(a.dtype), grid, dtype)


def _abt_bwd(grid: Grid, dtype: DTypeLike, residuals: Residuals, dc: Array) -> Residuals:
    a, b, dc = _pin_to_backward(residuals, dc.astype(residuals[0].dtype))
    return _times(dc, b.astype(a.dtype), grid, a.dtype), _transposed_times(dc, a, grid, b.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _atb(a: Array, b: Array, grid: Grid) -> Array:
    return _transposed_times(a, b.astype(a.dtype), grid, a.dtype)


def _atb_bwd(grid: Grid, residuals: Residuals, dc: Array) -> Residuals:
    a, b, dc = _pin_to_backward(residuals, dc)
    return _times_transposed(b.astype(a.dtype), dc, grid, a.dtype), _times(a, dc, grid, b.dtype)


def _forward(form: Any, a: Array, b: Array, *options: Any) -> tuple[Array, Residuals]:
    return form(a, b, *options), (a, b)


def _pin_to_backward(residuals: Residuals, dc: Array) -> tuple[Array, Array, Array]:
    """Operands behind barriers, so that XLA moves their panels again.

    Otherwise XLA notices that forward moved the same panels, and keeps them alive until backward. a
    waits for dc; b, a matrix of weights, may move long before.
    """
    a, dc = lax.optimization_barrier((residuals[0], dc))
    return a, lax.optimization_barrier(residuals[1]), dc


_ab.defvjp(partial(_forward, _ab), _ab_bwd)
_abt.defvjp(partial(_forward, _abt), _abt_bwd)
_atb.defvjp(partial(_forward, _atb), _atb_bwd)


def _times(
    a_MK: Array, b_KN: Array, grid: Grid, dtype: DTypeLike, block_matmul: BlockMatmul = block_matmul
) -> Array:
    along_row, along_column = panel_moves(grid)
    wide = jnp.promote_types(dtype, jnp.float32) if along_row.steps > 1 else dtype

    def visit(step: int, total: Any, a_Mk: Array, b_kN: Array) -> Any:
        return total + block_matmul(a_Mk, b_kN, ROWS_BY_COLUMNS, wide)

    return _steps(visit, 0, (along_row, a_MK, 1), (along_column, b_KN, 0)).astype(dtype)


def _times_transposed(
    a_MN: Array, b_KN: Array, grid: Grid, dtype: DTypeLike, block_matmul: BlockMatmul = block_matmul
) -> Array:
    along_row, along_column = panel_moves(grid)

    def visit(step: int, sums: Any, b_kN: Array) -> Any:
        partial_sum = block_matmul(a_MN, b_kN, ROWS_BY_ROWS, dtype)
        return _reduce(along_row, 1, step, sums), partial_sum

    return _finish(along_row, 1, _steps(visit, None, (along_column, b_KN, 0)))


def _transposed_times(
    a_MK: Array, b_MN: Array, grid: Grid, dtype: DTypeLike, block_matmul: BlockMatmul = block_matmul
) -> Array:
    along_row, along_column = panel_moves(grid, first=1)

    def visit(step: int, sums: Any, a_Mk: Array) -> Any:
        partial_sum = block_matmul(a_Mk, b_MN, COLUMNS_BY_COLUMNS, dtype)
        return _reduce(along_column, 0, step, sums), partial_sum

    return _finish(along_column, 0, _steps(visit, None, (along_row, a_MK, 1)))


# ---- steps: panels move one step ahead --------------------------------------------------------


def _steps(visit: Any, total: Any, *moving: tuple[PanelMove, Array, int]) -> Any:
    """Returns `total` after `visit(step, total, *panels)` at each step.

    moving: (move, x, dim of K in x) for each matrix whose panels move.
    """
    steps, matrices = moving[0][0].steps, [x for _, x, _ in moving]
    panels = [move.fetch(x, dim, 0, None) for move, x, dim in moving]
    for step in range(steps - 1):
        ahead = [
            move.fetch(x, dim, step + 1, panel)
            for (move, _, dim), x, panel in zip(moving, matrices, panels, strict=True)
        ]
        total = visit(step, total, *panels)
        total, panels, matrices = lax.optimization_barrier((total, ahead, matrices))
    return visit(steps - 1, total, *panels)


def _reduce(move: PanelMove, dim: int, step: int, sums: Any) -> Any:
    """Adds the partial sum of the step before `step` to the total; sums: (total, partial sum)."""
    if step == 0:
        return None
    total, partial_sum = sums
    return move.reduce(total, partial_sum, dim, step - 1)


def _finish(move: PanelMove, dim: int, sums: Any) -> Array:
    return move.finish(_reduce(move, dim, move.steps, sums), dim)


# ---- global matrices --------------------------------------------------------------------------


def multiply(a: Array, b: Array, mesh: Mesh, grid: Grid) -> Array:
    """A B of global matrices on a mesh: a[.., M, K], b[K, N] -> [.., M, N].

    Operands are zero-padded to sizes that split; the result has no padding.
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
