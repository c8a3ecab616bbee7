"""Traces training steps, and walks jaxprs: their equations, and those of the jaxprs inside them."""

from collections.abc import Iterator
from typing import Any

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


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, closed or not, and of the jaxprs inside it, each once."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inside(equation):
            yield from equations(inner)


def scans(jaxpr: Any) -> Iterator[Any]:
    """The scans among those equations."""
    return (each for each in equations(jaxpr) if each.primitive.name == "scan")
