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
from jax.typing import DTypeLike

from jaxptd.collectives import alike, traced_for_gpus
from jaxptd.errors import UserError
from jaxptd.fields.checks import checked
from jaxptd.kernels.rounding import BLOCK, CAPABILITY, Operand, in_blocks
from jaxptd.kernels.tile import Instructions, call

GroupedKernel = Literal["triton", "xla"]
GroupedPrecision = Literal["native", "fp8"]


@dataclasses.dataclass(frozen=True)
class GroupTile:
    """Sizes of what a program computes, all powers of two; at most 128 in fp8.

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


TILE, TILE_FP8 = GroupTile(), GroupTile(depth=BLOCK)  # not tuned yet


@checked("jaxptd.grouped_matmul")
def grouped_matmul(
    x: Array | np.ndarray,
    w: Array | np.ndarray,
    sizes: Array | np.ndarray,
    *,
    kernel: GroupedKernel | None = None,
    precision: GroupedPrecision = "native",
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
        precision: native multiplies in x's type. fp8 rounds x, w and the result's gradient to 8
            bits (e4m3), with a scale for each 128 columns of a row and each 128 x 128 block of a
            matrix; x is saved for backward in 8 bits.

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

    Source: Gale et al., MegaBlocks, arXiv 2211.15841; fp8: DeepSeek-AI, arXiv 2412.19437, 3.3.
    """
    _check(x, w, sizes)
    x_RD, w_GDF, sizes_G = (jnp.asarray(each) for each in (x, w, sizes))
    obstacle = _obstacle(x_RD, precision)
    if kernel == "triton" and obstacle:
        raise UserError(f"jaxptd.grouped_matmul: kernel=triton: {obstacle}; leave kernel out")
    tile = TILE if precision == "native" else TILE_FP8
    by_xla = kernel == "xla" or obstacle
    return multiplied(x_RD, w_GDF, sizes_G, None if by_xla else tile, precision)


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


def _obstacle(x_RD: Array, precision: GroupedPrecision) -> str | None:
    """Why our kernels cannot multiply x; None if they can."""
    if x_RD.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"it has float32, bfloat16 and float16, not {x_RD.dtype}"
    if not TILE.interpret and not _on_gpus():
        return "it needs NVIDIA GPUs"
    capability = float(getattr(jax.devices()[0], "compute_capability", CAPABILITY))
    if precision == "fp8" and capability < CAPABILITY:
        return f"precision=fp8 needs compute capability {CAPABILITY}, not {capability}"
    return None


def _on_gpus() -> bool:
    """True if the surrounding shard_map is over GPUs, or, outside one, if JAX uses GPUs."""
    inside = jax.sharding.get_abstract_mesh().abstract_device is not None
    return traced_for_gpus() if inside else jax.default_backend() == "gpu"


# ---- the three products --------------------------------------------------------------------------


def multiplied(
    x_RD: Array,
    w_GDF: Array,
    sizes_G: Array,
    tile: GroupTile | None,
    precision: GroupedPrecision = "native",
) -> Array:
    """`grouped_matmul` by the kernels, with tiles of this size, or by XLA if `tile` is None."""
    nothing = not math.prod(x_RD.shape) or not w_GDF.size
    if nothing or (tile is None and precision == "native"):
        return lax.ragged_dot(x_RD, w_GDF, sizes_G)
    return _product(*alike(x_RD, w_GDF, sizes_G.astype(jnp.int32)), tile, precision)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(
    x_RD: Array, w_GDF: Array, sizes_G: Array, tile: GroupTile | None, precision: GroupedPrecision
) -> Array:
    return _product_fwd(x_RD, w_GDF, sizes_G, tile, precision)[0]


def _product_fwd(
    x_RD: Array, w_GDF: Array, sizes_G: Array, tile: GroupTile | None, precision: GroupedPrecision
) -> tuple[Array, Any]:
    if precision == "native":
        x, w, transposed = Operand(x_RD), Operand(w_GDF), False
    else:  # Hopper multiplies 8 bits only of operands whose contracted dim is their last
        x, w, transposed = in_blocks(x_RD, 1), in_blocks(w_GDF.mT, BLOCK), True
    y_RF = _times(x, w, sizes_G, tile, x_RD.dtype, transposed=transposed)
    return y_RF, (x, w_GDF, sizes_G)


