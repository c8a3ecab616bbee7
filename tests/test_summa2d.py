"""Matmuls on a grid against dense ones: values, gradients, residuals and communication."""

import dataclasses
import functools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import TOLERANCES, relative
from grid_products import FORMS, PLAIN, Case, both_ways, dense, hold, run
from jax import Array
from turns import by_turns, slow

from jaxptd.config.xla import KERNELS_UNSPLIT, ONE_PERMUTE_AT_A_TIME, PATIENCE
from jaxptd.costs.collective import (
    ALL_GATHER,
    PERMUTE,
)
from jaxptd.matmul.grid import Grid
from jaxptd.summa2d import multiply

# ---- values, gradients, communication -----------------------------------------------------------

SQUARE = [Case(2, 2, Grid(kind)) for kind in ("gather", "summa", "fox", "cannon")]
OBLONG = [Case(*shape, Grid(kind)) for shape in ((2, 4), (4, 2)) for kind in ("gather", "summa")]
SLICED = [Case(2, 4, Grid("gather", 3)), Case(4, 2, Grid("gather", 2), (2,))]
CASES = [*SQUARE, *OBLONG, *SLICED, Case(1, 4, Grid("gather")), Case(4, 1, Grid("summa"))]


@pytest.mark.parametrize(("case", "form"), by_turns(CASES, list(FORMS)), ids=str)
def test_products_are_the_dense_ones_and_move_what_they_should(case: Case, form: str) -> None:
    hold(case, form, "float64")


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *by_turns(SQUARE[1:3], list(FORMS)),
        *(slow(case, form) for case in (SQUARE[0], SQUARE[3], *SLICED) for form in FORMS),
    ],
    ids=str,
)
def test_in_float32_too(case: Case, form: str) -> None:
    hold(dataclasses.replace(case, lead=(2, 3)), form, "float32")


@pytest.mark.parametrize(("kind", "form"), by_turns(["fox", "cannon"], list(FORMS)))
def test_rings_by_all_gathers_bring_the_same(kind: Any, form: str) -> None:
    """CPUs use no permute on a mesh of two stages; the results are equal to the last bit."""
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
from grid_products import FORMS, Case, Grid, hold
for kind, form in itertools.product(sys.argv[2:], FORMS):
    hold(Case(int(sys.argv[1]), int(sys.argv[1]), Grid(kind), (2,)), form, "float64")
print("held")
"""
QUICK, SLOW = (3, "fox", "cannon"), (4, "gather", "summa", "fox", "cannon")


@pytest.mark.slow
@pytest.mark.parametrize("grid", [QUICK, SLOW], ids=str)
def test_grids_of_more_than_eight_devices(grid: tuple) -> None:
    """Runs in a process with 16 devices. On 2 x 2 both directions of a ring are the same."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here / "helpers"), str(here.parent)]),
        "XLA_FLAGS": f"{PATIENCE} {KERNELS_UNSPLIT} {ONE_PERMUTE_AT_A_TIME}",
    }
    command = [sys.executable, "-W", "error", "-c", MANY, *map(str, grid)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "held\n", done.stderr


# ---- residuals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [*SQUARE, *OBLONG, *SLICED], ids=str)
def test_the_operands_own_blocks_are_kept_and_nothing_else(case: Case, form: str) -> None:
    """Each of n devices saves 1/n of what a single one would, and no received panel."""
    kept: list[tuple[int, ...]] = []

    def body(a: Array, b: Array, dc: Array) -> tuple[Array, ...]:
        c, back = jax.vjp(functools.partial(FORMS[form], grid=case.grid), a, b)
        kept.extend(x.shape for x in jax.tree.leaves(back))
        return a, b, c

    inputs = case.inputs(form)
    jax.eval_shape(case.on_mesh(body, *inputs), *inputs)
    back = jax.eval_shape(lambda a, b: jax.vjp(PLAIN[form], a, b)[1], *inputs[:2])
    one_device_config = sum(math.prod(x.shape) for x in jax.tree.leaves(back))
    share = sum(map(math.prod, kept)) / (one_device_config / (case.rows * case.cols))
    assert share == 1.0


# ---- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [SQUARE[0], *map(slow, (*SQUARE[1:], *SLICED))], ids=str)
def test_bfloat16_with_float32_masters(case: Case) -> None:
    """A float32 master's gradient is float32 and never rounded."""
    x, w, dy = case.inputs("A B")
    operands = [jnp.asarray(z, t) for z, t in ((x, "bfloat16"), (w, "float32"), (dy, "bfloat16"))]
    dx, dw, y = jax.jit(both_ways(case, "A B"))(*operands)
    assert (dx.dtype, dw.dtype, y.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    moved = [np.asarray(z.astype(jnp.bfloat16), np.float64) for z in operands]
    want = dense("A B", *moved)
    found = (np.asarray(z, np.float64) for z in (y, dx, dw))
    errors = [relative(*pair) for pair in zip(found, want, strict=True)]
    assert errors[2] <= TOLERANCES["float32"]
    assert errors[0] <= 2**-9  # rounded once, although panels arrive one by one
    assert errors[1] <= 2**-7


# ---- whole matrices ------------------------------------------------------------------------------

UNSPLIT = [*SQUARE[:3], *OBLONG, SLICED[1]]


@pytest.mark.parametrize("case", [SQUARE[3], SLICED[0], *map(slow, UNSPLIT)], ids=str)
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
    """The gradient is exactly zero, not just small."""
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
