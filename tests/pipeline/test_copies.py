"""Compiled ticks copy no pool and no gradient, and a GPU's host waits as often as counted."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from turns import slow

from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.hlo.text import Pipeline
from jaxptd.analysis.hlo.timeline import host_waits
from jaxptd.pipeline.pools import CONDITIONALS, add, get, loop, put, run_if, run_one
from jaxptd.pipeline.statistics import host_waits as waits_by_formula
from tests.pipeline.test_executor import BATCH, WIDTH, Case, make_arrays, step


def copied_in_loops(compiled: Any) -> list[tuple[int, ...]]:
    """Shapes of the copies within loops, at any depth."""
    text = compiled.as_text()
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    todo = re.findall(r"\bbody=%?([\w.\-]+)", text)
    assert todo
    inside: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in inside:
            inside.add(name)
            called = r"(?:body|condition|calls|to_apply|\w+_computation)=%?([\w.\-]+)"
            todo += re.findall(called, bodies[name])
            for names in re.findall(r"branch_computations=\{(.*?)\}", bodies[name]):
                todo += re.findall(r"[\w.\-]+", names)
    copies = (re.findall(r"= \(?\w+\[([\d,]*)\]\S* copy(?:-start)?\(", bodies[n]) for n in inside)
    return [tuple(int(n) for n in dims.split(",") if n) for each in copies for dims in each]


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", 2, 5, (2, 2)),
        slow(Case("1f1b", 2, 5, (2, 1), recompute=True)),
        slow(Case("1f1b", 2, 5, (2, 2), unroll=True)),
        Case("zb-h1", 2, 5, (2, 2)),
        slow(Case("zb-h1", 2, 5, (2, 2), unroll=True)),
    ],
    ids=str,
)
def test_no_tick_copies_pools_or_gradients(case: Case) -> None:
    """No whole pool, parameter or gradient is copied: the largest copy is an activation.

    Also checks that hosts of GPUs wait as often as the formula says. Older versions of JAX use
    loops, which wait more often.
    """
    arrays = make_arrays(case)
    arguments = arrays._replace(layers=case.held(arrays.layers))
    compiled = step(case).lower(arguments).compile(CPU_OPTIONS)
    largest = max(map(np.prod, copied_in_loops(compiled)))
    assert largest <= BATCH * WIDTH
    if CONDITIONALS:
        pipeline = Pipeline(case.stages, case.plan.trips)
        assert host_waits(compiled.as_text(), pipeline) == waits_by_formula(case.plan).mean()


def make_ticks(choose: Callable) -> Callable:
    """Ticks, each a forward or a backward, on a pool and a sum of gradients."""

    def save(carry: tuple, row: dict) -> tuple:
        x, pool, total = carry
        return jnp.sin(x), put(pool, x, row["slot"]), total

    def back(carry: tuple, row: dict) -> tuple:
        x, pool, total = carry
        return x * get(pool, row["slot"]), pool, add(total, x, row["slot"])

    def run(x: Array, operations: Array) -> tuple:
        def tick(carry: tuple, operation: Array) -> tuple[tuple, None]:
            row = {"save": operation == 1, "back": operation == 2, "slot": operation % 3}
            row = {name: number.astype(jnp.int32) for name, number in row.items()}
            return choose(carry, row, save, back), None

        pools = jnp.zeros((4, *x.shape)), jnp.zeros((4, *x.shape))
        return lax.scan(tick, (x, *pools), operations)[0]

    return run


@pytest.mark.skipif(not CONDITIONALS, reason="XLA then copies what any switch passes through")
def test_a_switch_in_another_order_would_copy_them() -> None:
    """Copies, as the test above looks for, appear if the branch that saves precedes the reader."""

    def switch(order: tuple, carry: tuple, row: dict, save: Callable, back: Callable) -> tuple:
        bodies = {"save": save, "back": back}
        return run_one("some", carry, row, {name: bodies[name] for name in order})

    def a_row(run: Callable, carry: tuple, row: dict, save: Callable, back: Callable) -> tuple:
        return run("back", run("save", carry, row, save), row, back)

    x, operations = jnp.ones((BATCH, WIDTH)), jnp.zeros(6, jnp.int32)
    copied = [
        copied_in_loops(jax.jit(make_ticks(choose)).lower(x, operations).compile(CPU_OPTIONS))
        for choose in (
            *(partial(switch, order) for order in (("save", "back"), ("back", "save"))),
            *(partial(a_row, run) for run in (loop, run_if)),
        )
    ]
    assert [(4, BATCH, WIDTH) in shapes for shapes in copied] == [True, False, False, False]
