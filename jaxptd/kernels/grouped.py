"""A matmul of rows in groups, each with a matrix of its own.

On NVIDIA GPUs three Pallas kernels, for the product, the gradient of its rows and that of its
matrices. XLA has `lax.ragged_dot`, which on NVIDIA GPUs multiplies all rows by all matrices.

A program of the kernels computes a tile whose rows are of one group. At most R / rows + G + 1 tiles
have any, which is a static number; the others end at once. So time follows the rows that exist.

Letters: R rows, G groups, D columns of x, F columns of the result, Q tiles along the rows.
Source: Gale et al., MegaBlocks, arXiv 2211.15841 (blocks of rows, each of one expert).
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxptd.collectives import alike, traced_for_gpus
from jaxptd.errors import UserError
from jaxptd.fields.checks import checked
from jaxptd.kernels.tile import Instructions, call

GroupedKernel = Literal["triton", "xla"]


@dataclasses.dataclass(frozen=True)
class GroupTile:
    """Sizes of what a program computes, all powers of two.

    Args:
        rows: of the result; for the gradient of a matrix, rows of the matrix.
        columns: of the result.
        depth: what a step multiplies: columns of x, or, for the gradient of a matrix, rows.
        warps: groups of 32 threads.
        stages: steps whose operands are in flight.
        interpret: runs the kernels' operations one by one, on any device.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 4
    interpret: bool = False


TILE = GroupTile()  # not tuned yet


@checked("jaxptd.grouped_matmul")
def grouped_matmul(
    x: Array | np.ndarray,
    w: Array | np.ndarray,
    sizes: Array | np.ndarray,
    *,
    kernel: GroupedKernel | None = None,
) -> Array:
    """Multiplies the first sizes[0] rows of x by w[0], the next sizes[1] by w[1], and so on.

    For experts: sort the pairs of a token and its expert by expert, and each expert multiplies its
    own rows. Sums are float32. Rows after the last group are zero in the result and in x's
    gradient, and add nothing to the gradients of matrices, even where they are NaN in x or in the
    gradient of the result. The matrix of a group without rows has the gradient zero.

    Args:
        x: rows `[R, D]`, sorted by group.
        w: a matrix for each group, `[G, D, F]`, of x's type.
        sizes: rows of each group, `[G]`, whole numbers; together at most R, which is checked unless
            they are traced.
        kernel: triton (NVIDIA GPUs; float32, bfloat16 or float16) or xla. None: triton where it can
            run.

    Returns:
        `[R, F]`, in x's type.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxptd
        >>> x, w = jnp.ones((5, 2)), jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
        >>> jaxptd.grouped_matmul(x, w, jnp.array([1, 3]))[:, 0].tolist()
        [1.0, 10.0, 10.0, 10.0, 0.0]

    Raises:
        UserError: shapes, types or sizes do not fit, or the kernel cannot run.

    Source: Gale et al., MegaBlocks, arXiv 2211.15841.
    """
    _check(x, w, sizes)
    x_RD, w_GDF, sizes_G = (jnp.asarray(each) for each in (x, w, sizes))
    obstacle = _obstacle(x_RD)
    if kernel == "triton" and obstacle:
        raise UserError(f"jaxptd.grouped_matmul: kernel=triton: {obstacle}; leave kernel out")
    if kernel == "xla" or obstacle:
        return lax.ragged_dot(x_RD, w_GDF, sizes_G)
    return by_tiles(x_RD, w_GDF, sizes_G, TILE)


def _check(x: Any, w: Any, sizes: Any) -> None:
    shapes = tuple(tuple(each.shape) for each in (x, w, sizes))
    fits = [len(shape) for shape in shapes] == [2, 3, 1]
    if not fits or shapes[0][1] != shapes[1][1] or shapes[1][0] != shapes[2][0]:
        raise UserError(
            f"jaxptd.grouped_matmul: x has shape {shapes[0]}, w {shapes[1]} and sizes {shapes[2]}; "
            "give x[R, D], w[G, D, F] and sizes[G]"
        )
    if x.dtype != w.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(
            f"jaxptd.grouped_matmul: x is {x.dtype} and w {w.dtype}; give both in the same "
            "floating-point type"
        )
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise UserError(f"jaxptd.grouped_matmul: sizes are {sizes.dtype}; give integers")
    if isinstance(sizes, jax.core.Tracer):
        return
    numbers = np.asarray(sizes, np.int64)
    if (numbers < 0).any() or numbers.sum() > len(x):
        raise UserError(
            f"jaxptd.grouped_matmul: sizes from {numbers.min()} to {numbers.max()} add up to "
            f"{numbers.sum()}, but x has {len(x)} rows; use sizes of 0 or more, whose sum is "
            "at most the number of rows"
        )


