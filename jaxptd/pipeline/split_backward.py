"""The backward pass of one layer, taken apart: what it keeps, and its two halves.

`jax.vjp` keeps for backward whatever the layer's own rules (`model.remat`) say. What of that the
caller has anyway, parameters above all, is told apart and never kept twice. Where a schedule splits
backward, its program is cut in two: all that the gradient of the input needs, and the rest, which
makes the gradients of parameters later.

Source: Qi et al., arXiv 2401.10241 (the two halves).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
from jax import Array
from jax.extend.core import Literal

from jaxptd.pipeline.model import LayerInputs

# Equations that only call, and where they hold the program that they call.
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


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A layer, `run(params, inputs, x) -> x`, with its backward pass.

    Args:
        run: the layer; its parameters and x get gradients, `inputs` do not.
        tree: how what backward needs is put together again.
        flat: the program that makes what backward needs, without calls.
        kept: of each array that backward needs, whether it must be kept; else it is a
            parameter, an input, or computed from inputs alone: positions, masks.
    """

    run: Callable[[Any, Any, Array], Array]
    tree: Any
    flat: Any
    kept: tuple[bool, ...]

    def forward(self, params: Any, inputs: LayerInputs, x: Array) -> tuple[Array, list[Array]]:
        """The result, and what to keep."""
        y, leaves, _ = _vjp(self.run, params, inputs, x)
        return y, [leaf for leaf, kept in zip(leaves, self.kept, strict=True) if kept]

    def backward(self, kept: Sequence[Array], params: Any, inputs: LayerInputs, dy: Array) -> tuple:
        """What was kept, and the gradient of the result -> gradients of params and of x."""
        jaxpr, keep = self.flat.jaxpr, iter(kept)
        made = [var for var, kept in zip(jaxpr.outvars, self.kept, strict=True) if not kept]
        env = dict(zip(jaxpr.invars, jax.tree.leaves((params, inputs)), strict=False))
        env |= dict(zip(jaxpr.constvars, self.flat.consts, strict=True))
        _evaluate(_needed(jaxpr.eqns, made), env)
        leaves = [
            next(keep) if kept else _value(env, var)
            for var, kept in zip(jaxpr.outvars, self.kept, strict=True)
        ]
        return jax.tree.unflatten(self.tree, leaves)(dy)

    def split(self, kept: Sequence[Array], params: Any, inputs: LayerInputs, dy: Array) -> "Halves":
        """The two halves of `backward`, for arguments like these."""

        def program(arguments: tuple, dy: Array) -> tuple:
            kept, params, inputs = arguments
            return self.backward(kept, params, inputs, dy)

        return Halves.of(program, (kept, params, inputs), dy)


def trace_layer(
    run: Callable, params: Any, inputs: LayerInputs, x: Array
) -> tuple[Layer, list[Any]]:
    """The layer for arguments like these, and shapes of what it keeps."""
    tree = None

    def needs(params: Any, inputs: LayerInputs, x: Array) -> list[Array]:
        nonlocal tree
        _, leaves, tree = _vjp(run, params, inputs, x)
        return leaves

    flat, shapes = _flat(needs, params, inputs, x)
    jaxpr, parameters = flat.jaxpr, len(jax.tree.leaves(params))
    computed = {*jaxpr.invars[:parameters], *jaxpr.invars[-1:]}  # what depends on these is kept

    def is_kept(var: Any) -> bool:
        made_of = {v for eqn in _needed(jaxpr.eqns, [var]) for v in eqn.invars if _is_var(v)}
        return var is jaxpr.invars[-1] or not computed.isdisjoint(made_of)

    kept = tuple(_is_var(var) and is_kept(var) for var in jaxpr.outvars)
    return Layer(run, tree, flat, kept), [s for s, k in zip(shapes, kept, strict=True) if k]


