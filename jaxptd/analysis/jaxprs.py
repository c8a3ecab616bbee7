"""Traces training steps, and walks jaxprs: their equations, and those of the jaxprs inside them."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxptd.analysis.hlo.text import branches_of
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
        equation: whose jaxprs are executed `times` times; each branch of a conditional, too, unless
            its scope is known.
        times: executions, added up over the stages of a pipeline.
        trips: of a pipeline's conditionals, as `Plan.trips` has them.
    """
    scope = str(equation.source_info.name_stack).rpartition("/")[2]
    known = branches_of(scope, trips) if equation.primitive.name == "cond" else {}
    for number, inner in enumerate(inside(equation)):
        yield inner, known.get(number, 0) if known else times


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, closed or not, and of the jaxprs inside it, each once."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inside(equation):
            yield from equations(inner)


def scans(jaxpr: Any) -> Iterator[Any]:
    """The scans among those equations."""
    return (each for each in equations(jaxpr) if each.primitive.name == "scan")
