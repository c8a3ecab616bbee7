"""The backward pass of one layer: what forward saves for it, and its split into B and W.

`jax.vjp` decides, under the layer's own rules (`model.remat`), which arrays backward needs. Those
that the caller has anyway, parameters above all, are recognized and not saved a second time. If a
schedule splits backward, the traced backward program is split in two: *B* computes the gradient of
the layer's input, *W* later those of its weights.

Source: Qi et al., arXiv 2401.10241 (B and W).
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import jax
from jax import Array

from jaxptd.pipeline.model import LayerInputs, X
from jaxptd.pipeline.programs import (
    FlatProgram,
    evaluate,
    evaluated_again,
    is_heavy,
    is_variable,
    needed,
    value_of,
    without,
)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLayer:
    """A layer, `run(params, inputs, x) -> y`, with its backward pass.

    A *residual* is an array that backward needs. Forward saves it, unless it is a parameter or an
    input, or computed from inputs alone (positions, masks).

    Args:
        run: the layer; params and x get gradients, inputs do not.
        tree: the residuals as a tree, which makes a function of them.
        program: (params, inputs, x) -> residuals.
        is_saved: whether forward saves a residual, for each.
    """

    run: Callable[[Any, LayerInputs, X], X]
    tree: Any
    program: FlatProgram
    is_saved: tuple[bool, ...]

    def forward(self, params: Any, inputs: LayerInputs, x: X) -> tuple[X, list[Array]]:
        """(y, the residuals to save)."""
        y, residuals, _ = _vjp(self.run, params, inputs, x)
        return y, [r for r, is_saved in zip(residuals, self.is_saved, strict=True) if is_saved]

    def backward(self, saved: Sequence[Array], params: Any, inputs: LayerInputs, dy: X) -> tuple:
        """(gradients of params, gradient of x)."""
        residuals = list(zip(self.program.results, self.is_saved, strict=True))
        rest = [var for var, is_saved in residuals if not is_saved]
        values, following = self.program.bind(params, inputs), iter(saved)
        evaluate(needed(self.program.equations, rest), values)
        leaves = [
            next(following) if is_saved else value_of(var, values) for var, is_saved in residuals
        ]
        return jax.tree.unflatten(self.tree, leaves)(dy)

    def split(
        self, saved: Sequence[Array], params: Any, inputs: LayerInputs, dy: X
    ) -> "SplitBackward":
        """Splits `backward`, for arguments of these shapes."""

        def backward(arguments: tuple, dy: X) -> tuple:
            saved, params, inputs = arguments
            return self.backward(saved, params, inputs, dy)

        return SplitBackward.trace(backward, (saved, params, inputs), dy)


def trace_layer(
    run: Callable, params: Any, inputs: LayerInputs, x: X
) -> tuple[TracedLayer, list[Any]]:
    """Traces a layer for arguments of these shapes; also the shapes of what its forward saves."""
    tree = None

    def residuals(params: Any, inputs: LayerInputs, x: X) -> list[Array]:
        nonlocal tree
        _, leaves, tree = _vjp(run, params, inputs, x)
        return leaves

    program = FlatProgram.trace(residuals, params, inputs, x)
    parameters, others = len(jax.tree.leaves(params)), len(jax.tree.leaves((params, inputs)))
    of_x = program.arguments[others:]
    differentiated = {*program.arguments[:parameters], *of_x}

    def must_save(var: Any) -> bool:
        used = needed(program.equations, [var])
        sources = {source for eqn in used for source in eqn.invars if is_variable(source)}
        return var in of_x or not differentiated.isdisjoint(sources)

    is_saved = tuple(is_variable(var) and must_save(var) for var in program.results)
    shapes = [s for s, saved in zip(program.shapes, is_saved, strict=True) if saved]
    return TracedLayer(run, tree, program, is_saved), shapes


def _vjp(run: Callable, params: Any, inputs: LayerInputs, x: X) -> tuple[X, list[Array], Any]:
    """(y, the residuals, their tree)."""
    y, vjp = jax.vjp(lambda params, x: run(params, inputs, x), params, x)
    return y, *jax.tree.flatten(vjp)


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBackward:
    """A layer's backward pass as two programs: the gradient of x first, those of params later.

    For y = tanh(x @ a) @ b, where forward saves x and h = tanh(x @ a):

        input_backward    dg = (dy @ b.T) * (1 - h * h)    dx = dg @ a.T    passes dy and dg
        weight_backward   da = x.T @ dg                    db = h.T @ dy

    Gradients of params that need no matrix product, such as a bias's sum over tokens, are computed
    by input_backward, too: each is smaller than what it would have to pass for them. Views of what
    weight_backward has are not passed, see `programs.py`.

    Args:
        program: (arguments, dy) -> (gradients of params, gradient of x).
        arguments: the number of arrays in arguments, which both programs get.
    """

    program: FlatProgram
    arguments: int

    @classmethod
    def trace(cls, backward: Callable, arguments: Any, dy: Any) -> "SplitBackward":
        """Splits `backward(arguments, dy) -> (gradients of params, gradient of x)`."""
        program = FlatProgram.trace(backward, arguments, dy)
        return cls(program, len(jax.tree.leaves(arguments)))

    @cached_property
    def _split(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Equations of input_backward and of weight_backward, and the variables passed."""
        equations, results = self.program.equations, self.program.results
        count = len(jax.tree.leaves(self.program.shapes[0]))
        of_params, of_x = list(results[:count]), list(results[count:])
        rest = without(equations, needed(equations, of_x))
        cheap = [var for var in of_params if not any(map(is_heavy, needed(rest, [var])))]
        first = needed(equations, of_x + cheap)
        done = without(first, self._constant_equations())  # W can evaluate constants again
        later = [eqn for eqn in without(equations, done) if eqn.outvars]
        arguments, dy = self._arguments
        passed = _read(needed(later, of_params), of_params, _made(done) | {*dy})
        again = evaluated_again(passed, done, arguments, dy)
        order = {var: i for i, eqn in enumerate(equations) for var in eqn.outvars}
        later = sorted([*later, *again], key=lambda eqn: order[eqn.outvars[0]])
        second = needed(later, of_params)
        return first, second, _read(second, of_params, _made(done) - _made(again) | {*dy})

    @property
    def _arguments(self) -> tuple[list[Any], list[Any]]:
        """The variables of the arguments of both halves, and of dy."""
        every = self.program.arguments
        return [*every[: self.arguments]], [*every[self.arguments :]]

    def _constant_equations(self) -> list[Any]:
        """Equations that depend on no argument, such as the one for a device's index."""
        variable, found = {*self.program.arguments}, []
        for eqn in self.program.equations:
            if variable.isdisjoint(var for var in eqn.invars if is_variable(var)):
                found.append(eqn)
            else:
                variable |= {*eqn.outvars}
        return found

    @property
    def weight_reads(self) -> list[bool]:
        """For each array of arguments, whether weight_backward reads it."""
        _, second, _ = self._split
        read = {var for eqn in second for var in eqn.invars if is_variable(var)}
        return [var in read for var in self._arguments[0]]

    def input_backward(self, arguments: Any, dy: Any) -> tuple[Any, list[Array]]:
        """(gradient of x, the arrays to pass to weight_backward)."""
        first, _, passed = self._split
        values = self.program.bind(arguments, dy)
        dx = self.program.run(first, values, 1)
        return dx, [values[var] for var in passed]

    def weight_backward(self, arguments: Any, passed: Sequence[Array]) -> Any:
        """The gradients of params."""
        _, second, names = self._split
        values = self.program.bind(arguments) | dict(zip(names, passed, strict=True))
        return self.program.run(second, values, 0)


