"""Parameters as layers declare them and as formulas count them, in one record.

`Column`, `Row` and the functions below give each parameter's shape, padding, sharding axes, and the
letters by which Muon recognises matrices. Layers make their arrays from these; `plan`, `memory` and
`comms` read them without arrays.
Letters: D model, N heads, K heads of keys and values, H head size, T position, V vocabulary.
"""

import abc
import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from jaxptd.layout import Layout
from jaxptd.matmul.padding import HeadCounts, padded_for, padded_heads
from jaxptd.parts.adapters import Adapter
from jaxptd.parts.specs import Specs
from jaxptd.shapes import ParamShape, Spec

Named = Iterator[tuple[str, ParamShape]]


class HeadShape(NamedTuple):
    """Heads of attention: how many for queries, how many for keys and values, and their size.

    Args:
        queries: N.
        keys: K.
        size: H.
    """

    queries: int
    keys: int
    size: int


class Sharding(abc.ABC):
    """Which axes shard which dim, and how sizes are padded so that they split evenly.

    Attributes:
        axes: which mesh axis shards which dim.
    """

    axes: Specs

    @abc.abstractmethod
    def padded(self, size: int, each: int = 1) -> int:
        """Rounds V, or a dim between a pair of products, up to a size that splits evenly.

        Args:
            size: the dim's size.
            each: columns of the weight per unit of `size`: H for a head, otherwise 1.
        """

    @property
    @abc.abstractmethod
    def inner_devices(self) -> int:
        """The number of devices along `axes.inner`, which share the heads."""

    def padded_hidden(self, size: int) -> int:
        """Rounds D, or the rows of a table of positions, up to a size that splits evenly."""
        return self.padded(size) if self.axes.hidden else size

    def padded_head(self, size: int, unit: int = 1) -> int:
        """Rounds H up to a size that splits evenly in pieces of `unit`, where H is sharded."""
        return unit * self.padded(size // unit, each=unit) if self.axes.head_dim else size


def head_counts(sharding: Sharding, heads: HeadShape) -> HeadCounts:
    """Numbers of heads, padded where each device holds whole ones."""
    if sharding.axes.head_dim:
        return HeadCounts(heads.queries, heads.keys)
    padded = partial(sharding.padded, each=heads.size)
    return padded_heads(heads.queries, heads.keys, devices=sharding.inner_devices, padded=padded)


@dataclasses.dataclass(frozen=True)
class LayoutSharding(Sharding):
    """A layout's sharding, without devices."""

    layout: Layout

    @property
    def axes(self) -> Specs:  # type: ignore[override]
        return Specs.of(self.layout)

    @property
    def inner_devices(self) -> int:
        return self.layout.tp * self.layout.col

    def padded(self, size: int, each: int = 1) -> int:
        return padded_for(self.layout, size, each)


# ---- the matrices of a pair ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Column:
    """A first matmul: `w[D, *out]` and `b[*out]`, sharded over one dim of `out`.

    Args:
        size: D.
        out: a shape.
        dim: the sharded dim of `out`.
        bias: whether there is one.
        padded: that dim with its padding; None: as the layout rounds it up.
        parts: leading dims of `out` that index separate matrices.
        adapter: beside it, or None.
    """

    size: int
    out: tuple[int, ...]
    dim: int = 0
    bias: bool = True
    padded: int | None = None
    parts: int = 0
    adapter: Adapter | None = None

    def parameters(self, sharding: Sharding) -> Named:
        """w, and b and those of an adapter if there are any."""
        dims, vector = len(self.out), self.vector(sharding)
        w = ParamShape(
            (self.size, *self.out),
            (sharding.padded_hidden(self.size), *vector.stored_shape),
            sharding.axes.column_spec(dims, self.dim),
            decay=True,
            cast=True,
            matrix="r" + "s" * self.parts + "c" * (dims - self.parts),
        )
        yield "w", w
        if self.bias:
            yield "b", vector
        if self.adapter:
            over = (sharding.axes.inner,)
            yield from self.adapter.parameters(w, rows=self.rows, parts=self.parts, over=over)

    @property
    def rows(self) -> int:
        """The number of w's dims that are rows."""
        return 1

    def vector(self, sharding: Sharding) -> ParamShape:
        """An element for each column, `[*out]`, sharded as columns are."""
        out = _padded(sharding, self.out, self.dim, self.padded)
        return vector(self.out, sharding.axes.inner_spec(len(self.out), self.dim), out)


@dataclasses.dataclass(frozen=True)
class Row:
    """A second matmul: `w[*in, D]`, sharded over one dim of `in`, and `b[D]`.

    Args:
        inside: the shape `in`.
        size: D.
        dim: the sharded dim of `in`.
        bias: whether there is one.
        padded: that dim with its padding; None: as the layout rounds it up.
        adapter: beside it, or None.
    """

    inside: tuple[int, ...]
    size: int
    dim: int = 0
    bias: bool = True
    padded: int | None = None
    adapter: Adapter | None = None

    def parameters(self, sharding: Sharding) -> Named:
        """w, and b and those of an adapter if there are any."""
        dims, hidden = len(self.inside), sharding.padded_hidden(self.size)
        w = ParamShape(
            (*self.inside, self.size),
            (*_padded(sharding, self.inside, self.dim, self.padded), hidden),
            sharding.axes.row_spec(dims, self.dim),
            decay=True,
            cast=True,
            matrix="r" * dims + "c",
        )
        yield "w", w
        if self.bias:
            yield "b", vector((self.size,), sharding.axes.hidden_spec(), (hidden,))
        if self.adapter:
            yield from self.adapter.parameters(w, rows=dims, over=(sharding.axes.inner,))

    @property
    def rows(self) -> int:
        """The number of w's dims that are rows."""
        return len(self.inside)


def _padded(
    sharding: Sharding, shape: tuple[int, ...], dim: int, padded: int | None
) -> tuple[int, ...]:
    """A shape with `dim` padded; None pads it to split evenly."""
    before, size, after = shape[:dim], shape[dim], shape[dim + 1 :]
    return (*before, padded or sharding.padded(size, each=math.prod(after)), *after)


# ---- the others ----------------------------------------------------------------------------------


def square(sharding: Sharding, size: int, out: int) -> Named:
    """A single matmul of the residual stream: `w[D, D']` and `b[D']`."""
    hidden, spec = sharding.padded_hidden(out), sharding.axes.square_spec()
    yield "w", matrix((size, out), spec, (sharding.padded_hidden(size), hidden))
    yield "b", vector((out,), sharding.axes.hidden_spec(), (hidden,))


def joined(sharding: Sharding, size: int) -> Named:
    """`w[2, D, D]`: matmuls of two arrays shaped like the residual stream, whose sum is another."""
    hidden = sharding.padded_hidden(size)
    spec = (None, *sharding.axes.square_spec())
    shape, stored = (2, size, size), (2, hidden, hidden)
    yield "w", ParamShape(shape, stored, spec, decay=True, cast=True, matrix="src")


def norm(sharding: Sharding, size: int, statistics: int, each: int = 1) -> Named:
    """`w[D]`, and for a norm with a mean `b[D]`.

    Args:
        sharding: the layout's.
        size: D / each.
        statistics: 2 (LayerNorm), 1 (RMSNorm) or 0 (no norm).
        each: neighbouring elements of D that stay together where it is sharded.
    """
    padded = (sharding.padded_hidden(size) * each,)
    info = vector((size * each,), sharding.axes.hidden_spec(), padded)
    yield from (("w", info), ("b", info))[:statistics]


def head_norm(sharding: Sharding, size: int, unit: int) -> Named:
    """`w[H]` of a norm of queries or keys; unit: elements of H that stay together."""
    info = vector((size,), sharding.axes.head_spec(), (sharding.padded_head(size, unit),))
    yield "w", dataclasses.replace(info, over=sharding.axes.head_axes)


def latent_norm(size: int) -> Named:
    """`w[R]` of a norm of latent vectors, whole on every device."""
    yield "w", vector((size,), (None,), (size,))


def vocabulary(sharding: Sharding, rows: int, size: int, padded: int) -> Named:
    """`table[V, D]`; padded: V with padding."""
    shape = (padded, sharding.padded_hidden(size))
    yield "table", matrix((rows, size), sharding.axes.table_spec(), shape)


def vocabulary_bias(sharding: Sharding, rows: int, padded: int) -> Named:
    """`b[V]`; padded: V with padding."""
    yield "b", vector((rows,), sharding.axes.inner_spec(1, 0), (padded,))


def positions(sharding: Sharding, rows: int, size: int) -> Named:
    """`table[T, D]`."""
    shape = (sharding.padded_hidden(rows), sharding.padded_hidden(size))
    yield "table", matrix((rows, size), sharding.axes.position_spec(), shape)


def token_types(sharding: Sharding, types: int, size: int) -> Named:
    """`w[types, D]`, replicated along the axes of a vocabulary."""
    spec, shape = (None, *sharding.axes.hidden_spec()), (types, sharding.padded_hidden(size))
    yield "w", ParamShape((types, size), shape, spec, decay=True, cast=True)


def by_head(sharding: Sharding, rows: int, heads: HeadShape) -> ParamShape:
    """A table `[rows, N]`, sharded as heads are."""
    padded = head_counts(sharding, heads).queries
    return vector((rows, heads.queries), (None, *sharding.axes.by_head_spec()), (rows, padded))


def relative_bias(sharding: Sharding, buckets: int, heads: HeadShape) -> Named:
    """`table[buckets, N]` of biases by distance."""
    info = by_head(sharding, buckets, heads)
    yield "table", dataclasses.replace(info, over=sharding.axes.score_axes)


def vector(shape: tuple[int, ...], spec: Spec, padded: tuple[int, ...]) -> ParamShape:
    """A parameter that is not a matrix: a bias, or a norm's factors."""
    return ParamShape(shape, padded, spec, decay=False)


def matrix(shape: tuple[int, int], spec: Spec, padded: tuple[int, int]) -> ParamShape:
    """A matrix with the dims of its matmul."""
    return ParamShape(shape, padded, spec, decay=True, cast=True, matrix="rc")


def inside(name: str, parameters: Named) -> Named:
    """Prefixes the names of a part's parameters with the part's name."""
    return ((f"{name}.{inner}", info) for inner, info in parameters)
