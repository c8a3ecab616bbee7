"""Conversion of a run's state to canonical form and back: same names and shapes on every layout.

`{"params": {name: array}, "optimizer": {name: array}, "step": int32}`; checkpoints hold this form.
Arrays that the state holds in another form are converted one at a time and kept in host memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.mesh import BATCH_AXES, Axis
from jaxptd.models.stages import sharded_over
from jaxptd.params import Params, Stored
from jaxptd.step import Program
from jaxptd.step.state import DEVICE, HOST, State

Canonical = dict[str, Any]


def to_canonical(program: Program, state: State) -> Canonical:
    """Converts a state; arrays not already canonical are copied to host memory."""

    def convert(x: Array, stored: Stored) -> Array:
        if stored.is_canonical:
            return x
        sharding = _sharding(program, stored)
        canonical = _run_alone(_to_canonical(stored, sharding), x)
        return jax.device_put(canonical, sharding.with_memory_kind(HOST))

    return _with_named_optimizer(program.states.map(convert, state, lambda x: x))


def abstract_canonical(program: Program) -> Canonical:
    """Shapes, dtypes and shardings to restore a checkpoint into."""

    def describe(x: jax.ShapeDtypeStruct, stored: Stored) -> jax.ShapeDtypeStruct:
        memory = program.states.memory if stored.is_canonical else HOST
        sharding = _sharding(program, stored).with_memory_kind(memory)
        return jax.ShapeDtypeStruct(stored.shape, x.dtype, sharding=sharding)

    return _with_named_optimizer(program.states.map(describe, program.abstract_state, lambda x: x))


def from_canonical(program: Program, canonical: Canonical) -> State:
    """Converts a restored checkpoint to the program's state, on the program's mesh."""
    structure = jax.tree.structure(program.abstract_state["optimizer"])
    leaves = [canonical["optimizer"][name] for name in _optimizer_names(program)]
    optimizer = jax.tree.unflatten(structure, leaves)
    convert = partial(_stored, program)
    return program.states.map(convert, {**canonical, "optimizer": optimizer}, lambda x: x)


def params_from_canonical(program: Program, canonical: Canonical) -> Params:
    """Converts the parameters of a restored checkpoint only."""
    stored = program.states.stored
    return {name: _stored(program, x, stored[name]) for name, x in canonical["params"].items()}


def _stored(program: Program, x: Array, stored: Stored) -> Array:
    """A canonical array as the state holds it."""
    if stored.is_canonical:
        return x
    to_stored = _to_stored(stored, NamedSharding(program.mesh, P(*stored.spec)))
    return program.states.in_state_memory(_run_alone(to_stored, x))


# Cached: a parameter and its moments share one compiled conversion, and so do all saves.
@functools.cache
def _to_canonical(stored: Stored, sharding: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(stored.to_canonical, out_shardings=sharding)


@functools.cache
def _to_stored(stored: Stored, sharding: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(stored.from_canonical, out_shardings=sharding)


def _run_alone(convert: Callable[[Array], Array], x: Array) -> Array:
    """Runs a conversion to its end: several at once would wait for each other's devices on CPUs."""
    return convert(jax.device_put(x, x.sharding.with_memory_kind(DEVICE))).block_until_ready()


def _with_named_optimizer(state: State) -> Canonical:
    """The state with the optimizer's tree replaced by a flat dict, keyed by path."""
    named = jax.tree_util.tree_leaves_with_path(state["optimizer"])
    return {**state, "optimizer": {_name(path): leaf for path, leaf in named}}


def _optimizer_names(program: Program) -> list[str]:
    named = jax.tree_util.tree_leaves_with_path(program.abstract_state["optimizer"])
    return [_name(path) for path, _ in named]


_name = partial(jax.tree_util.keystr, simple=True, separator=".")


def _sharding(program: Program, stored: Stored) -> NamedSharding:
    """The sharding of an array's canonical form: the state's own, if the state's is canonical.

    Otherwise the layers' sharding without the padded dims, because their canonical size may not
    split. If the state shards the array over stages or data parallel devices, this sharding
    does too, along some other dim, so that no device holds the whole array.
    """
    if stored.is_canonical:
        return NamedSharding(program.mesh, P(*stored.spec))
    info = stored.info
    unpadded = tuple(
        None if n != size else axis
        for n, size, axis in zip(info.shape, info.stored_shape, info.spec, strict=True)
    )
    plain = dataclasses.replace(info, stored_shape=info.shape, spec=unpadded)
    for axis in (Axis.PP, *BATCH_AXES):
        if axis in stored.axes - plain.axes:
            plain = sharded_over(plain, axis, program.config.layout.sizes)
    return NamedSharding(program.mesh, P(*plain.spec))
