"""Counts the matmul FLOPs of each device of a mesh, in the jaxpr of a shard_map program.

All devices run one program, but not the same branches. If the predicate of a `cond` depends on the
device's index or on a loop's iteration, this module computes it for every device and iteration. It
computes only small integer arrays. Values that come from arguments are unknown, and the branches of
a `cond` with an unknown predicate must have equal FLOPs.

A matmul (`dot_general`, or one of rows in groups) counts in full even if a mask discards some of
its results, since the device computes them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.extend.core import Literal
from jax.sharding import Mesh

from jaxptd.analysis.jaxprs import equations, inside, is_product, product_flops

Value = np.ndarray | None  # a variable's value; None: unknown
Found = tuple[int, list[Value]]  # FLOPs of matmuls, and the results' values
LARGEST = 1024  # elements of the largest array that is computed


def work_per_device(jaxpr: Any, mesh: Mesh) -> np.ndarray:
    """Matmul FLOPs of each device: int64, in the mesh's shape.

    Args:
        jaxpr: the program's, `jax.jit(f).trace(*arguments).jaxpr`.
        mesh: the mesh of its shard_maps.

    Raises:
        ValueError: the FLOPs depend on data, or a matmul is outside every shard_map.
    """
    names = [str(axis) for axis in mesh.axis_names]
    work = np.zeros(mesh.devices.shape, np.int64)
    for index in np.ndindex(work.shape):
        device = _Device(dict(zip(names, index, strict=True)), dict(mesh.shape))
        work[index], _ = device.run(jaxpr, [None] * len(_open(jaxpr).invars))
    return work


class _Device:
    """Interprets jaxprs as one device of a mesh, on small integer arrays only."""

    def __init__(self, where: Mapping[str, int], sizes: Mapping[Any, int]) -> None:
        self.where = where
        self.sizes = sizes
        self.inside = False  # whether inside a shard_map

    def run(self, jaxpr: Any, arguments: Sequence[Value]) -> Found:
        """FLOPs and results of a jaxpr, closed or not."""
        opened, total = _open(jaxpr), 0
        known: dict[Any, Value] = {}
        known.update(zip(opened.constvars, map(_small, getattr(jaxpr, "consts", ())), strict=False))
        known.update(zip(opened.invars, arguments, strict=True))

        def read(variable: Any) -> Value:
            is_literal = isinstance(variable, Literal)
            return np.asarray(variable.val) if is_literal else known.get(variable)

        for equation in opened.eqns:
            flops, values = self._equation(equation, [read(x) for x in equation.invars])
            total += flops
            known.update(zip(equation.outvars, values, strict=True))
        return total, [read(x) for x in opened.outvars]

    def _equation(self, equation: Any, inputs: list[Value]) -> Found:
        name = equation.primitive.name
        unknown: list[Value] = [None] * len(equation.outvars)
        if is_product(equation):
            if not self.inside:
                raise ValueError(
                    "a matmul is outside every shard_map: XLA decides which device runs it"
                )
            return product_flops(equation), unknown
        if name == "axis_index":
            return 0, [self._index(equation.params["axis_name"])]
        if name in ("shard_map", "cond", "scan", "while"):
            return getattr(self, f"_{name}")(equation, inputs)
        inner = list(inside(equation))
        if not inner:
            return 0, _compute(equation, inputs)
        if len(inner) == 1 and len(_open(inner[0]).invars) == len(inputs):
            return self.run(inner[0], inputs)
        return self._same([self.run(x, [None] * len(_open(x).invars))[0] for x in inner]), unknown

    def _shard_map(self, equation: Any, inputs: list[Value]) -> Found:
        body = equation.params["jaxpr"]
        pairs = zip(inputs, _open(body).invars, strict=True)
        same = [None if x is None or x.shape != y.aval.shape else x for x, y in pairs]
        self.inside = True
        flops, _ = self.run(body, same)
        self.inside = False
        return flops, [None] * len(equation.outvars)

    def _index(self, axis: str | tuple[str, ...]) -> np.ndarray:
        axes = axis if isinstance(axis, tuple) else (axis,)
        shape = tuple(self.sizes[axis] for axis in axes)
        return np.asarray(np.ravel_multi_index([self.where[axis] for axis in axes], shape))

    def _cond(self, equation: Any, inputs: list[Value]) -> Found:
        which, *arguments = inputs
        branches = equation.params["branches"]
        if which is not None:
            return self.run(branches[np.clip(int(which), 0, len(branches) - 1)], arguments)
        every = [self.run(branch, arguments)[0] for branch in branches]
        return self._same(every), [None] * len(equation.outvars)

    def _same(self, flops: Sequence[int]) -> int:
        if len(set(flops)) > 1:
            raise ValueError(f"the FLOPs depend on data: branches of {sorted(flops)} FLOPs")
        return flops[0]

    def _scan(self, equation: Any, inputs: list[Value]) -> Found:
        params, body = equation.params, equation.params["jaxpr"]
        first, before, length = *_carried(params), params["length"]
        consts, carry = inputs[:first], inputs[first:before]
        scanned, results = inputs[before:], [None] * (len(equation.outvars) - len(carry))
        if not _branches(body):
            nothing: list[Value] = [None] * (len(carry) + len(scanned))
            return length * self.run(body, [*consts, *nothing])[0], [None] * len(equation.outvars)
        total, steps = 0, range(length)
        for step in reversed(steps) if params["reverse"] else steps:
            one = [None if x is None else x[step] for x in scanned]
            flops, values = self.run(body, [*consts, *carry, *one])
            total, carry = total + flops, values[: len(carry)]
        return total, [*carry, *results]

    def _while(self, equation: Any, inputs: list[Value]) -> Found:
        params = equation.params
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        asked, consts, carry = inputs[: split[0]], inputs[slice(*split)], inputs[split[1] :]
        total = 0
        while True:
            (go,) = self.run(params["cond_jaxpr"], [*asked, *carry])[1]
            if go is None:
                break
            if not go:
                return total, carry
            flops, carry = self.run(params["body_jaxpr"], [*consts, *carry])
            total += flops
        if self.run(params["body_jaxpr"], [*consts, *carry])[0]:
            raise ValueError("a matmul in a while loop: the number of executions is unknown")
        return total, [None] * len(carry)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _carried(params: Any) -> tuple[int, int]:
    """Indices at which the carried inputs of a scan begin and end."""
    if "num_carry" in params:  # JAX before 0.12
        return params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, _ = (len(inputs) for inputs in params["ft_in"].unpack())
    return consts, consts + carry


def _branches(jaxpr: Any) -> bool:
    """True if a jaxpr contains a `cond` or a `while`."""
    return any(each.primitive.name in ("cond", "while") for each in equations(jaxpr))


# ---- integers -------------------------------------------------------------------------------


def _small(value: Any) -> Value:
    """A constant if it is a small integer array, otherwise None."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return np.asarray(value) if kind in "iub" and kind and value.size <= LARGEST else None


