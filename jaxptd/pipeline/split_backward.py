"""The backward pass of one layer: what forward saves for it, and its split into B and W.

`jax.vjp` decides, under the layer's own rules (`model.remat`), which arrays backward needs. Arrays
that the caller has anyway, above all parameters, are recognized and not saved a second time. If a
schedule splits backward, the traced backward program is split in two: *B* computes the gradient of
the layer's input, *W* later those of its weights.

Source: Qi et al., arXiv 2401.10241 (B and W).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
from jax import Array
from jax.extend.core import Var

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.matmul.ring import AGAIN
from jaxptd.pipeline.pools import LayerInputs, X

# ---- traced programs as lists of equations, any subset of which can be run by itself -------------
# A program that is run in two halves passes arrays from the first to the second. The second half
# can recompute a view (a slice, another shape) of an array that it has anyway in no time, while
# passing it would take as much memory as any array. An array named `AGAIN` costs collectives but no
# matmul: a block that has passed around a ring passes once more. `evaluated_again` finds both.

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
# Not matmuls of rows in groups: the second half would be passed K rows a token for them.
_HEAVY = {"dot_general", "scan", "while", "cond"}
_BARRIER = "optimization_barrier"


@dataclasses.dataclass(frozen=True, eq=False)
class FlatProgram:
    """A traced program with its calls inlined.

    Args:
        equations: in their order.
        arguments: the variables of its arguments.
        results: the variables of its results; a constant result is a `Literal`.
        constants: their values.
        shapes: of its results, a tree.
    """

    equations: Sequence[Any]
    arguments: Sequence[Any]
    results: Sequence[Any]
    constants: Values
    shapes: Any

    @classmethod
    def trace(cls, program: Callable, *arguments: Any) -> "FlatProgram":
        """Traces `program(*arguments)`; conditionals and loops stay as they are."""
        closed, shapes = jax.make_jaxpr(program, return_shape=True)(*arguments)
        flat = jax.make_jaxpr(partial(_call, closed))(*jax.tree.leaves(arguments))
        jaxpr = flat.jaxpr
        constants = dict(zip(jaxpr.constvars, flat.consts, strict=True))
        return cls(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, constants, shapes)

    def bind(self, *arguments: Any) -> Values:
        """The values of its arguments, or of only the first ones, and of its constants."""
        values = dict(zip(self.arguments, jax.tree.leaves(arguments), strict=False))
        return values | self.constants

    def run(self, equations: Sequence[Any], values: Values, element: int | None = None) -> Any:
        """Runs some of its equations, adds to `values`, and returns the results, or one element."""
        evaluate(equations, values)
        numbers = jax.tree.unflatten(jax.tree.structure(self.shapes), range(len(self.results)))
        wanted = numbers if element is None else numbers[element]
        return jax.tree.map(lambda i: value_of(self.results[i], values), wanted)


def run_without_dead_code(program: Callable, *arguments: Any) -> Any:
    """Runs only those equations of `program(*arguments)` that its results need.

    If a program takes `jax.vjp` of a function and uses only its gradients, this skips the
    collectives of the forward pass.
    """
    flat = FlatProgram.trace(program, *arguments)
    return flat.run(needed(flat.equations, flat.results), flat.bind(*arguments))


def evaluate(equations: Sequence[Any], values: Values) -> None:
    """Runs equations and adds their results to `values`; inlines calls only.

    An array may vary over more axes than where it was traced: pools give theirs the axes of the
    stages, also masks, which all stages have in common. The other arguments then vary alike.
    """
    for eqn in equations:
        arguments = [value_of(var, values) for var in eqn.invars]
        more: set[str] = set()
        for var in eqn.invars:
            if isinstance(var, Var):
                traced: Any = var.aval
                more |= varying_axes(values[var]) - traced.manual_axis_type.varying
        if more:
            arguments = [as_varying(x, sorted(more)) for x in arguments]
        if eqn.primitive.name in CALLS:
            results = _call(eqn.params[CALLS[eqn.primitive.name]], *arguments)
        elif eqn.primitive.name == "pvary":
            results = [as_varying(arguments[0], eqn.params["axes"])]
        else:
            values_out = eqn.primitive.bind(*arguments, **eqn.params)
            results = values_out if eqn.primitive.multiple_results else [values_out]
        values |= dict(zip(eqn.outvars, results, strict=True))


def _call(program: Any, *arguments: Array) -> list[Any]:
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    values = dict(zip(jaxpr.invars, arguments, strict=True))
    values |= dict(zip(jaxpr.constvars, consts, strict=True))
    evaluate(jaxpr.eqns, values)
    return [value_of(var, values) for var in jaxpr.outvars]


def value_of(atom: Any, values: Values) -> Any:
    """The value of a variable or literal."""
    return values[atom] if isinstance(atom, Var) else atom.val


def needed(equations: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The equations that these results depend on, in their order."""
    wanted = {var for var in results if isinstance(var, Var)}
    dependencies = []
    for eqn in reversed(equations):
        if not wanted.isdisjoint(eqn.outvars):
            wanted |= {var for var in eqn.invars if isinstance(var, Var)}
            dependencies.append(eqn)
    return dependencies[::-1]


