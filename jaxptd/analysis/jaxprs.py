"""Traces training steps, and walks jaxprs: their equations, and those of inner jaxprs."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxptd.analysis.hlo.text import USUAL, branches_of
from jaxptd.attention.xla import AT_MOST
from jaxptd.step import Program


def traced(program: Program) -> Any:
    """The training step of a program, traced with abstract arguments."""
    step: Any = program.train_step
    return step.trace(program.abstract_state, program.abstract_batch)


def inside(equation: Any) -> Iterator[Any]:
    """The jaxprs in an equation, closed or not: the body of a scan, the branches of a cond."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield item


def branches(equation: Any, times: int, trips: Mapping[str, int]) -> Iterator[tuple[Any, int]]:
    """The jaxprs in an equation, each with its executions.

    Args:
        equation: one whose jaxprs are executed `times` times; of a conditional whose scope is not
            known, the usual branch.
        times: executions, added up over the stages of a pipeline.
        trips: executions of a pipeline's conditionals, in the form of `Plan.trips`.
    """
    scope = str(equation.source_info.name_stack).rpartition("/")[2]
    known: Mapping[int, int] = {}
    if equation.primitive.name == "cond":
        known = branches_of(scope, trips) or {USUAL: times}
    for number, inner in enumerate(inside(equation)):
        yield inner, known.get(number, 0) if known else times


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, closed or not, and of the jaxprs inside it, each once."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inside(equation):
            yield from equations(inner)


def scans(jaxpr: Any) -> Iterator[Any]:
    """The scans among these equations."""
    return (each for each in equations(jaxpr) if each.primitive.name == "scan")


# ---- FLOPs ---------------------------------------------------------------------------------------
# Counts a training step's FLOPs in its jaxpr, multiplied by the lengths of loops.


def executed(program: Program, weigh: Callable[[Any], int]) -> int:
    """The sum of `weigh(equation)` over a step and over a pipeline's stages.

    Of a conditional the usual branch counts; those of a pipeline's executor as often as they run.
    """
    return sum(times * weigh(equation) for equation, times, _ in executions(program))


def executions(program: Program) -> Iterator[tuple[Any, int, str]]:
    """Every equation of a step, how often it runs, and the names of the scopes around it."""
    jaxpr = traced(program).jaxpr.jaxpr
    return _executions(jaxpr, program.config.layout.pp, "", program.resolved.trips)


def _executions(
    jaxpr: Any, times: int, scopes: str, trips: Mapping[str, int]
) -> Iterator[tuple[Any, int, str]]:
    for equation in jaxpr.eqns:
        scope = str(equation.source_info.name_stack)
        runs = times * equation.params.get("length", 1)
        if equation.primitive.name == "while":
            name = scope.rpartition("/")[2]
            runs = trips.get(name, times * _most_trips(name))
        yield equation, times, f"{scopes}/{scope}"
        if equation.primitive.name == KERNEL:  # counted by what it says of itself
            continue
        for inner, number in branches(equation, runs, trips):
            yield from _executions(inner, number, f"{scopes}/{scope}", trips)


def _most_trips(scope: str) -> int:
    """The largest number of trips of a loop whose scope says it; otherwise one is counted."""
    most = re.fullmatch(re.escape(AT_MOST).replace(r"\{\}", r"(\d+)"), scope)
    return int(most[1]) if most else 1


PRODUCTS = ("dot_general", "ragged_dot_general")
KERNEL = "pallas_call"


def is_product(equation: Any) -> int:
    """1 for a matmul, also one by a kernel of our own, else 0."""
    return int(equation.primitive.name in PRODUCTS or _flops_of_kernel(equation) > 0)


def _flops_of_kernel(equation: Any) -> int:
    """FLOPs of the matmuls that a kernel is."""
    if equation.primitive.name != KERNEL:
        return 0
    estimate = equation.params["cost_estimate"]
    return int(estimate.flops) if estimate else 0


def flops(equation: Any) -> int:
    """FLOPs of an equation; 0 if it is not a matmul."""
    return product_flops(equation) if is_product(equation) else 0


def product_flops(equation: Any) -> int:
    """FLOPs of a matmul: two per multiplication; each row of groups meets the matrix of its own."""
    if equation.primitive.name == KERNEL:
        return _flops_of_kernel(equation)
    if equation.primitive.name == "ragged_dot_general":
        left, result = equation.invars[0].aval, equation.outvars[0].aval
        return 2 * math.prod(left.shape) * int(result.shape[-1])
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2 * math.prod(result) * math.prod(left[i] for i in contracted)


def attention_flops(equation: Any) -> int:
    """FLOPs of cuDNN's kernels: two matmuls of the scores forward, five backward.

    A causal mask leaves half of the scores, or a band as wide as the window.
    """
    name = equation.primitive.name
    if not name.startswith("dot_product_attention_"):
        return 0
    batch, length, heads, size = equation.invars[0].aval.shape
    seen = length * equation.invars[1].aval.shape[1]
    if "causal" in f"{equation.params}".lower():
        window = min(equation.params.get("sliding_window_length") or length, length)
        seen = length * window - window**2 // 2
    return (10 if "bwd" in name else 4) * batch * heads * seen * size