def _compute(equation: Any, inputs: Sequence[Value]) -> list[Value]:
    """Results of an integer equation; None if its rule or an input is unknown."""
    make, out = _RULES.get(equation.primitive.name), equation.outvars[0].aval
    integers = getattr(getattr(out, "dtype", None), "kind", "") in ("i", "u", "b")
    if make is None or not integers or out.size > LARGEST or any(x is None for x in inputs):
        return [None] * len(equation.outvars)
    return [np.asarray(make(equation.params, *inputs)).astype(out.dtype)]


def _divide(_: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))  # towards zero


def _broadcast(params: Any, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for size, dim in zip(x.shape, params["broadcast_dimensions"], strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _dynamic_slice(params: Any, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = zip(x.shape, params["slice_sizes"], starts, strict=True)
    first = [(int(np.clip(start, 0, dim - size)), size) for dim, size, start in sizes]
    return x[tuple(slice(start, start + size) for start, size in first)]


_NAMES = {"add": "add", "sub": "subtract", "mul": "multiply", "rem": "fmod", "neg": "negative"}
_NAMES |= {"max": "maximum", "min": "minimum", "sign": "sign", "abs": "abs", "not": "invert"}
_NAMES |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "eq": "equal"}
_NAMES |= {"ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater"}
_NAMES |= {"ge": "greater_equal"}
_RULES: dict[str, Any] = {
    name: partial(lambda ufunc, _, *inputs: ufunc(*inputs), getattr(np, ufunc))
    for name, ufunc in _NAMES.items()
}
_RULES |= {name: lambda _, x: x for name in ("convert_element_type", "copy", "pvary", "pcast")}
_RULES |= {
    "div": _divide,
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _dynamic_slice,
    "iota": lambda params: np.indices(params["shape"])[params["dimension"]],
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "concatenate": lambda params, *inputs: np.concatenate(inputs, params["dimension"]),
    "stack": lambda params, *inputs: np.stack(inputs, params["axis"]),
    "select_n": lambda _, which, *cases: np.choose(which.astype(int), cases),
    "clamp": lambda _, low, x, high: np.clip(x, low, high),
}