def without(equations: Sequence[Any], some: Sequence[Any]) -> list[Any]:
    """The equations that are not among `some`."""
    excluded = {id(eqn) for eqn in some}
    return [eqn for eqn in equations if id(eqn) not in excluded]


# ---- arrays that the second half recomputes ------------------------------------------------------


def is_heavy(equation: Any) -> bool:
    """True for a matmul, and for a loop or conditional that may contain some."""
    return equation.primitive.name in _HEAVY


def evaluated_again(
    passed: Sequence[Var], done: Sequence[Any], have: Iterable[Var], of_first: Iterable[Var]
) -> list[Any]:
    """The first half's equations that the second runs again, instead of being passed their results.

    A barrier keeps only the operands that the second half needs.

    Args:
        passed: what the second half would read of the first if it recomputed nothing.
        done: the first half's equations, in their order; without constants, which both compute.
        have: arguments of the second half.
        of_first: arguments that only the first half has.
    """
    maker = {var: eqn for eqn in done for var in eqn.outvars}
    order = {var: i for i, var in enumerate([*of_first, *maker])}
    remade: dict[Any, None] = {}
    known, missing = {*have}, {*of_first}
    for var in sorted(passed, key=order.__getitem__):
        variables = _made_of(var, maker, known, missing)
        remade |= dict.fromkeys(variables or ())
        known.add(var)
    return _making(remade, done)


def _made_of(
    var: Var, maker: Mapping[Var, Any], known: set[Var], missing: set[Var]
) -> list[Var] | None:
    """The variables between `known` ones and this one; None if the second half cannot make them."""
    between, todo = [], [(var, False)]
    while todo:
        each, is_named = todo.pop()
        if each in missing and each not in known:
            return None
        if each in known or each not in maker:  # constants have no maker
            continue
        eqn = maker[each]
        is_named |= eqn.params.get("name") == AGAIN
        if is_heavy(eqn) or not (is_named or eqn.primitive.name in {*_VIEWS, _BARRIER}):
            return None
        between.append(each)
        todo += [(source, is_named) for source in _sources(eqn, each)]
    return between


def _sources(equation: Any, result: Var) -> list[Var]:
    """The variables that a result depends on; for a barrier, only the operand that it returns."""
    read = equation.invars
    if equation.primitive.name == _BARRIER:
        read = [read[equation.outvars.index(result)]]
    return [var for var in read if isinstance(var, Var)]


def _making(variables: Mapping[Var, Any], done: Sequence[Any]) -> list[Any]:
    """The equations that make variables, in their order."""
    making = []
    for eqn in done:
        wanted = [var for var in eqn.outvars if var in variables]
        if wanted and eqn.primitive.name == _BARRIER:
            read = [eqn.invars[eqn.outvars.index(var)] for var in wanted]
            eqn = eqn.replace(invars=read, outvars=wanted)
        making += [eqn] if wanted else []
    return making


