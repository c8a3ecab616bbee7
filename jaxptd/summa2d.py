"""Products of matrices held in blocks on a row x col grid of devices: A B, A B^T, A^T B.

Every matrix is cut alike: its rows over `row`, its columns over `col`, operand or result. Let K be
the dim that A B sums over, in panels k = 0, 1, ...

| form  | what moves                                                                    |
|-------|-------------------------------------------------------------------------------|
| A B   | at each step device (i, j) gets A[i, k] and B[k, j], and adds their product   |
| A B^T | it gets B[k, j]; its A[i, j] B[k, j]^T is its part of C[i, k], summed over j  |
| A^T B | it gets A[i, k]; its A[i, k]^T B[i, j] is its part of C[k, j], summed over i  |

The derivatives of each form are products of the other two. So backward moves blocks again and
nothing but the operands' own blocks is kept: autodiff would keep every block that arrived.

How panels move, and in which order, is an algorithm's: `spread.py`. What the next step needs is
under way during a step's product; barriers keep it at one step ahead.

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
from jaxptd.matmul.grid import Grid, PanelMove, panel_moves, panels

# ---- the three forms ------------------------------------------------------------------------


def matmul(a: Array, b: Array, grid: Grid) -> Array:
    """A B: a[.., M/row, K/col], b[K/row, N/col] -> [.., M/row, N/col].

    Leading dims of a are rows. b moves in a's precision; products are summed in float32 at least.
    A gradient has the precision of its operand, and devices add their parts of it in that, too.
    """
    a_MK, b_KN = _matrices(a, b, grid)
    return _ab(a_MK, b_KN, grid).reshape(*a.shape[:-1], -1)


def matmul_nt(a: Array, b: Array, grid: Grid, dtype: DTypeLike | None = None) -> Array:
    """A B^T: a[.., M/row, K/col], b[N/row, K/col] -> [.., M/row, N/col].

    As `matmul`, but a device's product is a part of the sum over K: devices add their parts in
    `dtype`, the result's, by default a's.
    """
    a_MK, b_NK = _matrices(a, b, grid)
    return _abt(a_MK, b_NK, grid, dtype or a.dtype).reshape(*a.shape[:-1], -1)


def matmul_tn(a: Array, b: Array, grid: Grid) -> Array:
    """A^T B: a[.., K/row, M/col], b[.., K/row, N/col] -> [M/row, N/col].

    As `matmul`, but a device's product is a part of the sum over K: devices add their parts in a's
    precision.
    """
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
    a, b, dc = _pin_order(kept, dc)
    da = _times_transposed(dc, b.astype(a.dtype), grid, a.dtype)
    return da, _transposed_times(a, dc, grid, b.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _abt(a: Array, b: Array, grid: Grid, dtype: DTypeLike) -> Array:
    return _times_transposed(a, b.astype(a.dtype), grid, dtype)


def _abt_bwd(grid: Grid, dtype: DTypeLike, kept: Kept, dc: Array) -> Kept:
    a, b, dc = _pin_order(kept, dc.astype(kept[0].dtype))
    return _times(dc, b.astype(a.dtype), grid, a.dtype), _transposed_times(dc, a, grid, b.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _atb(a: Array, b: Array, grid: Grid) -> Array:
    return _transposed_times(a, b.astype(a.dtype), grid, a.dtype)


def _atb_bwd(grid: Grid, kept: Kept, dc: Array) -> Kept:
    a, b, dc = _pin_order(kept, dc)
    return _times_transposed(b.astype(a.dtype), dc, grid, a.dtype), _times(a, dc, grid, b.dtype)


def _keep(form: Any, a: Array, b: Array, *how: Any) -> tuple[Array, Kept]:
    return form(a, b, *how), (a, b)


def _pin_order(kept: Kept, dc: Array) -> tuple[Array, Array, Array]:
    """Operands that XLA does not take for forward's, whose spread blocks it would keep for them.

    a is not there before dc is; b, a matrix of weights, may be on its way long before.
    """
    a, dc = lax.optimization_barrier((kept[0], dc))
    return a, lax.optimization_barrier(kept[1]), dc


_ab.defvjp(partial(_keep, _ab), _ab_bwd)
_abt.defvjp(partial(_keep, _abt), _abt_bwd)
_atb.defvjp(partial(_keep, _atb), _atb_bwd)


def _times(a_MK: Array, b_KN: Array, grid: Grid, dtype: DTypeLike) -> Array:
    along_row, along_column = panel_moves(grid)
    wide = jnp.promote_types(dtype, jnp.float32) if along_row.steps > 1 else dtype

    def visit(step: int, total: Any, a_Mk: Array, b_kN: Array) -> Any:
        return total + _dot("mk,kn->mn", a_Mk, b_kN, wide)

    return _steps(visit, 0, (along_row, a_MK, 1), (along_column, b_KN, 0)).astype(dtype)


def _times_transposed(a_MN: Array, b_KN: Array, grid: Grid, dtype: DTypeLike) -> Array:
    along_row, along_column = panel_moves(grid)

    def visit(step: int, sums: Any, b_kN: Array) -> Any:
        part = _dot("mn,kn->mk", a_MN, b_kN, dtype)
        return _collect(along_row, 1, step, sums), part

    return _home(along_row, 1, _steps(visit, None, (along_column, b_KN, 0)))


def _transposed_times(a_MK: Array, b_MN: Array, grid: Grid, dtype: DTypeLike) -> Array:
    along_row, along_column = panel_moves(grid, first=1)

    def visit(step: int, sums: Any, a_Mk: Array) -> Any:
        part = _dot("mk,mn->kn", a_Mk, b_MN, dtype)
        return _collect(along_column, 0, step, sums), part

    return _home(along_column, 0, _steps(visit, None, (along_row, a_MK, 1)))


def _dot(sums: str, a: Array, b: Array, dtype: DTypeLike) -> Array:
    """In `dtype`; hardware adds in float32 at least, whatever it is."""
    return jnp.einsum(sums, a, b, preferred_element_type=dtype)


# ---- steps: what is moved, one ahead ----------------------------------------------------------


def _steps(visit: Any, total: Any, *spread: tuple[PanelMove, Array, int]) -> Any:
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


def _collect(way: PanelMove, dim: int, step: int, sums: Any) -> Any:
    """Sums on their way home, with the parts of the step before `step`."""
    if step == 0:
        return None
    total, part = sums
    return way.collect(total, part, dim, step - 1)


def _home(way: PanelMove, dim: int, sums: Any) -> Array:
    return way.home(_collect(way, dim, way.steps, sums), dim)


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