def _vjp(
    run: Callable, params: Any, inputs: LayerInputs, x: Array
) -> tuple[Array, list[Array], Any]:
    y, vjp = jax.vjp(lambda params, x: run(params, inputs, x), params, x)
    return y, *jax.tree.flatten(vjp)


# ---- programs, cut in two or to what is needed ------------------------------------------------


def lean(program: Callable, *arguments: Any) -> Any:
    """`program(*arguments)` without what its results do not need, collectives above all."""
    flat, shape = _flat(program, *arguments)
    env = dict(zip(flat.jaxpr.invars, jax.tree.leaves(arguments), strict=True))
    return _read(flat, _needed(flat.jaxpr.eqns, flat.jaxpr.outvars), env, shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Halves:
    """A program `(kept, new) -> (later, now)` in two: one makes `now`, the other then `later`.

    What of `later` takes no product, sums over tokens above all, the first half makes, too: it is
    smaller than what the second would have to be given for it.

    Args:
        flat: the program without calls.
        shape: of its results.
        kept: how many of its arguments are at hand again for the second half.
    """

    flat: Any
    shape: Any
    kept: int

    @classmethod
    def of(cls, program: Callable, kept: Any, new: Any) -> "Halves":
        return cls(*_flat(program, kept, new), len(jax.tree.leaves(kept)))

    @cached_property
    def _parts(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Equations of the first half, of the second, and the variables that pass between them."""
        jaxpr, number = self.flat.jaxpr, len(jax.tree.leaves(self.shape[0]))
        now, later = list(jaxpr.outvars[number:]), list(jaxpr.outvars[:number])
        rest = _without(jaxpr.eqns, _needed(jaxpr.eqns, now))
        now += [var for var in later if not any(map(_is_heavy, _needed(rest, [var])))]
        first = _needed(jaxpr.eqns, now)
        given = _without(first, _of_nothing(jaxpr))
        second = _needed(_without(jaxpr.eqns, given), later)
        made = {var for eqn in given for var in eqn.outvars} | {*jaxpr.invars[self.kept :]}
        used = [var for eqn in second for var in eqn.invars] + later
        passed = dict.fromkeys(v for v in used if _is_var(v) and v in made)
        return first, second, list(passed)

    @property
    def needs(self) -> list[bool]:
        """Of each of the kept arguments, whether the second half reads it."""
        read = {var for eqn in self._parts[1] for var in eqn.invars if _is_var(var)}
        return [var in read for var in self.flat.jaxpr.invars[: self.kept]]

    def now(self, kept: Any, new: Any) -> tuple[Any, list[Array]]:
        """`now`, and what passes to the second half."""
        first, _, passed = self._parts
        env = dict(zip(self.flat.jaxpr.invars, jax.tree.leaves((kept, new)), strict=True))
        now = _read(self.flat, first, env, self.shape, 1)
        return now, [env[var] for var in passed]

    def then(self, kept: Any, passed: Sequence[Array]) -> Any:
        """`later`."""
        _, second, names = self._parts
        env = dict(zip(self.flat.jaxpr.invars, jax.tree.leaves(kept), strict=False))
        env |= dict(zip(names, passed, strict=True))
        return _read(self.flat, second, env, self.shape, 0)


@dataclasses.dataclass(frozen=True)
class Between:
    """Where what the first half passes to the second lies: over what only the first half needs.

    Args:
        places: of each array that passes, the number of the kept one that it lies over, or None.
        shapes: of those that lie over none.
    """

    places: tuple[int | None, ...]
    shapes: list[Any]

    @classmethod
    def over(cls, kept: Sequence[Any], needed: Sequence[bool], passed: Sequence[Any]) -> "Between":
        """By shapes of what is kept, which of it the second half needs, and what passes."""
        free = [i for i, _ in enumerate(kept) if not needed[i]]
        places: list[int | None] = []
        for shape in passed:
            place = next((i for i in free if kept[i] == shape), None)
            places.append(place)
            free = [i for i in free if i != place]
        alone = [s for s, place in zip(passed, places, strict=True) if place is None]
        return cls(tuple(places), alone)

    def part(self, passed: Sequence[Array]) -> tuple[dict[int, Array], list[Array]]:
        """What passes -> by its place over what is kept, and the rest."""
        pairs = list(zip(self.places, passed, strict=True))
        return {i: x for i, x in pairs if i is not None}, [x for i, x in pairs if i is None]

    def join(self, kept: Sequence[Array], rest: Sequence[Array]) -> list[Array]:
        """The inverse, out of all that is kept."""
        alone = iter(rest)
        return [next(alone) if place is None else kept[place] for place in self.places]


def _flat(program: Callable, *arguments: Any) -> tuple[Any, Any]:
    """The program, calls in it written out; and the shape of its results."""
    closed, shape = jax.make_jaxpr(program, return_shape=True)(*arguments)

    def run(*leaves: Array) -> list[Any]:
        env = dict(zip(closed.jaxpr.invars, leaves, strict=True))
        env |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        _evaluate(closed.jaxpr.eqns, env)
        return [_value(env, var) for var in closed.jaxpr.outvars]

    return jax.make_jaxpr(run)(*jax.tree.leaves(arguments)), shape


def _read(
    flat: Any, equations: Sequence[Any], env: dict, shape: Any, number: int | None = None
) -> Any:
    """Runs equations of a program, and makes its results, or one of them, out of what they give."""
    env |= dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    _evaluate(equations, env)
    numbers = jax.tree.unflatten(jax.tree.structure(shape), range(len(flat.jaxpr.outvars)))
    wanted = numbers if number is None else numbers[number]
    return jax.tree.map(lambda i: _value(env, flat.jaxpr.outvars[i]), wanted)


def _evaluate(equations: Sequence[Any], env: dict) -> None:
    """Runs equations; calls are written out, conditionals and loops stay as they are."""
    for eqn in equations:
        arguments = [_value(env, var) for var in eqn.invars]
        if eqn.primitive.name in CALLS:
            results = _call(eqn.params[CALLS[eqn.primitive.name]], arguments)
        else:
            found = eqn.primitive.bind(*arguments, **eqn.params)
            results = found if eqn.primitive.multiple_results else [found]
        env |= dict(zip(eqn.outvars, results, strict=True))


def _call(program: Any, arguments: Sequence[Array]) -> list[Any]:
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    env = dict(zip(jaxpr.invars, arguments, strict=True))
    env |= dict(zip(jaxpr.constvars, consts, strict=True))
    _evaluate(jaxpr.eqns, env)
    return [_value(env, var) for var in jaxpr.outvars]


def _is_var(var: Any) -> bool:
    return not isinstance(var, Literal)


def _value(env: dict, var: Any) -> Any:
    """What a variable stands for."""
    return env[var] if _is_var(var) else var.val


def _is_heavy(equation: Any) -> bool:
    """Whether it is a product, or a loop, which may hold some."""
    return equation.primitive.name in ("dot_general", "scan", "while", "cond")


def _of_nothing(jaxpr: Any) -> list[Any]:
    """Equations that read no argument, as of a device's number: they can be made again anywhere."""
    read, found = {*jaxpr.invars}, []
    for eqn in jaxpr.eqns:
        if read.isdisjoint(var for var in eqn.invars if _is_var(var)):
            found.append(eqn)
        else:
            read |= {*eqn.outvars}
    return found


def _without(equations: Sequence[Any], some: Sequence[Any]) -> list[Any]:
    numbers = {id(eqn) for eqn in some}
    return [eqn for eqn in equations if id(eqn) not in numbers]


def _needed(equations: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Those that the results need, in their order."""
    needed = {var for var in results if _is_var(var)}
    found = []
    for eqn in reversed(equations):
        if not needed.isdisjoint(eqn.outvars):
            needed |= {var for var in eqn.invars if _is_var(var)}
            found.append(eqn)
    return found[::-1]
