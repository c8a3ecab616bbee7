"""Finds the equations of a jaxpr that depend on others."""

from typing import Any


def needs(body: Any, first: Any) -> list[Any]:
    """The equations of a jaxpr that depend on another equation."""
    return reading(body, {*first.outvars})


def reading(body: Any, made: set[Any]) -> list[Any]:
    """The equations of a jaxpr that depend on any of these variables."""
    found = []
    for each in body.eqns:
        if not made.isdisjoint(x for x in each.invars if not hasattr(x, "val")):
            made |= {*each.outvars}
            found.append(each)
    return found
