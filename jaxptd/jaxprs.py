"""Walking a jaxpr: its equations, and those of the programs inside them."""

from collections.abc import Iterator
from typing import Any


def inside(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds: of a scan its body, of a conditional its branches."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, closed or not, and of those inside it, each once."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in inside(equation):
            yield from equations(inner)
