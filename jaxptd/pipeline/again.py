"""What the second half of a split backward computes again, so that the first half need not pass it.

A view (a slice, an array of another shape) of what W has anyway takes no time, but as much memory
as any array if it waits for W. An array named `AGAIN` takes messages, no product: a piece that has
passed around a ring passes once more.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Var

from jaxptd.matmul.ring import AGAIN
from jaxptd.pipeline.programs import is_variable

_VIEWS = {"slice", "dynamic_slice", "reshape", "squeeze", "transpose", "broadcast_in_dim"}
_HEAVY = {"dot_general", "scan", "while", "cond"}
_BARRIER = "optimization_barrier"


def is_heavy(equation: Any) -> bool:
    """True for a matrix product, and for a loop or conditional that may contain some."""
    return equation.primitive.name in _HEAVY


def evaluated_again(
    passed: Sequence[Var], done: Sequence[Any], have: Iterable[Var], of_first: Iterable[Var]
) -> list[Any]:
    """The equations of B with which W makes arrays that it would be passed otherwise.

    A barrier keeps the operands that W needs.

    Args:
        passed: what W reads of B, if it computes nothing again.
        done: B's equations, in their order; but for constants, which W computes anyway.
        have: W's arguments.
        of_first: arguments that only B has.
    """
    maker = {var: eqn for eqn in done for var in eqn.outvars}
    order = {var: i for i, var in enumerate([*of_first, *maker])}
    found: dict[Any, None] = {}
    known, missing = {*have}, {*of_first}
    for var in sorted(passed, key=order.__getitem__):
        variables = _made_of(var, maker, known, missing)
        found |= dict.fromkeys(variables or ())
        known.add(var)
    return _making(found, done)


def _made_of(
    var: Var, maker: Mapping[Var, Any], known: set[Var], missing: set[Var]
) -> list[Var] | None:
    """The variables between `known` ones and this one; None if W cannot make them."""
    found, todo = [], [(var, False)]
    while todo:
        each, is_named = todo.pop()
        if each in missing and each not in known:
            return None
        if each in known or each not in maker:  # of constants there is no maker
            continue
        eqn = maker[each]
        is_named |= eqn.params.get("name") == AGAIN
        if is_heavy(eqn) or not (is_named or eqn.primitive.name in {*_VIEWS, _BARRIER}):
            return None
        found.append(each)
        todo += [(source, is_named) for source in _sources(eqn, each)]
    return found


def _sources(equation: Any, result: Var) -> list[Var]:
    """The variables that a result depends on: of a barrier the operand that it is."""
    read = equation.invars
    if equation.primitive.name == _BARRIER:
        read = [read[equation.outvars.index(result)]]
    return [var for var in read if is_variable(var)]


def _making(variables: Mapping[Var, Any], done: Sequence[Any]) -> list[Any]:
    """The equations that make variables, in their order."""
    found = []
    for eqn in done:
        made = [var for var in eqn.outvars if var in variables]
        if made and eqn.primitive.name == _BARRIER:
            read = [eqn.invars[eqn.outvars.index(var)] for var in made]
            eqn = eqn.replace(invars=read, outvars=made)
        found += [eqn] if made else []
    return found
