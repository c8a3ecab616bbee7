"""Which equations of a jaxpr need what others make."""

from typing import Any


def needs(body: Any, first: Any) -> list[Any]:
    """The equations of a jaxpr that need a result of another one."""
    return reading(body, {*first.outvars})


def reading(body: Any, made: set[Any]) -> list[Any]:
    """The equations of a jaxpr that need any of these variables."""
    found = []
    for each in body.eqns:
        if not made.isdisjoint(x for x in each.invars if not hasattr(x, "val")):
            made |= {*each.outvars}
            found.append(each)
    return found
