"""Converts an array between its canonical and its stored form, a small piece at a time.

Both forms are sharded, each in its own way, and no device should ever hold the whole array. So a
loop goes over pieces: each device writes its part of a piece into a buffer of zeros, the buffers'
bits are summed over devices, and each device keeps what it needs of the sum.

Letters: L layers, N size of the dim after that of layers (arrays without layers have L = 1),
R, B rows and size of that dim on a device. A piece is k of the N entries of one layer.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.params import Stored
from jaxptd.shapes import ParamShape, Spec, axes_in

Shape = tuple[int, ...]
Convert = Callable[[Array], Array]


# ---- what a device holds of an array -------------------------------------------------------------

AxisNames = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of a global array `[L, N, ...]`, or a shard of a block that is flattened.

    Args:
        spec: of the global array.
        local: shape of the device's array.
        rows: the row of each layer, counted over all blocks.
        block: `[R, B, ...]`, shape of the block.
        cuts: for each dim of the block, the axes along which devices hold different blocks.
        shards: axes along which a flattened block is split. Empty if it is not flattened.
        is_one_line: whether all rows are flattened into one line; else each row is a line.
    """

    spec: Spec
    local: tuple[int, ...]
    rows: tuple[int, ...]
    block: tuple[int, ...]
    cuts: tuple[AxisNames, ...]
    shards: AxisNames = ()
    is_one_line: bool = False

    @property
    def lines(self) -> int:
        return 1 if self.is_one_line else self.block[0]

    @property
    def line(self) -> int:
        """Elements of a line on this device."""
        return math.prod(self.local) // self.lines

    @property
    def width(self) -> int:
        """Elements of the block for each of its B entries."""
        return math.prod(self.block[2:])

    def as_lines(self, x: Array, k: int) -> Array:
        """x -> its lines, with a margin of one piece on both sides for what lies elsewhere."""
        margin = k * self.width
        return jnp.pad(x.reshape(self.lines, self.line), [(0, 0), (margin, margin)])

    def from_lines(self, lines: Array, k: int) -> Array:
        """Inverse of `as_lines`."""
        margin = k * self.width
        return lines[:, margin:-margin].reshape(self.local)

    def read(self, lines: Array, layer: Array, start: Array, shape: tuple[int, ...]) -> Array:
        """The piece `[k, ...]` of this shape, with zeros where other devices hold it."""
        at, mine = self._find(layer, start, shape[0])
        piece = lax.dynamic_slice(lines, at, (1, mine.size)).reshape(mine.shape)
        here = jnp.where(mine, piece, 0).reshape(shape[0], *self.block[2:])
        zeros = as_varying(jnp.zeros(shape, lines.dtype), varying_axes(lines))
        return lax.dynamic_update_slice(zeros, here, self._inner)

    def write(self, lines: Array, layer: Array, start: Array, piece: Array) -> Array:
        """The lines with this device's part of the piece `[k, ...]` written in place."""
        at, mine = self._find(layer, start, piece.shape[0])
        shape = (piece.shape[0], *self.block[2:])
        here = lax.dynamic_slice(piece, self._inner, shape).reshape(mine.shape)
        before = lax.dynamic_slice(lines, at, (1, mine.size)).reshape(mine.shape)
        after = jnp.where(mine, here, before)
        return lax.dynamic_update_slice(lines, after.reshape(1, -1), at)

    def _find(self, layer: Array, start: Array, k: int) -> tuple[tuple[Array, Array], Array]:
        """Line and column of a piece, and which of its elements `[k, width]` are in the block."""
        row = jnp.asarray(self.rows, jnp.int32)[layer] - self._offsets[0]
        start -= self._offsets[1]
        rows, size = self.block[:2]
        entries = start + jnp.arange(k, dtype=jnp.int32)
        mine = (row >= 0) & (row < rows) & (entries >= 0) & (entries < size)
        line = jnp.zeros_like(row) if self.is_one_line else jnp.clip(row, 0, rows - 1)
        column = self._column(row * size + start if self.is_one_line else start, k)
        column = jnp.clip(column, 0, self.line + k * self.width)
        return (line, column), jnp.broadcast_to(mine[:, None], (k, self.width))

    def _column(self, entry: Array, k: int) -> Array:
        """The column of an entry of the block's line on this device, counted from its margin.

        Subtracts entries, not elements: int32 may not be able to count the elements of all shards.
        """
        if not self.shards:
            return (entry + k) * self.width
        starts = np.arange(lax.axis_size(self.shards)) * self.line
        entries, rest = np.divmod(starts, self.width)
        shard = lax.axis_index(self.shards)
        entry = entry - jnp.asarray(entries, jnp.int32)[shard]
        entry = jnp.clip(entry, -k - 1, self.line // self.width + 2)
        return (entry + k) * self.width - jnp.asarray(rest, jnp.int32)[shard]

    @property
    def _inner(self) -> tuple[Array, ...]:
        """Where the block begins in a piece; int32, like all indices, even with 64-bit numbers."""
        return (jnp.int32(0), *self._offsets[2:])

    @property
    def _offsets(self) -> list[Array]:
        """Where the block begins along each dim."""
        return [
            lax.axis_index(axes) * n if axes else jnp.int32(0)
            for n, axes in zip(self.block, self.cuts, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Frame:
    """The piece of an array that a device takes part in.

    Args:
        shape: `[L, N, ...]`. Dims that both forms split alike are split; others are whole, with
            the padding of the stored form.
        kept: the axes that split both forms alike.
    """

    shape: Shape
    kept: AxisNames

    def entries(self, *parts: Part) -> int:
        """k of a piece: at most a quarter of a line, because lines have two margins of a piece."""
        line = min(part.line for part in parts)
        return min(max(line // (4 * math.prod(self.shape[2:])), 1), self.shape[1])


def to_canonical(stored: Stored, canonical: ParamShape, mesh: Mesh) -> Convert:
    """A compiled function from the stored form to the canonical form, sharded as `canonical`."""
    frame, held, plain = _forms(stored, canonical, mesh)
    return _compiled(mesh, frame, held, plain)


def from_canonical(stored: Stored, canonical: ParamShape, mesh: Mesh) -> Convert:
    """A compiled function from the canonical form, sharded as `canonical`, to the stored form."""
    frame, held, plain = _forms(stored, canonical, mesh)
    return _compiled(mesh, frame, plain, held)


# Cached: parameters of one shape and their moments share one compiled conversion, as do all saves.
@functools.cache
def _compiled(mesh: Mesh, frame: Frame, source: Part, target: Part) -> Convert:
    specs = P(*source.spec), P(*target.spec)
    body = functools.partial(_convert, frame, source, target)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs[:1], out_specs=specs[1], check_vma=True)
    return jax.jit(mapped)


def _convert(frame: Frame, source: Part, target: Part, x: Array) -> Array:
    """A device's part of one form -> its part of the other."""
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    layers, size, *rest = frame.shape
    k = frame.entries(source, target)
    moved = tuple(axis for axis in _axes(source) if axis not in frame.kept)
    steps = np.array(list(itertools.product(range(layers), range(0, size, k))), np.int32)
    held = source.as_lines(lax.bitcast_convert_type(x, bits), k)

    def move(lines: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
        piece = lax.psum(source.read(held, *step, (k, *rest)), moved)
        return target.write(lines, *step, piece), None

    empty = target.as_lines(jnp.zeros(target.local, bits), k)
    lines, _ = lax.scan(move, as_varying(empty, _axes(target)), tuple(steps.T))
    return lax.bitcast_convert_type(target.from_lines(lines, k), x.dtype)


def _axes(part: Part) -> list[str]:
    """All axes that the array of a part is sharded over."""
    return [axis for axes in axes_in(part.spec) for axis in axes]


@dataclasses.dataclass(frozen=True)
class _Dim:
    """A dim of an array: its size in both forms, and the axes that split it in each.

    Axes of size 1 split nothing and are left out.
    """

    size: int = 1
    padded: int = 1
    axes: AxisNames = ()
    canonical_axes: AxisNames = ()
    in_order: bool = True

    @property
    def kept(self) -> AxisNames:
        """The axes that split it alike in both forms."""
        return self.axes if self.size == self.padded and self.in_order else ()

    @property
    def is_whole(self) -> bool:
        """True if neither form splits or pads it."""
        return self.size == self.padded and not self.axes and not self.canonical_axes


def _forms(stored: Stored, canonical: ParamShape, mesh: Mesh) -> tuple[Frame, Part, Part]:
    """The frame of a device, with its parts of the stored and of the canonical form."""
    dims = _dims(stored.info, canonical, mesh)

    def split(n: int, axes: AxisNames) -> int:
        return n // math.prod(mesh.shape[axis] for axis in axes)

    def local(shape: Shape, spec: Spec) -> Shape:
        return NamedSharding(mesh, P(*spec)).shard_shape(shape)

    layers = split(dims[0].size, dims[0].kept)
    held = Part(
        spec=stored.spec,
        local=local(stored.stored_shape, stored.spec),
        rows=stored.info.rows or tuple(range(layers)),
        block=tuple(split(dim.padded, dim.axes) for dim in dims),
        cuts=tuple(dim.axes[len(dim.kept) :] for dim in dims),
        shards=stored.holders,
        is_one_line=stored.lead == 0,
    )
    plain = Part(
        spec=canonical.spec,
        local=local(canonical.shape, canonical.spec),
        rows=tuple(range(layers)),
        block=tuple(split(dim.size, dim.canonical_axes) for dim in dims),
        cuts=tuple(dim.canonical_axes[len(dim.kept) :] for dim in dims),
    )
    frame = Frame(
        shape=(layers, *(split(dim.padded, dim.kept) for dim in dims[1:])),
        kept=tuple(axis for dim in dims for axis in dim.kept),
    )
    return frame, held, plain


def _dims(info: ParamShape, canonical: ParamShape, mesh: Mesh) -> list[_Dim]:
    """The dims `[L, N, ...]`, at least two; N absorbs following dims that nothing splits."""
    axes, canonical_axes = (
        [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in form.axes_of_dims]
        for form in (info, canonical)
    )
    columns = (info.shape, info.stored_shape, axes, canonical_axes)
    dims = [_Dim(*dim) for dim in zip(*columns, strict=True)]
    if info.stack is None:
        dims.insert(0, _Dim())
    layers, entries, *rest = [*dims, _Dim()]
    while rest and rest[0].is_whole:
        inner = rest.pop(0)
        size, padded = entries.size * inner.size, entries.padded * inner.size
        entries = dataclasses.replace(entries, size=size, padded=padded)
    return [dataclasses.replace(layers, in_order=info.rows is None), entries, *rest]
