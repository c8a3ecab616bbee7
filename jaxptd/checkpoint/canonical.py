"""The state of a run in canonical form: the same tree of the same shapes whatever the layout.

`{"params": {name: array}, "optimizer": {name: array}, "step": int32}`; checkpoints hold this form.
What a state holds in another form goes to host memory, and comes from there, one array at a time.
"""

import dataclasses
import functools
from functools import partial
from typing import Any, Literal

import jax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.mesh import BATCH_AXES, Axis
from jaxptd.params import Params, Stored
from jaxptd.step import Program
from jaxptd.step.state import DEVICE, HOST, State

Canonical = dict[str, Any]


def to_canonical(program: Program, state: State) -> Canonical:
    """The state's arrays; those that it holds in another form are copies, in host memory."""

    def unpad(x: Array, info: Stored) -> Array:
        if info.is_canonical:
            return x
        to = _sharding(program, info)
        return jax.device_put(_moved(x, info, "canonical", to), to.with_memory_kind(HOST))

    return _as_dicts(program.states.map(unpad, state, lambda x: x))


def abstract_canonical(program: Program) -> Canonical:
    """Shapes, precisions and shardings to restore into."""

    def describe(x: jax.ShapeDtypeStruct, info: Stored) -> jax.ShapeDtypeStruct:
        memory = program.states.memory if info.is_canonical else HOST
        sharding = _sharding(program, info).with_memory_kind(memory)
        return jax.ShapeDtypeStruct(info.shape, x.dtype, sharding=sharding)

    return _as_dicts(program.states.map(describe, program.abstract_state, lambda x: x))


def from_canonical(program: Program, canonical: Canonical) -> State:
    """The state, laid over the program's mesh."""
    structure = jax.tree.structure(program.abstract_state["optimizer"])
    leaves = [canonical["optimizer"][name] for name in _names(program)]
    optimizer = jax.tree.unflatten(structure, leaves)
    held = partial(_held, program)
    return program.states.map(held, {**canonical, "optimizer": optimizer}, lambda x: x)


def params_from_canonical(program: Program, canonical: Canonical) -> Params:
    """The state's parameters alone."""
    stored = program.stored
    return {name: _held(program, x, stored[name]) for name, x in canonical["params"].items()}


def _held(program: Program, x: Array, stored: Stored) -> Array:
    """An array as the state holds it."""
    if stored.is_canonical:
        return x
    to = NamedSharding(program.mesh, stored.spec)
    return program.states.settled(_moved(x, stored, "pad", to))


Direction = Literal["canonical", "pad"]


def _moved(x: Array, stored: Stored, way: Direction, to: NamedSharding) -> Array:
    """There or back. One at a time: many under way would wait for each other's devices on CPUs."""
    on_device = jax.device_put(x, x.sharding.with_memory_kind(DEVICE))
    return _compiled(stored, way, to)(on_device).block_until_ready()


@functools.cache
def _compiled(stored: Stored, way: Direction, to: NamedSharding) -> Any:
    """Of a parameter, and of its moments too; and every save takes the same."""
    return jax.jit(getattr(stored, way), out_shardings=to)


def _as_dicts(state: State) -> Canonical:
    named = jax.tree_util.tree_leaves_with_path(state["optimizer"])
    return {**state, "optimizer": {_name(path): leaf for path, leaf in named}}


def _names(program: Program) -> list[str]:
    return [
        _name(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(program.abstract_state["optimizer"])
    ]


_name = partial(jax.tree_util.keystr, simple=True, separator=".")


def _sharding(program: Program, stored: Stored) -> NamedSharding:
    """As the state holds it, if that is the canonical form.

    Else as layers hold it, but whole along padded dims, whose canonical size may not split. What is
    cut over stages or data parallel devices, layers of uneven parts or flat parts, is cut over
    those along another dim: no device holds all of it.
    """
    if stored.is_canonical:
        return NamedSharding(program.mesh, stored.spec)
    info = stored.info
    whole = [
        None if n != held else axis
        for n, held, axis in zip(info.shape, info.held, info.spec, strict=True)
    ]
    plain = dataclasses.replace(info, held=info.shape, spec=P(*whole))
    for axis in (Axis.PP, *BATCH_AXES):
        if axis in stored.axes - plain.axes:
            plain = plain.cut_over(axis, program.config.layout.sizes)
    return NamedSharding(program.mesh, plain.spec)
