"""Test cases of matmuls on a grid: dense results, and formulas of their communication."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from contract import TOLERANCES, relative
from jax import Array
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.count import collectives_of
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
    add_up,
    subtract,
)
from jaxptd.matmul.grid import Grid
from jaxptd.matmul.padding import panels
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.summa2d import matmul, matmul_nt, matmul_tn

M, K, N = 2, 3, 5  # rows and columns, in units of the smallest size that splits
FORMS: dict[str, Callable] = {"A B": matmul, "A Bt": matmul_nt, "At B": matmul_tn}
SHAPES = {"A B": ((M, K), (K, N)), "A Bt": ((M, K), (N, K)), "At B": ((K, M), (K, N))}
PLAIN: dict[str, Callable] = {
    "A B": jnp.matmul,
    "A Bt": lambda a, b: a @ b.T,
    "At B": lambda a, b: a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1]),
}
# The matrix whose panels are fetched, or whose partial sums are reduced, along a row and along a
# column of devices: in forward, and in the gradients of A and B.
MOVES = {
    "A B": [("fetch a", "fetch b"), ("reduce a", "fetch b"), ("fetch a", "reduce b")],
    "A Bt": [("reduce c", "fetch b"), ("fetch c", "fetch b"), ("fetch c", "reduce b")],
    "At B": [("fetch a", "reduce c"), ("reduce a", "fetch c"), ("fetch a", "fetch c")],
}


def dense(form: str, a: np.ndarray, b: np.ndarray, dc: np.ndarray) -> list[np.ndarray]:
    """The result and the gradients of a and b; leading dims count as rows."""
    a_2, b_2, dc_2 = (x.reshape(-1, x.shape[-1]) for x in (a, b, dc))
    if form == "A B":
        return [a @ b, dc @ b.T, a_2.T @ dc_2]
    if form == "A Bt":
        return [a @ b.T, dc @ b, dc_2.T @ a_2]
    return [a_2.T @ b_2, b @ dc.T, a @ dc]


@dataclasses.dataclass(frozen=True)
class Case:
    """A grid, its algorithm, and leading dims for the operands that allow them."""

    rows: int
    cols: int
    grid: Grid
    lead: tuple[int, ...] = ()
    stages: int = 1

    def __str__(self) -> str:
        slices = f"-{self.grid.slices}" if self.grid.slices > 1 else ""
        return f"{self.rows}x{self.cols}-{self.grid.algorithm}{slices}"

    @property
    def mesh(self) -> Mesh:
        if self.grid.row == Axis.ROW:
            return make_mesh(Layout(row=self.rows, col=self.cols, pp=self.stages))
        names = (AxisType.Auto,) * 2
        return jax.make_mesh((self.rows, self.cols), self.grid.axes, axis_types=names)

    def inputs(self, form: str) -> list[np.ndarray]:
        """Global a, b and gradient of the product."""
        unit, rng = panels(self.rows, self.cols, self.grid.slices), np.random.default_rng(0)
        (rows, inner), (in_b, out) = ([unit * n for n in dims] for dims in SHAPES[form])
        both = form == "At B"
        shapes = (*self.lead, rows, inner), (*(self.lead if both else ()), in_b, out)
        lead = () if both else self.lead
        shape_c = {"A B": (rows, out), "A Bt": (rows, in_b), "At B": (inner, out)}[form]
        return [rng.standard_normal(shape) for shape in (*shapes, (*lead, *shape_c))]

    def on_mesh(self, body: Callable, *inputs: np.ndarray) -> Callable:
        """Maps `body` over blocks of these arrays; its results have no leading dims."""
        ins = tuple(P(*(None,) * (x.ndim - 2), *self.grid.axes) for x in inputs)
        return jax.shard_map(body, mesh=self.mesh, in_specs=ins, out_specs=ins, check_vma=True)


def both_ways(case: Case, form: str) -> Callable:
    """a, b, dc -> da, db, c."""

    def body(a: Array, b: Array, dc: Array) -> tuple[Array, ...]:
        c, back = jax.vjp(functools.partial(FORMS[form], grid=case.grid), a, b)
        return *back(dc), c

    return case.on_mesh(body, *case.inputs(form))


def run(case: Case, form: str, dtype: str) -> tuple[list[np.ndarray], list[Collective], str]:
    """Returns da, db and c; the traced collectives; the text of the compiled program."""
    with jax.enable_x64(dtype == "float64"):
        inputs = [jnp.asarray(x, dtype) for x in case.inputs(form)]
        traced = jax.jit(both_ways(case, form)).trace(*inputs)
        compiled = traced.lower().compile(CPU_OPTIONS)
        found = [np.asarray(x) for x in compiled(*inputs)]
    return found, collectives_of(traced.jaxpr, case.mesh), compiled.as_text()


def hold(case: Case, form: str, dtype: str) -> None:
    """Checks value and gradients against the dense ones, and collectives against the formula."""
    found, moved, text = run(case, form, dtype)
    c, da, db = dense(form, *case.inputs(form))
    for name, x, want in zip(("da", "db", "c"), found, (da, db, c), strict=True):
        assert x.dtype == dtype
        assert x.shape == want.shape
        assert relative(x, want) <= TOLERANCES[dtype], name
    itemsize = np.dtype(dtype).itemsize
    assert moved == add_up(formula(case, form, itemsize))
    sizes = {str(axis): size for axis, size in case.mesh.shape.items()}
    compiled = add_up(collectives_from_hlo(text, sizes))  # XLA merges collectives, bytes stay
    saved = sum(c.bytes for c in subtract(moved, compiled))
    if form == "A B":
        assert saved == 0
    else:  # both gradients fetch dc, and XLA may do it once
        assert 0 <= saved <= sum(c.bytes for c in fetch_c(case, form, itemsize))


# ---- communication by formula -------------------------------------------------------------------


def formula(case: Case, form: str, itemsize: int) -> Iterator[Collective]:
    """Collectives of forward and backward."""
    for product in MOVES[form]:
        for dim, move in zip((1, 0), product, strict=True):
            what, name = move.split()
            yield from moves(case, dim, what, block(case, form, name) * itemsize)


def fetch_c(case: Case, form: str, itemsize: int) -> Iterator[Collective]:
    """Collectives that fetch c: gradients of A B^T along a row, of A^T B along a column."""
    dim = 1 if form == "A Bt" else 0
    return moves(case, dim, "fetch", block(case, form, "c") * itemsize)


def block(case: Case, form: str, name: str) -> int:
    """Elements of a, b or c on one device."""
    return case.inputs(form)["abc".index(name)].size // (case.rows * case.cols)


def moves(case: Case, dim: int, what: str, size: int) -> Iterator[Collective]:
    """Collectives that fetch or reduce blocks of `size` bytes along rows (dim 1) or columns."""
    axis, devices = str(case.grid.axes[dim]), (case.rows, case.cols)[dim]
    if devices == 1:
        return
    kind, count = {
        "gather": (ALL_GATHER if what == "fetch" else REDUCE_SCATTER, case.grid.slices),
        "summa": (ALL_REDUCE, math.lcm(case.rows, case.cols)),
        "fox": (ALL_REDUCE, devices) if dim == 1 else (PERMUTE, devices - 1),
        "cannon": (PERMUTE, devices),  # including one that aligns at the start or the end
    }[case.grid.algorithm]
    hops = count if kind == PERMUTE else devices  # a hop moves one block
    yield Collective(kind, (axis,), count, hops * size)