def _obstacle(x_RD: Array) -> str | None:
    """Why our kernels cannot multiply x; None if they can."""
    if x_RD.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"it has float32, bfloat16 and float16, not {x_RD.dtype}"
    return None if TILE.interpret or _on_gpus() else "it needs NVIDIA GPUs"


def _on_gpus() -> bool:
    """True if the surrounding shard_map is over GPUs, or, outside one, if JAX uses GPUs."""
    inside = jax.sharding.get_abstract_mesh().abstract_device is not None
    return traced_for_gpus() if inside else jax.default_backend() == "gpu"


# ---- the three products --------------------------------------------------------------------------


def by_tiles(x_RD: Array, w_GDF: Array, sizes_G: Array, tile: GroupTile) -> Array:
    """`grouped_matmul` by the kernels, with tiles of this size."""
    if not math.prod(x_RD.shape) or not w_GDF.size:
        return lax.ragged_dot(x_RD, w_GDF, sizes_G)
    return _by_tiles(*alike(x_RD, w_GDF, sizes_G.astype(jnp.int32)), tile)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_tiles(x_RD: Array, w_GDF: Array, sizes_G: Array, tile: GroupTile) -> Array:
    return _times(x_RD, w_GDF, sizes_G, tile, transposed=False)


def _by_tiles_fwd(x_RD: Array, w_GDF: Array, sizes_G: Array, tile: GroupTile) -> tuple[Array, Any]:
    return _by_tiles(x_RD, w_GDF, sizes_G, tile), (x_RD, w_GDF, sizes_G)


def _by_tiles_bwd(tile: GroupTile, saved: Any, dy_RF: Array) -> tuple[Array, Array, None]:
    x_RD, w_GDF, sizes_G = saved
    dx_RD = _times(dy_RF, w_GDF, sizes_G, tile, transposed=True)
    return dx_RD, _outer(x_RD, dy_RF, w_GDF, sizes_G, tile), None


_by_tiles.defvjp(_by_tiles_fwd, _by_tiles_bwd)


def _times(x: Array, w: Array, sizes_G: Array, tile: GroupTile, *, transposed: bool) -> Array:
    """x[R, D] times w[G, D, F], or with `transposed` w[G, F, D]: -> [R, F]."""
    columns = w.shape[1 if transposed else 2]
    tiles = tiles_of(sizes_G, len(x), tile.rows)
    (y,) = call(
        partial(_times_kernel, tile=tile, transposed=transposed),
        (tiles, x, w),
        [jax.ShapeDtypeStruct((len(x), columns), x.dtype)],
        grid=(pl.cdiv(columns, tile.columns), tiles.shape[1]),
        warps=tile.warps,
        stages=tile.stages,
        flops=2 * x.size * columns,
        interpret=tile.interpret,
    )
    return y


def _outer(x: Array, dy: Array, w: Array, sizes_G: Array, tile: GroupTile) -> Array:
    """The gradient of w[G, D, F]: for each group x[its rows]^T dy[its rows]."""
    groups, size, columns = w.shape
    ends_G = jnp.minimum(jnp.cumsum(sizes_G), len(x))
    bounds = jnp.stack([jnp.pad(ends_G, (1, 0))[:-1], ends_G]).astype(jnp.int32)
    (dw,) = call(
        partial(_outer_kernel, tile=tile),
        (bounds, x, dy),
        [w],
        grid=(pl.cdiv(columns, tile.columns), pl.cdiv(size, tile.rows), groups),
        warps=tile.warps,
        stages=tile.stages,
        flops=2 * x.size * columns,
        interpret=tile.interpret,
    )
    return dw


