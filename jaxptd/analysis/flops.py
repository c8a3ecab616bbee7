"""FLOPs that a training step executes, counted in its jaxpr with loops multiplied in."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxptd.analysis.jaxprs import inside
from jaxptd.step import Program


def executed(program: Program, weigh: Callable[[Any], int]) -> int:
    """The sum of `weigh(equation)` over all that a step executes, all stages of a pipeline added.

    Of a conditional all branches count.
    """
    return sum(times * weigh(equation) for equation, times, _ in executions(program))


def executions(program: Program) -> Iterator[tuple[Any, int, str]]:
    """Every equation of a step, how often it runs, and the names of the scopes it stands in."""
    step: Any = program.train_step
    jaxpr = step.trace(program.abstract_state, program.abstract_batch).jaxpr.jaxpr
    stages = program.config.layout.pp
    return _executions(jaxpr, stages, "", program.plan.trips if stages > 1 else {})


def _executions(
    jaxpr: Any, times: int, scopes: str, trips: Mapping[str, int]
) -> Iterator[tuple[Any, int, str]]:
    for equation in jaxpr.eqns:
        own = str(equation.source_info.name_stack)
        runs = times * equation.params.get("length", 1)
        if equation.primitive.name == "while":
            runs = trips.get(own.rpartition("/")[2], times)
        yield equation, times, f"{scopes}/{own}"
        for inner in inside(equation):
            yield from _executions(inner, runs, f"{scopes}/{own}", trips)


def is_product(equation: Any) -> int:
    return int(equation.primitive.name == "dot_general")


def flops(equation: Any) -> int:
    """Of a product."""
    return product_flops(equation) if is_product(equation) else 0


def product_flops(equation: Any) -> int:
    """Of a `dot_general`: two for each multiplication."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2 * math.prod(result) * math.prod(left[i] for i in contracted)


def attention_flops(equation: Any) -> int:
    """Of one of cuDNN's causal kernels: two products of scores forward, five backward."""
    name = equation.primitive.name
    if (
        not name.startswith("dot_product_attention_")
        or "causal" not in f"{equation.params}".lower()
    ):
        return 0
    batch, length, heads, size = equation.invars[0].aval.shape
    return (10 if "bwd" in name else 4) * batch * heads * length**2 * size // 2
