"""Traced programs as lists of equations, any subset of which can be run by itself."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.extend.core import Literal

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
