"""A device's part of a sharded array, and how a piece of the array is read from it and written.

Letters: L layers, N size of the dim after that of layers (arrays without layers have L = 1),
R, B rows and size of that dim on a device. A piece is k of the N entries of one layer.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.shapes import Spec

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of a global array `[L, N, ...]`, or a shard of a block that is flattened.

    Args:
        spec: of the global array.
        local: shape of the device's array.
        rows: the row of each layer, counted over all blocks.
        block: `[R, B, ...]`, shape of the block.
        cuts: of each dim of the block, the axes along which devices have different blocks.
        shards: axes along which a flattened block is split; none if it is not flattened.
        is_one_line: whether all rows are flattened into one line; else each row is a line.
    """

    spec: Spec
    local: tuple[int, ...]
    rows: tuple[int, ...]
    block: tuple[int, ...]
    cuts: tuple[Axes, ...]
    shards: Axes = ()
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
        """x -> its lines, with margins of a piece on both sides: room for what lies elsewhere."""
        margin = k * self.width
        return jnp.pad(x.reshape(self.lines, self.line), [(0, 0), (margin, margin)])

    def from_lines(self, lines: Array, k: int) -> Array:
        """Partner of `as_lines`."""
        margin = k * self.width
        return lines[:, margin:-margin].reshape(self.local)

    def read(self, lines: Array, layer: Array, start: Array, shape: tuple[int, ...]) -> Array:
        """The piece `[k, ...]` of this shape, with zeros where other devices hold it."""
        at, mine = self._find(layer, start, shape[0])
        found = lax.dynamic_slice(lines, at, (1, mine.size)).reshape(mine.shape)
        here = jnp.where(mine, found, 0).reshape(shape[0], *self.block[2:])
        zeros = as_varying(jnp.zeros(shape, lines.dtype), varying_axes(lines))
        return lax.dynamic_update_slice(zeros, here, self._inner)

    def write(self, lines: Array, layer: Array, start: Array, piece: Array) -> Array:
        """The lines, with this device's part of the piece `[k, ...]` in its place."""
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

        An int32 may not count the elements of all shards, so entries are subtracted, not elements.
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
        """Where the block begins in a piece; int32 like all indices, with 64-bit numbers, too."""
        return (jnp.int32(0), *self._offsets[2:])

    @property
    def _offsets(self) -> list[Array]:
        """Where the block begins along each dim."""
        return [
            lax.axis_index(axes) * n if axes else jnp.int32(0)
            for n, axes in zip(self.block, self.cuts, strict=True)
        ]
