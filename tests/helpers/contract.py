"""Holds a layer against its dense form: value, gradients of input and parameters, collectives.

A `Case` says how to build a layer, its inputs, their sharding over the mesh, and its communication.
Its dense form is the same layer on a mesh of one device, which `tests/layers/test_dense.py` holds
to numpy. To test a new layer, add a row; it covers every kind of tensor parallelism.

A dim sharded over tp or col is padded with zeros, as tensor parallelism stores it. The padding of
the output and of every gradient must remain zero.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.analysis.count import collectives_of
from jaxptd.costs.collective import ALL_REDUCE, Collective, subtract
from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.mesh import SAMPLE_AXES, Axis, Layout, make_mesh
from jaxptd.params import Blueprint, shardings

TOLERANCES = {"float32": 1e-6, "float64": 1e-12}  # relative to a tensor's norm; never loosened


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A layer under test.

    Args:
        name: part of the test's id.
        make: (tensor_parallel, rngs) -> the layer.
        inputs: global arrays.
        specs: (form) -> the sharding of each input.
        out: (form) -> the sharding of the output.
        call: (layer, *inputs) -> output; default: the layer's own call.
        moves: (layout, dtype) -> collectives over ep, tp, row or col, forward and backward, except
            for the all-reduces of parameter gradients, which follow from the specs.
    """

    name: str
    make: Callable[[TensorParallel, nnx.Rngs], Any]
    inputs: tuple[np.ndarray, ...]
    specs: Callable[[TensorParallel], tuple[P, ...]]
    out: Callable[[TensorParallel], P]
    moves: Callable[[Layout, str], Iterable[Collective]]
    call: Callable[..., Array] = lambda layer, *inputs: layer(*inputs)

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a layer: its output and the gradients of inputs and parameters, as sharded."""

    output: np.ndarray
    inputs: list[np.ndarray]
    params: dict[str, np.ndarray]
    moved: list[Collective]


def residual_spec(tensor_parallel: TensorParallel) -> P:
    """Sharding of `x[B, T, D]`, the residual stream."""
    tokens = Axis.CP, *tensor_parallel.axes.tokens
    return P(SAMPLE_AXES, tokens, *tensor_parallel.axes.hidden_spec())


def between_spec(tensor_parallel: TensorParallel, dims: int, cut: int) -> P:
    """Sharding of `h[B, T, *dims]` between a pair of matmuls, along dim `cut` of `dims`."""
    return P(
        SAMPLE_AXES,
        (Axis.CP, *tensor_parallel.axes.logit_tokens),
        *tensor_parallel.axes.inner_spec(dims, cut),
    )


def token_spec(tensor_parallel: TensorParallel) -> P:
    """Sharding of `loss[B, T]`, for the same tokens as the logits."""
    return P(SAMPLE_AXES, (Axis.CP, *tensor_parallel.axes.logit_tokens))


def run(case: Case, layout: Layout, dtype: str) -> Outcome:
    """Runs one forward and backward pass of `sum(weights * output)` with random weights."""
    tensor_parallel, mesh, blueprint = (
        make_tensor_parallel(layout),
        make_mesh(layout),
        _blueprint(case, layout),
    )
    specs, out = case.specs(tensor_parallel), case.out(tensor_parallel)
    floats = [i for i, x in enumerate(case.inputs) if np.issubdtype(x.dtype, np.floating)]
    arrays = [x.astype(dtype) if i in floats else x for i, x in enumerate(case.inputs)]
    arrays = [_held(x, spec, tensor_parallel) for x, spec in zip(arrays, specs, strict=True)]
    params = starting_params(case, layout, dtype)

    def forward(params: Any, *inputs: Array) -> Array:
        return case.call(blueprint.build(params), *inputs)

    def on_mesh(fn: Callable, ins: Any, outs: Any) -> Callable:
        return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=True)

    def both_ways(params: Any, weights: Array, *inputs: Array) -> Any:
        def weighted(params: Any, *some: Array) -> tuple[Array, Array]:
            given = dict(zip(floats, some, strict=True))
            output = forward(params, *(given.get(i, x) for i, x in enumerate(inputs)))
            return jnp.sum(output * weights), output  # this device's part

        argnums = tuple(range(1 + len(floats)))
        return jax.grad(weighted, argnums, has_aux=True)(params, *(inputs[i] for i in floats))

    whole = jax.eval_shape(on_mesh(forward, (blueprint.specs, *specs), out), params, *arrays)
    weights = random_weights(case, whole.shape, layout, dtype)
    outs = ((blueprint.specs, *(specs[i] for i in floats)), out)
    compiled = jax.jit(on_mesh(both_ways, (blueprint.specs, out, *specs), outs))
    traced = compiled.trace(params, weights, *arrays)
    (d_params, *d_inputs), output = compiled(params, weights, *arrays)
    return Outcome(
        np.asarray(output),
        [np.asarray(d) for d in d_inputs],
        {name: np.asarray(d) for name, d in d_params.items()},
        collectives_of(traced.jaxpr, mesh),
    )


def _held(x: np.ndarray, spec: P, tensor_parallel: TensorParallel) -> np.ndarray:
    """A global array, padded where it is sharded over tp or col."""
    cut = [axis in (Axis.TP, Axis.COL) for axis in spec]
    more = [
        tensor_parallel.padded(n) - n if c else 0 for n, c in itertools.zip_longest(x.shape, cut)
    ]
    return np.pad(x, [(0, n) for n in more])


def random_weights(case: Case, shape: tuple[int, ...], layout: Layout, dtype: str) -> np.ndarray:
    """Random weights, the same on every layout; zero in the padding of an output of this shape."""
    dense = shape if layout == Layout() else _dense(case, dtype).output.shape
    weights = np.random.default_rng(7).standard_normal(dense).astype(dtype)
    return np.pad(weights, [(0, n - m) for n, m in zip(shape, dense, strict=True)])


@functools.cache
def _dense(case: Case, dtype: str) -> Outcome:
    return run(case, Layout(), dtype)


def _blueprint(case: Case, layout: Layout) -> Blueprint:
    return Blueprint(lambda key: case.make(make_tensor_parallel(layout), nnx.Rngs(key)))


def starting_params(case: Case, layout: Layout, dtype: str) -> dict[str, Array]:
    """The parameters that `run` uses, sharded over the mesh."""
    infos = _blueprint(case, layout).infos
    stored = {
        name: np.asarray(infos[name].from_canonical(x.astype(dtype)))
        for name, x in _canonical(case).items()
    }
    return jax.device_put(stored, shardings(infos, make_mesh(layout)))


@functools.cache
def _canonical(case: Case) -> dict[str, np.ndarray]:
    """One device's initial parameters plus noise, so that biases matter."""
    start = _blueprint(case, Layout()).init(0, mesh=make_mesh(Layout()), dtype="float32")
    return {
        name: np.asarray(p) + 0.1 * np.random.default_rng(len(name)).standard_normal(p.shape)
        for name, p in start.items()
    }


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference, divided by the norm of the expected value."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def hold(case: Case, layout: Layout, *, dtype: str) -> None:
    """Asserts that the layer on `layout` equals the one on one device, and moves what it should.

    One device computes in float64, so that the error is that of the layout alone. float64 needs
    `jax.enable_x64`.
    """
    found = run(case, layout, dtype)
    with jax.enable_x64(True):
        dense = _dense(case, "float64")
    pairs = {"output": (found.output, dense.output)}
    for i, gradients in enumerate(zip(found.inputs, dense.inputs, strict=True)):
        pairs[f"gradient of input {i}"] = gradients
    for name, want in dense.params.items():
        pairs[f"gradient of {name}"] = found.params[name], want
    tolerance = TOLERANCES[dtype]
    off = {name: error for name, pair in pairs.items() if not (error := _error(*pair)) <= tolerance}
    assert not off, f"off by {off}"
    assert subtract([*_inside(found.moved)], [*_inside(_expected(case, layout, dtype))]) == []


