"""Converts a run's state to canonical form, with the same names and shapes on every layout.

The form is `{"params": {name: array}, "optimizer": {name: array}, "step": int32}`, as stored in
checkpoints. Arrays that the state holds differently are converted one at a time into host memory.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.checkpoint import conversion
from jaxptd.mesh import Axis
from jaxptd.models.stages import sharded_over
from jaxptd.params import Params, Stored
from jaxptd.shapes import ParamShape
from jaxptd.step import Program
from jaxptd.step.state import DEVICE, HOST, State

Canonical = dict[str, Any]


def to_canonical(program: Program, state: State) -> Canonical:
    """Converts a state; arrays that are not canonical yet are copied to host memory."""

    def convert(x: Array, stored: Stored) -> Array:
        if stored.is_canonical:
            return x
        to_canonical = conversion.to_canonical(
            stored, canonical_form(program, stored), program.mesh
        )
        canonical = _run_alone(to_canonical, x)
        return jax.device_put(canonical, canonical.sharding.with_memory_kind(HOST))

    return _with_named_optimizer(program.states.map(convert, state, lambda x: x))


def abstract_canonical(program: Program) -> Canonical:
    """Shapes, dtypes and shardings to restore a checkpoint into."""

    def describe(x: jax.ShapeDtypeStruct, stored: Stored) -> jax.ShapeDtypeStruct:
        memory = x.sharding.memory_kind if stored.is_canonical else HOST
        spec = P(*canonical_form(program, stored).spec)
        sharding = NamedSharding(program.mesh, spec, memory_kind=memory)
        return jax.ShapeDtypeStruct(stored.shape, x.dtype, sharding=sharding)

    return _with_named_optimizer(program.states.map(describe, program.abstract_state, lambda x: x))


def from_canonical(program: Program, canonical: Canonical) -> State:
    """Converts a restored checkpoint to the program's state, on the program's mesh."""
    structure = jax.tree.structure(program.abstract_state["optimizer"])
    named = jax.tree_util.tree_leaves_with_path(program.abstract_state["optimizer"])
    leaves = [canonical["optimizer"][name] for name in (_name(path) for path, _ in named)]
    optimizer = jax.tree.unflatten(structure, leaves)
    convert = partial(_stored, program, memory=program.states.memory.moments)
    others = {**canonical, "params": {}, "optimizer": optimizer}
    state = program.states.map(convert, others, lambda x: x)
    return {**state, "params": params_from_canonical(program, canonical)}


def params_from_canonical(program: Program, canonical: Canonical) -> Params:
    """Converts only the parameters of a restored checkpoint."""
    stored, memory = program.states.stored, program.states.memory.params
    return {
        name: _stored(program, x, stored[name], memory=memory)
        for name, x in canonical["params"].items()
    }


def _stored(program: Program, x: Array, stored: Stored, *, memory: str) -> Array:
    """A canonical array in the state's form and memory."""
    if stored.is_canonical:
        return x
    from_canonical = conversion.from_canonical(
        stored, canonical_form(program, stored), program.mesh
    )
    converted = _run_alone(from_canonical, x)
    return jax.device_put(converted, converted.sharding.with_memory_kind(memory))


def _run_alone(convert: Callable[[Array], Array], x: Array) -> Array:
    """Runs a conversion to its end: on CPUs, several at once would block each other's devices."""
    return convert(jax.device_put(x, x.sharding.with_memory_kind(DEVICE))).block_until_ready()


def _with_named_optimizer(state: State) -> Canonical:
    """The state with the optimizer's tree replaced by a flat dict, keyed by path."""
    named = jax.tree_util.tree_leaves_with_path(state["optimizer"])
    return {**state, "optimizer": {_name(path): leaf for path, leaf in named}}


_name = partial(jax.tree_util.keystr, simple=True, separator=".")


def canonical_form(program: Program, stored: Stored) -> ParamShape:
    """The canonical shape and sharding of an array: the state's own, if that is canonical.

    Otherwise padded dims are not sharded, because their canonical size may not split. Axes that
    this leaves without a dim shard another one where possible, so that no device holds the whole
    array.
    """
    if stored.is_canonical:
        return stored.info
    info = stored.info
    unpadded = tuple(
        None if n != size else axis
        for n, size, axis in zip(info.shape, info.stored_shape, info.spec, strict=True)
    )
    plain = dataclasses.replace(info, stored_shape=info.shape, spec=unpadded)
    for axis in Axis:
        if axis in stored.axes - plain.axes:
            plain = sharded_over(plain, axis, program.config.layout.sizes)
    return plain
