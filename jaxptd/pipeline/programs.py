"""Traced programs as lists of equations, any subset of which can be run by itself.

A program that is run in two halves hands arrays from the first to the second. A view (a slice, an
array of another shape) of what the second half has anyway takes no time, but as much memory as any
array if it waits. An array named `AGAIN` takes messages, no product: a block that has passed around
a ring passes once more. `evaluated_again` finds both.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.extend.core import Literal, Var

from jaxptd.matmul.ring import AGAIN

# Primitives that only call another program, and the parameter that holds that program.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
Values = dict[Any, Any]  # of variables
_VIEWS = {"slice", "dynamic_slice", "reshape", "squeeze", "transpose", "broadcast_in_dim"}
_HEAVY = {"dot_general", "scan", "while", "cond"}
_BARRIER = "optimization_barrier"


@dataclasses.dataclass(frozen=True, eq=False)
class FlatProgram:
    """A traced program with its calls inlined.

    Args:
        closed: its closed jaxpr.
        shapes: of its results, a tree.
    """

    closed: Any
    shapes: Any

    @classmethod
    def trace(cls, program: Callable, *arguments: Any) -> "FlatProgram":
        """Traces `program(*arguments)`; conditionals and loops stay as they are."""
        closed, shapes = jax.make_jaxpr(program, return_shape=True)(*arguments)

        def run(*leaves: Array) -> list[Any]:
            values = dict(zip(closed.jaxpr.invars, leaves, strict=True))
            values |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
            evaluate(closed.jaxpr.eqns, values)
            return [value_of(var, values) for var in closed.jaxpr.outvars]

        return cls(jax.make_jaxpr(run)(*jax.tree.leaves(arguments)), shapes)

    @property
    def equations(self) -> list[Any]:
        return self.closed.jaxpr.eqns

    @property
    def arguments(self) -> list[Any]:
        """The variables of its arguments."""
        return self.closed.jaxpr.invars

    @property
    def results(self) -> list[Any]:
        """The variables of its results; a constant result is a `Literal`."""
        return self.closed.jaxpr.outvars

    def bind(self, *arguments: Any) -> Values:
        """The values of its arguments, or of only the first ones, and of its constants."""
        values = dict(zip(self.arguments, jax.tree.leaves(arguments), strict=False))
        return values | dict(zip(self.closed.jaxpr.constvars, self.closed.consts, strict=True))

    def run(self, equations: Sequence[Any], values: Values, element: int | None = None) -> Any:
        """Runs some of its equations, adds to `values`, and returns the results, or one element."""
        evaluate(equations, values)
        numbers = jax.tree.unflatten(jax.tree.structure(self.shapes), range(len(self.results)))
        wanted = numbers if element is None else numbers[element]
        return jax.tree.map(lambda i: value_of(self.results[i], values), wanted)


def run_without_dead_code(program: Callable, *arguments: Any) -> Any:
    """Runs `program(*arguments)`, but no equation that its results do not need.

    So `jax.vjp` of a function with collectives does not run those of its forward pass in vain.
    """
    flat = FlatProgram.trace(program, *arguments)
    return flat.run(needed(flat.equations, flat.results), flat.bind(*arguments))


def evaluate(equations: Sequence[Any], values: Values) -> None:
    """Runs equations and adds their results to `values`; inlines calls only."""
    for eqn in equations:
        arguments = [value_of(var, values) for var in eqn.invars]
        if eqn.primitive.name in CALLS:
            results = _call(eqn.params[CALLS[eqn.primitive.name]], arguments)
        else:
            found = eqn.primitive.bind(*arguments, **eqn.params)
            results = found if eqn.primitive.multiple_results else [found]
        values |= dict(zip(eqn.outvars, results, strict=True))


def _call(program: Any, arguments: Sequence[Array]) -> list[Any]:
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    values = dict(zip(jaxpr.invars, arguments, strict=True))
    values |= dict(zip(jaxpr.constvars, consts, strict=True))
    evaluate(jaxpr.eqns, values)
    return [value_of(var, values) for var in jaxpr.outvars]


def is_variable(atom: Any) -> bool:
    """True if an argument or result of an equation is a variable, not a literal."""
    return not isinstance(atom, Literal)


def value_of(atom: Any, values: Values) -> Any:
    """The value of a variable or literal."""
    return values[atom] if is_variable(atom) else atom.val


def needed(equations: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The equations that these results depend on, in their order."""
    wanted = {var for var in results if is_variable(var)}
    found = []
    for eqn in reversed(equations):
        if not wanted.isdisjoint(eqn.outvars):
            wanted |= {var for var in eqn.invars if is_variable(var)}
            found.append(eqn)
    return found[::-1]


def without(equations: Sequence[Any], some: Sequence[Any]) -> list[Any]:
    """The equations that are not among `some`."""
    excluded = {id(eqn) for eqn in some}
    return [eqn for eqn in equations if id(eqn) not in excluded]


# ---- what a second half computes again ----------------------------------------------------------


def is_heavy(equation: Any) -> bool:
    """True for a matrix product, and for a loop or conditional that may contain some."""
    return equation.primitive.name in _HEAVY


def evaluated_again(
    passed: Sequence[Var], done: Sequence[Any], have: Iterable[Var], of_first: Iterable[Var]
) -> list[Any]:
    """The first half's equations with which the second makes arrays that it would be passed.

    A barrier keeps the operands that the second half needs.

    Args:
        passed: what the second half reads of the first, if it computes nothing again.
        done: the first half's equations, in their order; without constants, which both compute.
        have: arguments of the second half.
        of_first: arguments that only the first half has.
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
    """The variables between `known` ones and this one; None if the second half cannot make them."""
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
