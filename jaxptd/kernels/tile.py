"""Tiles of an array `[R, D]` that a kernel's programs read and write, and calls of kernels.

A program runs groups of 32 threads ("warps"), whose registers hold a tile. Letters: R rows
(tokens), D elements of a row.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.extend.core import Primitive

# ---- instructions of NVIDIA GPUs that Pallas lacks; on other devices, their formula --------------
# XLA's powers and roots also treat numbers below 1e-38 exactly, at the price of three more
# instructions; these flush them to zero. And XLA rounds a product before an addition, in two
# instructions.

LOG2_E = math.log2(math.e)  # exp(x) = 2 ** (x * LOG2_E)


@dataclasses.dataclass(frozen=True)
class Instructions:
    """Single float32 instructions.

    Args:
        interpret: computes the formula instead, on any device.
    """

    interpret: bool

    def exp2(self, x: Array) -> Array:
        """2 to the power of x, to 2 units in the last place."""
        return jnp.exp2(x) if self.interpret else _run("ex2.approx.ftz.f32", x)

    def reciprocal(self, x: Array) -> Array:
        """1 / x, to 1 unit in the last place."""
        return 1 / x if self.interpret else _run("rcp.approx.ftz.f32", x)

    def fma(self, x: Array, y: Array | float, z: Array | float) -> Array:
        """`x y + z`, rounded once."""
        return x * y + z if self.interpret else _run("fma.rn.f32", x, y, z)

    def dot_8_bits(self, x: Array, y: Array) -> Array:
        """x y^T for tiles in 8 bits, float32, by 8-bit tensor cores."""
        if self.interpret:
            return triton.dot(x, y, trans_b=True)
        product: Array = _dot_8_bits().bind(x, y, jnp.zeros((len(x), len(y)), jnp.float32))
        return product


def _run(name: str, *inputs: Array | float) -> Array:
    """Runs an instruction elementwise."""
    shape = jnp.broadcast_shapes(*(jnp.shape(each) for each in inputs))
    (result,) = triton.elementwise_inline_asm(
        f"{name} $0, {', '.join(f'${1 + number}' for number in range(len(inputs)))};",
        args=[jnp.broadcast_to(jnp.asarray(each, jnp.float32), shape) for each in inputs],
        constraints="=f" + ",f" * len(inputs),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return result


@functools.cache
def _dot_8_bits() -> Primitive:
    """The primitive x y^T + z.

    Pallas's own dot asks for float32 inside a tensor core, for which Triton uses 16-bit ones on
    Hopper. Its 8-bit ones keep about 14 bits of a sum, here for up to 128 terms, as DeepSeek-V3
    does (arXiv 2412.19437, section 3.3.2).
    """
    from jax._src.pallas.triton import lowering  # no public name yet

    def lower(_: Any, x: Any, y: Any, z: Any) -> Any:
        dialect = lowering.tt_dialect
        return dialect.dot(x, dialect.trans(y, (1, 0)), z, max_num_imprecise_acc=128)

    primitive = Primitive("dot_8_bits")
    primitive.def_abstract_eval(lambda x, y, z: z)
    lowering.register_lowering(primitive)(lower)
    return primitive


# ---- a kernel over tiles -------------------------------------------------------------------------

Place = tuple[Any, Array | None]  # indices, and which of them exist; None: all


class TilePlaces(NamedTuple):
    """The places of a tile: of its rows, and of their elements."""

    both: Place
    rows: Place
    numbers: Place

    @property
    def repeated(self) -> Place:
        """A tile's places in an array `[D]`; threads read only for their own elements."""
        (row, column), there = self.both
        return jnp.broadcast_to(column, (row.shape[0], column.shape[1])), there

    def of_part(self, part: int) -> Place:
        """The tile in part number `part` of an array `[R, parts, D]`."""
        (row, column), there = self.both
        return (row, part, column), there


@dataclasses.dataclass(frozen=True)
class Tile:
    """Neighbouring rows, and neighbouring elements of each.

    Args:
        rows: how many rows.
        width: elements of each, a power of two.
        warps: how many share a tile.
    """

    rows: int
    width: int
    warps: int

    def grid(self, rows: int, size: int) -> tuple[int, int]:
        """The numbers of tiles along rows and along each row."""
        return pl.cdiv(rows, self.rows), pl.cdiv(size, self.width)

    def places(self, row: Any, column: Any, rows: int, size: int) -> TilePlaces:
        """The places of tile (row, column) in an array of `rows` rows of `size` elements."""
        row_R, inside_R = _indices(row, self.rows, rows)
        column_D, inside_D = _indices(column, self.width, size)
        grid = (self.rows, self.width)
        masks = [(inside_R, (0,)), (inside_D, (1,))]
        inside = [lax.broadcast_in_dim(each, grid, dim) for each, dim in masks if each is not None]
        both = inside[0] & inside[-1] if inside else None
        return TilePlaces(
            ((row_R[:, None], column_D[None]), both), (row_R, inside_R), (column_D, inside_D)
        )

    def pieces(self, row: Any, rows: int, size: int) -> list[TilePlaces]:
        """The places of all tiles in a row of them."""
        return [self.places(row, each, rows, size) for each in range(pl.cdiv(size, self.width))]


def _indices(number: Any, each: int, length: int) -> tuple[Array, Array | None]:
    """A tile's indices along a dim of `length` places, and which of them exist."""
    index = number * each + jnp.arange(each)
    return index, index < length if length % each else None


def call(
    kernel: Any,
    inputs: Any,
    shapes: Sequence[Any],
    *,
    grid: tuple[int, ...],
    warps: int,
    interpret: bool,
    over: Mapping[int, int] | None = None,
    stages: int | None = None,
    flops: int = 0,
) -> Any:
    """Runs a kernel; its results vary over the same mesh axes as its inputs.

    Args:
        kernel: a function, or a partial, of references to inputs and results, and of `run`, the
            instructions to use.
        inputs: a tree of arrays.
        shapes: shapes and types of the results.
        grid: numbers of programs.
        warps: per program.
        interpret: runs the kernel's operations one by one, on any device.
        over: inputs that results overwrite, {input's index: result's index}.
        stages: steps of its loops whose operands are in flight.
        flops: of its matmuls, which are counted by them.
    """
    like = jax.typeof(inputs[0]).manual_axis_type
    return pl.pallas_call(
        partial(kernel, run=Instructions(interpret)),
        [jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=like) for s in shapes],
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        cost_estimate=pl.CostEstimate(flops, transcendentals=0, bytes_accessed=0)
        if flops
        else None,
        interpret=interpret,
        input_output_aliases=dict(over or {}),
        name=getattr(kernel, "func", kernel).__name__.removeprefix("_"),
    )(*inputs)


def load(array: Any, places: Place, other: float = 0.0, *, wide: bool = True) -> Array:
    """Reads elements, `other` outside the array; in float32, or if not `wide` in their own type."""
    index, there = places
    instead = None if there is None else other
    values = triton.load(array.at[index], mask=there, other=instead)
    return values.astype(jnp.float32) if wide else values


def store(array: Any, places: Place, values: Array) -> None:
    """Writes elements of an array, in its type."""
    index, there = places
    triton.store(array.at[index], values.astype(array.dtype), mask=there)


def masked(values: Array, place: Place) -> Array:
    """Zeroes values outside the array."""
    return values if place[1] is None else jnp.where(place[1], values, 0.0)