def tiles_of(sizes_G: Array, rows: int, each: int) -> Array:
    """Tiles of rows of one group: for each its group, first row and the end of the group's rows.

    The rows after the last group are a group more, number G. Tiles without rows have an end of 0.

    Args:
        sizes_G: rows of each group.
        rows: R.
        each: rows of a tile.

    Returns:
        int32 `[3, Q]`.
    """
    ends = jnp.minimum(jnp.cumsum(sizes_G), rows)
    ends = jnp.append(ends, rows)  # of the rows of no group
    starts = jnp.pad(ends, (1, 0))[:-1]
    last = jnp.cumsum(-(-(ends - starts) // each))  # tiles up to the end of each group
    tile_Q = jnp.arange((rows + len(ends) * (each - 1)) // each)
    group_Q = (tile_Q[:, None] >= last).sum(-1)
    exists, group_Q = group_Q < len(ends), jnp.minimum(group_Q, len(ends) - 1)
    before_Q = jnp.pad(last, (1, 0))[group_Q]  # tiles of the groups before
    first_Q = starts[group_Q] + (tile_Q - before_Q) * each
    return jnp.stack([group_Q, first_Q, jnp.where(exists, ends[group_Q], 0)]).astype(jnp.int32)


# ---- kernels -------------------------------------------------------------------------------------


def _times_kernel(
    tiles: Any, x: Any, w: Any, y: Any, *, tile: GroupTile, transposed: bool, run: Instructions
) -> None:
    """y[rows of a tile, some columns] = x[these rows] w[group]; zeros if they are of no group."""
    column, number = pl.program_id(0), pl.program_id(1)
    group, first, end = tiles[0, number], tiles[1, number], tiles[2, number]
    (rows, size), groups = x.shape, w.shape[0]
    row_R, column_F = first + jnp.arange(tile.rows), _part(column, tile.columns)
    inside_F = _inside(column_F, y.shape[1])
    read_R = jnp.minimum(row_R, rows - 1)  # those of other groups are computed, but not stored

    def write(values: Array) -> None:
        place = y.at[row_R[:, None], column_F[None]]
        mask = _both(row_R < end, inside_F, values.shape)
        triton.store(place, values.astype(y.dtype), mask=mask)

    def step(number: Any, total: Array) -> Array:
        depth_D = _part(number, tile.depth)
        inside_D = _inside(depth_D, size)
        x_RD = _read(x, (read_R[:, None], depth_D[None]), None, inside_D)
        if transposed:
            w_FD = _read(w, (group, column_F[:, None], depth_D[None]), inside_F, inside_D)
            return total + _dot(x_RD, w_FD, trans_b=True)
        w_DF = _read(w, (group, depth_D[:, None], column_F[None]), inside_D, inside_F)
        return total + _dot(x_RD, w_DF)

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)

    @pl.when((first < end) & (group < groups))
    def _() -> None:
        write(lax.fori_loop(0, pl.cdiv(size, tile.depth), step, zeros))

    @pl.when((first < end) & (group == groups))
    def _() -> None:
        write(zeros)


def _outer_kernel(
    bounds: Any, x: Any, dy: Any, dw: Any, *, tile: GroupTile, run: Instructions
) -> None:
    """dw[group, some rows, some columns] = x[rows of the group]^T dy[rows of the group]."""
    column, row, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first, end = bounds[0, group], bounds[1, group]
    row_D, column_F = _part(row, tile.rows), _part(column, tile.columns)
    inside_D, inside_F = _inside(row_D, x.shape[1]), _inside(column_F, dy.shape[1])

    def step(number: Any, total: Array) -> Array:
        row_R = first + _part(number, tile.depth)
        inside_R = row_R < end  # for both, since zero times a NaN of another row is NaN
        x_RD = _read(x, (row_R[:, None], row_D[None]), inside_R, inside_D)
        dy_RF = _read(dy, (row_R[:, None], column_F[None]), inside_R, inside_F)
        return total + _dot(x_RD, dy_RF, trans_a=True)

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(end - first, tile.depth), step, zeros)
    mask = _both(inside_D, inside_F, total.shape)
    place = dw.at[group, row_D[:, None], column_F[None]]
    triton.store(place, total.astype(dw.dtype), mask=mask)


def _part(number: Any, size: int) -> Array:
    """Indices of part `number` of a dim that is cut into parts of `size`."""
    return number * size + jnp.arange(size)


def _inside(index: Array, size: int) -> Array | None:
    """Mask of the indices of a part that exist in a dim; None if all parts are whole."""
    return index < size if size % len(index) else None


def _both(of_rows: Array | None, of_columns: Array | None, shape: tuple[int, ...]) -> Array | None:
    """The mask of a tile of which only these rows and columns exist."""
    masks = enumerate((of_rows, of_columns))
    known = [lax.broadcast_in_dim(mask, shape, (dim,)) for dim, mask in masks if mask is not None]
    return known[0] & known[-1] if known else None


def _read(array: Any, index: Any, of_rows: Array | None, of_columns: Array | None) -> Array:
    """A tile of an array, with zeros where it does not exist."""
    mask = _both(of_rows, of_columns, jnp.broadcast_shapes(*(jnp.shape(i) for i in index)))
    return triton.load(array.at[index], mask=mask, other=None if mask is None else 0.0)


def _dot(x: Array, y: Array, **transposed: bool) -> Array:
    """The product of two tiles, added up in float32; float32 is not rounded to 19 bits."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return triton.dot(x, y, precision=precision, **transposed)
