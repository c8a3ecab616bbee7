"""Products on a grid against dense ones: values, gradients, residuals and messages."""

import dataclasses
import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import TOLERANCES, relative
from jax import Array
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxptd.analysis.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
    add_up,
    subtract,
)
from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.count import collectives_of
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.config.xla import ONE_PERMUTE_AT_A_TIME, PATIENCE
from jaxptd.matmul.grid import Grid, panels
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.summa2d import matmul, matmul_nt, matmul_tn, multiply

M, K, N = 2, 3, 5  # rows and columns, in the least unit that splits
FORMS: dict[str, Callable] = {"A B": matmul, "A Bt": matmul_nt, "At B": matmul_tn}
SHAPES = {"A B": ((M, K), (K, N)), "A Bt": ((M, K), (N, K)), "At B": ((K, M), (K, N))}
PLAIN: dict[str, Callable] = {
    "A B": jnp.matmul,
    "A Bt": lambda a, b: a @ b.T,
    "At B": lambda a, b: a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1]),
}
# The matrix whose panels are fetched, or whose partial sums are reduced, along a row of devices,
# and along a column: forward, and in the gradients of A and of B.
MOVES = {
    "A B": [("fetch a", "fetch b"), ("reduce a", "fetch b"), ("fetch a", "reduce b")],
    "A Bt": [("reduce c", "fetch b"), ("fetch c", "fetch b"), ("fetch c", "reduce b")],
    "At B": [("fetch a", "reduce c"), ("reduce a", "fetch c"), ("fetch a", "fetch c")],
}


def dense(form: str, a: np.ndarray, b: np.ndarray, dc: np.ndarray) -> list[np.ndarray]:
    """Product, gradients of a and b; leading dims are more rows."""
    a_2, b_2, dc_2 = (x.reshape(-1, x.shape[-1]) for x in (a, b, dc))
    if form == "A B":
        return [a @ b, dc @ b.T, a_2.T @ dc_2]
    if form == "A Bt":
        return [a @ b.T, dc @ b, dc_2.T @ a_2]
    return [a_2.T @ b_2, b @ dc.T, a @ dc]


@dataclasses.dataclass(frozen=True)
class Case:
    """A grid, how it multiplies, and leading dims of the operands that may have some."""

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
        """a, b and the gradient of the product, global."""
        unit, rng = panels(self.rows, self.cols, self.grid.slices), np.random.default_rng(0)
        (rows, inner), (in_b, out) = ([unit * n for n in dims] for dims in SHAPES[form])
        both = form == "At B"
        shapes = (*self.lead, rows, inner), (*(self.lead if both else ()), in_b, out)
        lead = () if both else self.lead
        shape_c = {"A B": (rows, out), "A Bt": (rows, in_b), "At B": (inner, out)}[form]
        return [rng.standard_normal(shape) for shape in (*shapes, (*lead, *shape_c))]

    def on_mesh(self, body: Callable, *inputs: np.ndarray) -> Callable:
        """Maps `body` over blocks of such arrays; results are blocks without leading dims."""
        ins = tuple(P(*(None,) * (x.ndim - 2), *self.grid.axes) for x in inputs)
        return jax.shard_map(body, mesh=self.mesh, in_specs=ins, out_specs=ins, check_vma=True)


def both_ways(case: Case, form: str) -> Callable:
    """a, b, dc -> da, db, c."""

    def body(a: Array, b: Array, dc: Array) -> tuple[Array, ...]:
        c, back = jax.vjp(functools.partial(FORMS[form], grid=case.grid), a, b)
        return *back(dc), c

    return case.on_mesh(body, *case.inputs(form))


def run(case: Case, form: str, dtype: str) -> tuple[list[np.ndarray], list[Collective], str]:
    """da, db and c; the traced collectives; the compiled program."""
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
    compiled = add_up(collectives_from_hlo(text, sizes))  # XLA joins messages, bytes stay
    saved = sum(c.bytes for c in subtract(moved, compiled))
    if form == "A B":
        assert saved == 0
    else:  # both gradients fetch that of c, and XLA may do it once
        assert 0 <= saved <= sum(c.bytes for c in fetch_c(case, form, itemsize))


# ---- what moves, by formula ---------------------------------------------------------------------


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
        "cannon": (PERMUTE, devices),  # one of them to begin or to end with
    }[case.grid.algorithm]
    hops = count if kind == PERMUTE else devices  # each of a block; else in all of every block
    yield Collective(kind, (axis,), count, hops * size)


# ---- values, gradients, traffic -----------------------------------------------------------------

SQUARE = [Case(2, 2, Grid(kind)) for kind in ("gather", "summa", "fox", "cannon")]
OBLONG = [Case(*shape, Grid(kind)) for shape in ((2, 4), (4, 2)) for kind in ("gather", "summa")]
SLICED = [Case(2, 4, Grid("gather", 3)), Case(4, 2, Grid("gather", 2), (2,))]
CASES = [*SQUARE, *OBLONG, *SLICED, Case(1, 4, Grid("gather")), Case(4, 1, Grid("summa"))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_the_dense_ones_and_move_what_they_should(case: Case, form: str) -> None:
    hold(case, form, "float64")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [*SQUARE, *SLICED], ids=str)
def test_in_float32_too(case: Case, form: str) -> None:
    hold(dataclasses.replace(case, lead=(2, 3)), form, "float32")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["fox", "cannon"])