def _made(equations: Sequence[Any]) -> set[Any]:
    """The variables that equations compute."""
    return {var for eqn in equations for var in eqn.outvars}


def _read(equations: Sequence[Any], results: Sequence[Any], some: Collection[Any]) -> list[Any]:
    """The variables of `some` that equations read, or that are results, each once."""
    read = [var for eqn in equations for var in eqn.invars] + [*results]
    return list(dict.fromkeys(var for var in read if is_variable(var) and var in some))


def _same_rows(x: Any, y: Any) -> bool:
    """True if arrays of these types differ at most in how their rows are counted.

    With rows of another size, as those of heads, loops would convert whole pools between layouts.
    """
    return (x.size, x.dtype, x.manual_axis_type, x.shape[-1:]) == (
        *(y.size, y.dtype, y.manual_axis_type),
        y.shape[-1:],
    )


@dataclasses.dataclass(frozen=True)
class PassedStorage:
    """The slots in which arrays passed from B to W wait: those of saved arrays that only B reads.

    Args:
        replaced: for each passed array, the number of the saved array whose place it takes, or
            None.
        between: shapes of the passed arrays that replace none; they wait in the pool *between*.
        saved, passed: shapes of all saved and of all passed arrays. An array and the one that it
            replaces have the same size, and may have different shapes.
    """

    replaced: tuple[int | None, ...] = ()
    between: Sequence[Any] = ()
    saved: tuple[tuple[int, ...], ...] = ()
    passed: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def plan(
        cls, saved: Sequence[Any], weight_reads: Sequence[bool], passed: Sequence[Any]
    ) -> "PassedStorage":
        """Pairs each passed array with a saved one of its rows that W does not read."""
        free = [i for i, _ in enumerate(saved) if not weight_reads[i]]
        replaced: list[int | None] = []
        for shape in passed:
            found = next((i for i in free if _same_rows(saved[i], shape)), None)
            replaced.append(found)
            free = [i for i in free if i != found]
        between = [s for s, i in zip(passed, replaced, strict=True) if i is None]
        shapes = (tuple(x.shape for x in arrays) for arrays in (saved, passed))
        return cls(tuple(replaced), between, *shapes)

    def separate(self, passed: Sequence[Array]) -> tuple[dict[int, Array], list[Array]]:
        """(passed arrays by the number of the saved array that they replace, the others)."""
        pairs = list(zip(self.replaced, passed, strict=True))
        replacing = {i: x.reshape(self.saved[i]) for i, x in pairs if i is not None}
        return replacing, [x for i, x in pairs if i is None]

    def join(self, saved: Sequence[Array], between: Sequence[Array]) -> list[Array]:
        """The passed arrays again, from both pools."""
        others = iter(between)
        found = (next(others) if i is None else saved[i] for i in self.replaced)
        return [x.reshape(shape) for x, shape in zip(found, self.passed, strict=True)]