# ---- the two halves of backward ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLayer:
    """A layer, `run(params, inputs, x) -> y`, with its backward pass.

    A *residual* is an array that backward needs. Forward saves it, unless it is a parameter or an
    input, or computed from inputs alone (positions, masks).

    Args:
        run: the layer; params and x get gradients, inputs do not.
        program: (params, inputs, x) -> residuals, a tree that is a function of dy.
        is_saved: whether forward saves a residual, for each.
    """

    run: Callable[[Any, LayerInputs, X], X]
    program: FlatProgram
    is_saved: tuple[bool, ...]

    def forward(self, params: Any, inputs: LayerInputs, x: X) -> tuple[X, list[Array]]:
        """(y, the residuals to save)."""
        y, vjp = _vjp(self.run, params, inputs, x)
        residuals = zip(jax.tree.leaves(vjp), self.is_saved, strict=True)
        return y, [residual for residual, is_saved in residuals if is_saved]

    def backward(self, saved: Sequence[Array], params: Any, inputs: LayerInputs, dy: X) -> tuple:
        """(gradients of params, gradient of x)."""
        residuals = list(zip(self.program.results, self.is_saved, strict=True))
        rest = [var for var, is_saved in residuals if not is_saved]
        values, following = self.program.bind(params, inputs), iter(saved)
        evaluate(needed(self.program.equations, rest), values)
        leaves = [
            next(following) if is_saved else value_of(var, values) for var, is_saved in residuals
        ]
        return jax.tree.unflatten(jax.tree.structure(self.program.shapes), leaves)(dy)

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
    program = FlatProgram.trace(lambda *each: _vjp(run, *each)[1], params, inputs, x)
    parameters, others = len(jax.tree.leaves(params)), len(jax.tree.leaves((params, inputs)))
    of_x = program.arguments[others:]
    differentiated = {*program.arguments[:parameters], *of_x}
    is_saved = []
    for var in program.results:
        equations = needed(program.equations, [var])
        read = {x for eqn in equations for x in eqn.invars if isinstance(x, Var)}
        from_them = var in of_x or not differentiated.isdisjoint(read)
        is_saved.append(isinstance(var, Var) and from_them)
    shapes = zip(jax.tree.leaves(program.shapes), is_saved, strict=True)
    layer = TracedLayer(run, program, tuple(is_saved))
    return layer, [shape for shape, saved in shapes if saved]


def _vjp(run: Callable, params: Any, inputs: LayerInputs, x: X) -> tuple[X, Any]:
    """(y, the residuals, a function of the gradient of y)."""
    y, vjp = jax.vjp(lambda params, x: run(params, inputs, x), params, x)
    return y, vjp


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBackward:
    """A layer's backward pass as two programs: the gradient of x first, those of params later.

    For y = tanh(x @ a) @ b, where forward saves x and h = tanh(x @ a):

        input_backward    dg = (dy @ b.T) * (1 - h * h)    dx = dg @ a.T    passes dy and dg
        weight_backward   da = x.T @ dg                    db = h.T @ dy

    input_backward also computes gradients of params that need no matmul, such as a bias's sum over
    tokens, because each is smaller than what it would have to pass for them. Views of arrays that
    weight_backward has are not passed (see the top of this file).

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
        variable, constant = {*self.program.arguments}, []
        for eqn in self.program.equations:
            if variable.isdisjoint(var for var in eqn.invars if isinstance(var, Var)):
                constant.append(eqn)
            else:
                variable |= {*eqn.outvars}
        return constant

    @property
    def weight_reads(self) -> list[bool]:
        """For each array of arguments, whether weight_backward reads it."""
        _, second, _ = self._split
        read = {var for eqn in second for var in eqn.invars if isinstance(var, Var)}
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
    return list(dict.fromkeys(var for var in read if isinstance(var, Var) and var in some))


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
            match = next((i for i in free if _same_rows(saved[i], shape)), None)
            replaced.append(match)
            free = [i for i in free if i != match]
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
        values = (next(others) if i is None else saved[i] for i in self.replaced)
        return [x.reshape(shape) for x, shape in zip(values, self.passed, strict=True)]
