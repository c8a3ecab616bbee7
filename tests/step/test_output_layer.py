"""A table's gradient is complete before backward leaves the output layer."""

from typing import Any

import jax
import pytest
import tiny
from reading import reading
from turns import slow

from jaxptd.analysis.jaxprs import equations, inside, scans, traced
from jaxptd.mesh import Layout

BARRIER = "optimization_barrier"


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="see collectives.after")
@pytest.mark.parametrize(
    ("layout", "choice", "shapes"),
    [
        (Layout(), {}, [(16, 13)]),
        (Layout(dp=2, tp=2, sequence_parallel=True), {"tie_embeddings": False}, [(16, 7)]),
        (Layout(), {"family": "bert"}, [(13,), (16, 13)]),
        slow(Layout(cp=2), {}, [(16, 13)]),
        slow(Layout(dp=2, zero=3), {"micro_batches": 1}, [(16, 13)]),
        slow(Layout(tp=2), {"family": "llama", "num_kv_heads": 2}, [(16, 7)]),
        slow(Layout(dp=2), tiny.T5, [(16, 13)]),
    ],
    ids=str,
)
def test_layers_wait_for_the_gradients_of_the_output_layer(
    layout: Layout, choice: dict, shapes: list[tuple[int, ...]]
) -> None:
    jaxpr = traced(tiny.program(layout, **choice)).jaxpr
    found = [(body, each) for body in bodies(jaxpr) for each in body.eqns if pairs(each, shapes)]
    assert [each.outvars[1].aval.shape for _, each in found] == shapes
    for body, each in found:
        x, _ = each.outvars
        backward = [loop for loop in reading(body, {x}) if has_reverse_scan(loop)]
        assert backward
        read = {y for one in body.eqns for y in one.invars if not hasattr(y, "val")}
        assert read >= {*each.outvars}


def bodies(jaxpr: Any) -> list[Any]:
    """A jaxpr and those inside it, unwrapped."""
    every = [inner for each in equations(jaxpr) for inner in inside(each)]
    return [getattr(each, "jaxpr", each) for each in every]


def pairs(equation: Any, shapes: list[tuple[int, ...]]) -> bool:
    """True for a barrier on two arrays, the second with one of these shapes."""
    made = equation.outvars
    return equation.primitive.name == BARRIER and len(made) == 2 and made[1].aval.shape in shapes


def has_reverse_scan(equation: Any) -> bool:
    """True for a loop from the last layer to the first, or an equation that contains one."""
    one = [equation] if equation.primitive.name == "scan" else []
    loops = [*one, *(x for inner in inside(equation) for x in scans(inner))]
    return any(each.params["reverse"] for each in loops)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="see collectives.after")
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(Layout(), "bfloat16"), (Layout(row=2, col=2), "float32"), slow(Layout(tp=2), "bfloat16")],
    ids=str,
)
def test_they_wait_for_it_in_the_precision_of_its_last_sum(layout: Layout, dtype: str) -> None:
    """A grid all-reduces it in the output layer; others do so later, with all gradients."""
    jaxpr = traced(tiny.program(layout, dtype="bfloat16")).jaxpr
    table = [(16, 13), (8, 7), (16, 7)]
    *_, found = (each for each in equations(jaxpr) if pairs(each, table))
    assert found.outvars[1].aval.dtype == dtype
