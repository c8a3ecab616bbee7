"""Programs for `benchmarks.grid.summa2d`: a pair of products, ours and the peers'.

Letters: M tokens, D model, F hidden.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.layers.tensor_parallel import Matrices
from jaxptd.mesh import SQUARE, Layout, Matmul2D, make_mesh

SLICES = (1, 2, 4)  # of gather
Products = Callable[[Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a pair: tokens, model, hidden."""

    M: int
    D: int
    F: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of x, w1, w2 and the gradient of y."""
        return [(1, self.M, self.D), (self.D, self.F), (self.F, self.D), (1, self.M, self.D)]

    @property
    def flops(self) -> int:
        """FLOPs of two products, and of two in backward for each."""
        return 6 * 2 * self.M * self.D * self.F

    def random(self) -> list[np.ndarray]:
        """Draws standard normal arrays; w1 and w2 are scaled so that h and y are too."""
        rng, lengths = np.random.default_rng(0), (1, self.D, self.F, 1)
        return [
            rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(length))
            for shape, length in zip(self.shapes, lengths, strict=True)
        ]

    def __str__(self) -> str:
        return f"M={self.M}, D={self.D}, F={self.F}"


@jax.jit
def plain(x: Array, w1: Array, w2: Array, dy: Array) -> tuple[Array, ...]:
    """Computes y, dx, dw1, dw2 on one device."""
    y, backward = jax.vjp(lambda x, w1, w2: (x @ w1) @ w2, x, w1, w2)
    return y, *backward(dy)


@dataclasses.dataclass(frozen=True)
class Program:
    """One way to compute x[1, M, D] w1[D, F] w2[F, D] -> y[1, M, D].

    products: takes a device's blocks, or, if `local` is False, whole sharded arrays.
    specs: of x and y, w1, w2. ours: not a peer's.
    """

    name: str
    layout: Layout
    products: Products
    specs: tuple[P, P, P]
    ours: bool = False
    local: bool = True

    def gradients(self, mesh: Mesh) -> Any:
        """Makes the jitted `x, w1, w2, dy -> y, dx, dw1, dw2`; backward begins after all of y."""

        def both(x: Array, w1: Array, w2: Array, dy: Array) -> tuple[Array, ...]:
            y, backward = jax.vjp(self.products, x, w1, w2)
            y, dy = lax.optimization_barrier((y, dy))  # in training dy depends on y
            return y, *backward(dy)

        x, w1, w2 = self.specs
        given, made = (x, w1, w2, x), (x, x, w1, w2)
        if self.local:
            return jax.jit(jax.shard_map(both, mesh=mesh, in_specs=given, out_specs=made))
        lay = partial(jax.tree.map, partial(NamedSharding, mesh))
        return jax.jit(both, in_shardings=lay(given), out_shardings=lay(made))

    def kept(self, mesh: Mesh, arrays: Sequence[Any]) -> int:
        """Bytes of the residuals of `jax.vjp` on a device, between forward and backward."""

        def residuals(*blocks: Array) -> list[Array]:
            return jax.tree.leaves(jax.vjp(self.products, *blocks)[1])

        if self.local:
            whole = P(mesh.axis_names)  # the blocks of all devices, one after the other
            blocks = jax.shard_map(
                lambda *x: [leaf.ravel() for leaf in residuals(*x)],
                mesh=mesh,
                in_specs=self.specs,
                out_specs=whole,
            )
            found = jax.eval_shape(blocks, *arrays)
            return sum(x.size * x.dtype.itemsize for x in found) // mesh.size
        lowered = jax.jit(residuals, in_shardings=self.shardings(mesh)).lower(*arrays)
        laid = zip(lowered.out_info, lowered.compile().output_shardings, strict=True)
        return sum(math.prod(lay.shard_shape(x.shape)) * x.dtype.itemsize for x, lay in laid)

    def shardings(self, mesh: Mesh) -> tuple[NamedSharding, ...]:
        """The shardings of x, w1, w2."""
        return tuple(NamedSharding(mesh, spec) for spec in self.specs)


# ---- the programs ---------------------------------------------------------------------------


def form(name: str, layout: Layout, *, ours: bool, again: bool = False) -> Program:
    """The pair by a form of jaxptd. again: backward gathers the first product's input again."""
    held = make_tensor_parallel(layout)

    def first(x: Array, w1: Array) -> Array:
        (h,) = held.column_parallel(x, [Matrices(w1)])
        return h

    column = jax.checkpoint(first) if again else first

    def products(x: Array, w1: Array, w2: Array) -> Array:
        return held.row_parallel(column(x, w1), w2, 0)

    x = P(None, held.axes.tokens, *held.axes.hidden_spec())
    return Program(
        name,
        layout,
        products,
        (x, P(*held.axes.column_spec(1, 0)), P(*held.axes.row_spec(1, 0))),
        ours,
    )


def grid(algorithm: Matmul2D, rows: int, cols: int, slices: int = 1) -> Program:
    """jaxptd's pair on a grid, everything in blocks."""
    layout = Layout(row=rows, col=cols, matmul2d=algorithm, matmul2d_slices=slices)
    cut = f" in {slices} slices" if slices > 1 else ""
    return form(f"jaxptd {algorithm}{cut}", layout, ours=True)


def gathered(rows: int, cols: int) -> Program:
    """The peer that gathers all blocks, and leaves backward to autodiff."""

    def product(a: Array, b: Array) -> Array:
        a = lax.all_gather(a, "col", axis=a.ndim - 1, tiled=True)
        return a @ lax.all_gather(b, "row", axis=0, tiled=True)

    def products(x: Array, w1: Array, w2: Array) -> Array:
        return product(product(x, w1), w2)

    layout, w = Layout(row=rows, col=cols), P("row", "col")
    return Program("autodiff", layout, products, (P(None, "row", "col"), w, w))


def partitioned(mesh: Mesh) -> Program:
    """The peer of XLA's partitioner: every operand and result is sharded both ways."""
    x_cut, w_cut = P(None, "row", "col"), P("row", "col")
    keep = partial(lax.with_sharding_constraint, shardings=NamedSharding(mesh, x_cut))

    def products(x: Array, w1: Array, w2: Array) -> Array:
        w1, w2 = (lax.with_sharding_constraint(w, NamedSharding(mesh, w_cut)) for w in (w1, w2))
        h = keep(jnp.einsum("BMD,DF->BMF", keep(x), w1))
        return keep(jnp.einsum("BMF,FD->BMD", h, w2))

    layout = Layout(row=mesh.shape["row"], col=mesh.shape["col"])
    return Program("jit", layout, products, (x_cut, w_cut, w_cut), local=False)


def grids(devices: int) -> list[tuple[int, int]]:
    """Rows and columns of the grids that are square, or twice as long as wide."""
    sides = [(rows, devices // rows) for rows in range(2, devices) if devices % rows == 0]
    return [(rows, cols) for rows, cols in sides if rows <= 2 * cols and cols <= 2 * rows]


def programs(devices: int) -> Iterator[Program]:
    """Yields all programs for this number of devices."""
    for rows, cols in grids(devices):
        for slices in SLICES:
            yield grid("gather", rows, cols, slices)
        yield grid("summa", rows, cols)
        for algorithm in SQUARE if rows == cols else ():
            yield grid(algorithm, rows, cols)
        yield gathered(rows, cols)
        yield partitioned(make_mesh(Layout(row=rows, col=cols)))
    line = Layout(tp=devices, sequence_parallel=True)
    yield form("Megatron", line, ours=False)
    yield form("Megatron, gathering again", line, ours=False, again=True)
