"""The state of a run: parameters, optimizer moments, step, guard; and the memory that holds them.

With `layout.offload: optimizer` parameters (the float32 masters) and moments are kept in host
memory, with `parameters` the parameters alone. A step copies parameters to the device twice: for
its passes, which cast them to the precision of the layers (with `parameters` a layer's whenever it
runs), and again, with the moments, for the update (`update.py`). The updated arrays are copied
back. An array's memory is part of its JAX type, so no computation on the host can slip in
unnoticed.

Source: Ren et al., ZeRO-Offload, arXiv 2101.06840 (which computes the update on the host, too).
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.mesh import Layout
from jaxptd.optimizers.moments import Factors, factors
from jaxptd.params import Params, Stored
from jaxptd.step.skipping import new_guard
from jaxptd.zero.host import on_device, on_host

State = dict[str, Any]  # params: Params, optimizer: optax's, step: int32, guard: Guard

HOST, DEVICE = "pinned_host", "device"  # JAX's kinds of memory


class StateMemory(NamedTuple):
    """The kinds of memory of a state's arrays: of parameters, and of moments."""

    params: str
    moments: str


def state_memory(layout: Layout) -> StateMemory:
    """Where a layout keeps its state."""
    return StateMemory(
        HOST if layout.hosts_parameters else DEVICE,
        HOST if layout.hosts_moments else DEVICE,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class States:
    """Describes and makes the states of a program.

    Args:
        stored: how the state holds each parameter; its moments are held alike, or as `Factors`.
        optimizer: whose moments are in the state.
        mesh: that the state is sharded over.
        dtype: of parameters and moments.
        model_dtype: that the model computes in.
        memory: where parameters and moments are.
    """

    stored: Mapping[str, Stored]
    optimizer: optax.GradientTransformation
    mesh: Mesh
    dtype: Any
    model_dtype: Any
    memory: StateMemory

    def map(
        self, fn: Callable[[Any, Stored], Any], state: State, other: Callable[[Any], Any]
    ) -> State:
        """`fn(leaf, how it is held)` for parameters and moments, `other(leaf)` for the rest.

        A parameter whose moments are elsewhere in the optimizer's state has none in this part.
        """
        params = {name: fn(x, self.stored[name]) for name, x in state["params"].items()}

        def kept(moment: Any, stored: Stored) -> Any:
            if isinstance(moment, Factors):
                return Factors(*map(fn, moment, factors(stored)))
            return moment if isinstance(moment, optax.MaskedNode) else fn(moment, stored)

        optimizer = optax.tree_map_params(
            self.optimizer,
            kept,
            state["optimizer"],
            self.stored,
            transform_non_params=other,
            is_leaf=lambda x: isinstance(x, Factors | optax.MaskedNode),
        )
        rest = {name: jax.tree.map(other, state[name]) for name in ("step", "guard")}
        return {"params": params, "optimizer": optimizer, **rest}

    def _make(self, params: Params) -> State:
        return {
            "params": params,
            "optimizer": self.optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
            "guard": new_guard(self.model_dtype),
        }

    @cached_property
    def _shapes(self) -> State:
        shapes: Any = {
            name: jax.ShapeDtypeStruct(each.stored_shape, self.dtype)
            for name, each in self.stored.items()
        }
        return jax.eval_shape(self._make, shapes)

    @cached_property
    def specs(self) -> State:
        """The partition spec of each array."""
        return self.map(lambda _, each: P(*each.spec), self._shapes, lambda _: P())

    @cached_property
    def kinds(self) -> State:
        """The kind of memory of each array."""
        params, moments = self.memory
        kinds = self.map(lambda *_: moments, self._shapes, lambda _: DEVICE)
        return {**kinds, "params": dict.fromkeys(kinds["params"], params)}

    @cached_property
    def abstract(self) -> State:
        """Shapes, precisions and shardings, for compiling without a state."""

        def describe(x: Any, spec: P, memory: str) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(meshes[memory], spec, memory_kind=memory)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        # A sharding over absent devices, of which JAX knows no memory, forgets the kind.
        absent = not self.mesh.devices.flat[0].addressable_memories()
        meshes = {DEVICE: self.mesh, HOST: self.mesh.abstract_mesh if absent else self.mesh}

        return jax.tree.map(describe, self._shapes, self.specs, self.kinds)

    def new(self, params: Params) -> State:
        """Makes the state of step 0 from parameters on the devices, which it donates.

        Each array that belongs in host memory is copied there as soon as it is made, so devices
        never hold a whole state.
        """
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        donated = 0 if self.memory.params == DEVICE else ()  # memory of the same kind is used again
        make = jax.jit(
            lambda params: self.to_host(self._make(params)),
            out_shardings=shardings,
            donate_argnums=donated,
        )
        return make(params)

    # ---- inside a compiled step -----------------------------------------------------------------

    def to_host(self, state: State) -> State:
        """Copies each array to where it is kept: most to host memory, counters to the device."""
        return jax.tree.map(
            lambda x, kind: on_host(x) if kind == HOST else on_device(x), state, self.kinds
        )