def _product_bwd(
    tile: GroupTile | None, precision: GroupedPrecision, saved: Any, dy_RF: Array
) -> tuple[Array, Array, None]:
    x, w_GDF, sizes_G = saved
    if precision == "native":
        dy, w = Operand(dy_RF), Operand(w_GDF)
    else:
        dy, w = in_blocks(dy_RF, 1), in_blocks(w_GDF, BLOCK)
    dx_RD = _times(dy, w, sizes_G, tile, dy_RF.dtype, transposed=True)
    return dx_RD, _outer(x, dy, w_GDF, sizes_G, tile), None


_product.defvjp(_product_fwd, _product_bwd)


def _times(
    x: Operand,
    w: Operand,
    sizes_G: Array,
    tile: GroupTile | None,
    dtype: DTypeLike,
    *,
    transposed: bool,
) -> Array:
    """x[R, D] times w[G, D, F], or with `transposed` w[G, F, D]: -> [R, F]."""
    if tile is None:
        w_GDF = w.values(BLOCK).mT if transposed else w.values(BLOCK)
        return lax.ragged_dot(
            x.values(1), w_GDF, sizes_G, preferred_element_type=jnp.float32
        ).astype(dtype)
    rows, columns = len(x.array), w.array.shape[1 if transposed else 2]
    tiles = tiles_of(sizes_G, rows, tile.rows)
    (y,) = call(
        partial(_times_kernel, tile=tile, transposed=transposed),
        (tiles, x, w),
        [jax.ShapeDtypeStruct((rows, columns), dtype)],
        grid=(pl.cdiv(columns, tile.columns), tiles.shape[1]),
        warps=tile.warps,
        stages=tile.stages,
        flops=2 * x.array.size * columns,
        interpret=tile.interpret,
    )
    return y


OUTER = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def _outer(x: Operand, dy: Operand, w: Array, sizes_G: Array, tile: GroupTile | None) -> Array:
    """The gradient of w[G, D, F]: for each group x[its rows]^T dy[its rows]."""
    if tile is None:
        return lax.ragged_dot_general(
            x.values(1), dy.values(1), sizes_G, OUTER, preferred_element_type=jnp.float32
        ).astype(w.dtype)
    groups, size, columns = w.shape
    ends_G = jnp.minimum(jnp.cumsum(sizes_G), len(x.array))
    bounds = jnp.stack([jnp.pad(ends_G, (1, 0))[:-1], ends_G]).astype(jnp.int32)
    (dw,) = call(
        partial(_outer_kernel, tile=tile),
        (bounds, x, dy),
        [w],
        grid=(pl.cdiv(columns, tile.columns), pl.cdiv(size, tile.rows), groups),
        warps=tile.warps,
        stages=tile.stages,
        flops=2 * x.array.size * columns,
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
    (rows, size), groups = x.array.shape, w.array.shape[0]
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
        x_RD = _read(x.array, (read_R[:, None], depth_D[None]), None, inside_D)
        if transposed:
            w_FD = _read(w.array, (group, column_F[:, None], depth_D[None]), inside_F, inside_D)
            if x.unit is None:
                return total + _dot(x_RD, w_FD, trans_b=True)
            block_F, block_D = column * tile.columns // BLOCK, number * tile.depth // BLOCK
            unit_R = triton.load(x.unit.at[read_R, block_D]) * w.unit[group, block_F, block_D]
            return total + run.dot_8_bits(x_RD, w_FD) * unit_R[:, None]
        w_DF = _read(w.array, (group, depth_D[:, None], column_F[None]), inside_D, inside_F)
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
    inside_D, inside_F = _inside(row_D, x.array.shape[1]), _inside(column_F, dy.array.shape[1])

    def step(number: Any, total: Array) -> Array:
        row_R = first + _part(number, tile.depth)
        inside_R = row_R < end  # for both, since zero times a NaN of another row is NaN
        x_RD = _values(x, (row_R, row_D), inside_R, inside_D, row * tile.rows // BLOCK)
        dy_RF = _values(dy, (row_R, column_F), inside_R, inside_F, column * tile.columns // BLOCK)
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


def _values(x: Any, index: Any, of_rows: Any, of_columns: Any, block: Any) -> Array:
    """A tile of rows, from 8 bits in bfloat16. block: that of its columns."""
    row_R, column_D = index
    x_RD = _read(x.array, (row_R[:, None], column_D[None]), of_rows, of_columns)
    if x.unit is None:
        return x_RD
    unit_R = triton.load(x.unit.at[row_R, block], mask=of_rows, other=0.0)
    return (x_RD.astype(jnp.float32) * unit_R[:, None]).astype(jnp.bfloat16)


def _dot(x: Array, y: Array, **transposed: bool) -> Array:
    """The product of two tiles, added up in float32; float32 is not rounded to 19 bits."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return triton.dot(x, y, precision=precision, **transposed)
