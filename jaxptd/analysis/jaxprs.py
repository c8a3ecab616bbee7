"""Walking a jaxpr: its equations, and those of the programs inside them."""

from collections.abc import Iterator
from typing import Any


def inside(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds, closed or not: a scan's body, a conditional's branches."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield item


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, closed or not, and of those inside it, each once."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inside(equation):
            yield from equations(inner)


def scans(jaxpr: Any) -> Iterator[Any]:
    """The loops of known length among them."""
    return (each for each in equations(jaxpr) if each.primitive.name == "scan")