def test_rings_by_all_gathers_bring_the_same(kind: Any, form: str) -> None:
    """On a mesh of two stages CPUs use no permute; the results are equal to the last bit."""
    permutes, gathers = (Case(2, 2, Grid(kind), (2,), stages) for stages in (1, 2))
    found, moved, _ = run(gathers, form, "float64")
    for x, want in zip(found, run(permutes, form, "float64")[0], strict=True):
        np.testing.assert_array_equal(x, want)
    assert ALL_GATHER in {c.kind for c in moved}
    assert PERMUTE not in {c.kind for c in moved}


def test_a_grid_may_lie_along_any_axes() -> None:
    hold(Case(2, 2, Grid("cannon", row="down", col="across"), (3,)), "A B", "float64")
    hold(Case(2, 4, Grid("summa", row="down", col="across"), (3,)), "At B", "float64")


MANY = """
import itertools, jax, sys
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
from tests.test_summa2d import FORMS, Case, Grid, hold
for kind, form in itertools.product(sys.argv[2:], FORMS):
    hold(Case(int(sys.argv[1]), int(sys.argv[1]), Grid(kind), (2,)), form, "float64")
print("held")
"""
QUICK, SLOW = (3, "fox", "cannon"), (4, "gather", "summa", "fox", "cannon")


@pytest.mark.parametrize("grid", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=str)
def test_grids_of_more_than_eight_devices(grid: tuple) -> None:
    """Runs in a process with 16 devices. On 2 x 2 both directions of a ring are the same."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here / "helpers"), str(here.parent)]),
        "XLA_FLAGS": f"{PATIENCE} {ONE_PERMUTE_AT_A_TIME}",
    }
    command = [sys.executable, "-W", "error", "-c", MANY, *map(str, grid)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "held\n", done.stderr


# ---- what is kept -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [*SQUARE, *OBLONG, *SLICED], ids=str)
def test_the_operands_own_blocks_are_kept_and_nothing_else(case: Case, form: str) -> None:
    """Each of n devices saves one n-th of what a single one would, and no received panel."""
    kept: list[tuple[int, ...]] = []

    def body(a: Array, b: Array, dc: Array) -> tuple[Array, ...]:
        c, back = jax.vjp(functools.partial(FORMS[form], grid=case.grid), a, b)
        kept.extend(x.shape for x in jax.tree.leaves(back))
        return a, b, c

    inputs = case.inputs(form)
    jax.eval_shape(case.on_mesh(body, *inputs), *inputs)
    back = jax.eval_shape(lambda a, b: jax.vjp(PLAIN[form], a, b)[1], *inputs[:2])
    on_one_device = sum(math.prod(x.shape) for x in jax.tree.leaves(back))
    share = sum(map(math.prod, kept)) / (on_one_device / (case.rows * case.cols))
    assert share == 1.0


# ---- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*SQUARE, *SLICED], ids=str)
def test_bfloat16_with_float32_masters(case: Case) -> None:
    """The gradient of a float32 master is float32 and never rounded."""
    x, w, dy = case.inputs("A B")
    operands = [jnp.asarray(z, t) for z, t in ((x, "bfloat16"), (w, "float32"), (dy, "bfloat16"))]
    dx, dw, y = jax.jit(both_ways(case, "A B"))(*operands)
    assert (dx.dtype, dw.dtype, y.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    moved = [np.asarray(z.astype(jnp.bfloat16), np.float64) for z in operands]
    want = dense("A B", *moved)
    found = (np.asarray(z, np.float64) for z in (y, dx, dw))
    errors = [relative(*pair) for pair in zip(found, want, strict=True)]
    assert errors[2] <= TOLERANCES["float32"]
    assert errors[0] <= 2**-9  # rounded once, although panels arrive one after the other
    assert errors[1] <= 2**-7


# ---- whole matrices ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*SQUARE, *OBLONG, *SLICED], ids=str)
def test_sizes_that_do_not_split(case: Case) -> None:
    rng = np.random.default_rng(1)
    a, b, dc = (rng.standard_normal(shape) for shape in ((3, 5, 7), (7, 9), (3, 5, 9)))

    def both(a: Array, b: Array, dc: Array) -> tuple[Array, ...]:
        c, back = jax.vjp(lambda a, b: multiply(a, b, case.mesh, case.grid), a, b)
        return c, *back(dc)

    with jax.enable_x64(True):
        found = jax.jit(both)(a, b, dc)
    for x, want in zip(found, dense("A B", a, b, dc), strict=True):
        assert relative(np.asarray(x), want) <= TOLERANCES["float64"]


@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_padding_gets_no_gradient(case: Case) -> None:
    """There is none, not even a small one."""
    a, b, dc = np.random.default_rng(2).standard_normal((3, 8, 8))
    for x, (rows, cols) in ((a, (6, 5)), (b, (5, 7)), (dc, (6, 7))):
        x[rows:], x[:, cols:] = 0, 0
    body = both_ways(case, "A B")
    with jax.enable_x64(True):
        da, db, c = (np.asarray(x) for x in jax.jit(body)(a, b, dc))
    for x, (rows, cols) in ((da, (6, 5)), (db, (5, 7)), (c, (6, 7))):
        assert x[:rows, :cols].all()
        assert not x[rows:].any()
        assert not x[:, cols:].any()


@pytest.mark.parametrize("kind", ["fox", "cannon"])
def test_algorithms_that_need_a_square_grid_say_so(kind: Any) -> None:
    case = Case(2, 4, Grid(kind))
    with pytest.raises(ValueError, match=f"{kind} needs a square grid, not 2 x 4"):
        jax.eval_shape(both_ways(case, "A B"), *case.inputs("A B"))