def _inside(collectives: Iterable[Collective]) -> Iterator[Collective]:
    """Collectives over ep, tp, row or col, possibly together with cp."""
    for each in collectives:
        if set(each.axes) & {Axis.EP, Axis.TP, Axis.ROW, Axis.COL}:
            axes = tuple(axis for axis in each.axes if axis != Axis.DP)
            yield dataclasses.replace(each, axes=axes)


def _error(found: np.ndarray, dense: np.ndarray) -> float:
    """Relative error without the padding; infinite if the padding is not all zero."""
    own = found[tuple(slice(n) for n in dense.shape)]
    padding_is_zero = np.count_nonzero(found) == np.count_nonzero(own)
    return relative(own, dense) if padding_is_zero else np.inf


def _expected(case: Case, layout: Layout, dtype: str) -> list[Collective]:
    """The case's collectives, along the axes of the layout, and all-reduces of gradients."""
    expected = []
    for each in case.moves(layout, dtype):
        axes = tuple(str(axis) for axis in each.axes if layout.sizes[Axis(axis)] > 1)
        if axes and each.count:
            expected.append(dataclasses.replace(each, axes=axes))
    return [*expected, *_owed(case, layout, np.dtype(dtype).itemsize)]


def _owed(case: Case, layout: Layout, itemsize: int) -> Iterator[Collective]:
    """One all-reduce for each parameter that is replicated where tokens, or its uses, are sharded.

    `Program` defers them.
    """
    tensor_parallel = make_tensor_parallel(layout)
    for info in _blueprint(case, layout).infos.values():
        shared = {*tensor_parallel.axes.tokens, *map(Axis, info.over)}
        over = *SAMPLE_AXES, Axis.CP, *sorted(shared)
        cut = [axis for axis in over if layout.sizes[axis] > 1]
        axes = tuple(str(axis) for axis in cut if axis not in info.axes)
        block = math.prod(info.stored_shape) // math.prod(
            layout.sizes[Axis(axis)] for axis in info.axes
        )
        if set(axes) & (shared | {Axis.EP}):
            yield Collective(ALL_REDUCE, axes, 1, block * itemsize)
