"""Holds a layer against its dense form: value, gradients of input and parameters, collectives.

A layer is a `Case`: how to build it, what goes in, how that lies over the mesh, and what it moves.
Its dense form is the same layer on a mesh of one device, which `tests/layers/test_dense.py` holds
to numpy. A new layer is a new row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.comms import collectives_of
from jaxptd.layers.tensor_parallel import TensorParallel, make_form
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.params import Blueprint
from jaxptd.traffic import Collective

TOLERANCES = {"float32": 1e-6, "float64": 1e-12}  # relative to a tensor's norm; never loosened


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A layer under test.

    Args:
        name: of the test.
        make: (form, rngs) -> the layer.
        inputs: global arrays.
        specs: (form) -> how each of them lies over the mesh.
        out: (form) -> how the output lies over the mesh.
        call: (layer, *inputs) -> output; default: the layer's own call.
        moves: (layout) -> collectives over tp forward and backward, as {(kind): count}.
    """

    name: str
    make: Callable[[TensorParallel, nnx.Rngs], Any]
    inputs: tuple[np.ndarray, ...]
    specs: Callable[[TensorParallel], tuple[P, ...]]
    out: Callable[[TensorParallel], P]
    moves: Callable[[Layout], dict[str, int]]
    call: Callable[..., Array] = lambda layer, *inputs: layer(*inputs)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a layer gives: its output, the gradients of inputs and (canonical) parameters."""

    output: np.ndarray
    inputs: list[np.ndarray]
    params: dict[str, np.ndarray]
    moved: list[Collective]


def residual_spec(form: TensorParallel) -> P:
    """How `x[B, T, D]` of the residual stream lies over the mesh."""
    return P(Axis.DP, (Axis.CP, *form.token_axes), None)


def run(case: Case, layout: Layout, dtype: str) -> Outcome:
    """One forward and backward pass of `sum(weights * output)`, weights random."""
    form, mesh, blueprint = make_form(layout), make_mesh(layout), _blueprint(case, layout)
    arrays = [x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x for x in case.inputs]
    params = starting_params(case, layout, dtype)

    def forward(params: Any, *inputs: Array) -> Array:
        return case.call(blueprint.build(params), *inputs)

    def on_mesh(fn: Callable, ins: Any, outs: Any) -> Callable:
        return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=True)

    specs, out = case.specs(form), case.out(form)
    output = jax.jit(on_mesh(forward, (blueprint.specs, *specs), out))(params, *arrays)
    weights = np.random.default_rng(7).standard_normal(output.shape).astype(dtype)

    def weighted(params: Any, weights: Array, *inputs: Array) -> Array:
        return jnp.sum(forward(params, *inputs) * weights)  # this device's part

    floats = [i for i, x in enumerate(case.inputs) if np.issubdtype(x.dtype, np.floating)]

    def gradients(params: Any, weights: Array, *inputs: Array) -> Any:
        argnums = (0, *(i + 2 for i in floats))
        return jax.grad(weighted, argnums=argnums)(params, weights, *inputs)

    outs = (blueprint.specs, *(specs[i] for i in floats))
    compiled = jax.jit(on_mesh(gradients, (blueprint.specs, out, *specs), outs))
    traced = compiled.trace(params, weights, *arrays)
    d_params, *d_inputs = compiled(params, weights, *arrays)
    return Outcome(
        np.asarray(output),
        [np.asarray(d) for d in d_inputs],
        {name: np.asarray(d) for name, d in blueprint.canonical(d_params).items()},
        [c for c in collectives_of(traced.jaxpr, mesh) if Axis.TP in c.axes],
    )


@functools.cache
def _dense(case: Case, dtype: str) -> Outcome:
    return run(case, Layout(), dtype)


def _blueprint(case: Case, layout: Layout) -> Blueprint:
    return Blueprint(lambda key: case.make(make_form(layout), nnx.Rngs(key)))


def starting_params(case: Case, layout: Layout, dtype: str) -> dict[str, Array]:
    """The parameters that `run` uses, laid over the mesh."""
    blueprint, mesh = _blueprint(case, layout), make_mesh(layout)
    start = blueprint.init(0, mesh=mesh, dtype=dtype)
    params = {name: _moved(blueprint, name, p) for name, p in start.items()}
    return jax.device_put(params, blueprint.shardings(mesh))


def _moved(blueprint: Blueprint, name: str, p: Array) -> np.ndarray:
    """Initial parameters moved by noise that is the same on every layout: biases that matter."""
    info = blueprint.infos[name]
    noise = 0.1 * np.random.default_rng(len(name)).standard_normal(info.shape)
    return np.asarray(info.pad(np.asarray(info.canonical(p)) + noise.astype(p.dtype)))


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def hold(case: Case, layout: Layout, *, dtype: str) -> None:
    """Asserts that the layer on `layout` is the layer on one device, and moves what it should.

    float64 needs `jax.enable_x64`.
    """
    dense, found = _dense(case, dtype), run(case, layout, dtype)
    assert found.output.shape == dense.output.shape
    pairs = {"output": (found.output, dense.output)}
    for i, gradients in enumerate(zip(found.inputs, dense.inputs, strict=True)):
        pairs[f"gradient of input {i}"] = gradients
    for name, want in dense.params.items():
        pairs[f"gradient of {name}"] = found.params[name], want
    tolerance = TOLERANCES[dtype]
    off = {
        name: relative(*pair) for name, pair in pairs.items() if not relative(*pair) <= tolerance
    }
    assert not off, f"off by {off}"
    moved: dict[str, int] = {}
    for collective in found.moved:
        moved[collective.kind] = moved.get(collective.kind, 0) + collective.count
    expected = {kind: n for kind, n in case.moves(layout).items() if n and layout.tp > 1}
    assert moved == expected, f"moves {moved}, should move {expected}"
