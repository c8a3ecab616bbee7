"""The state of a run: parameters, optimizer moments, step, guard; and the memory that holds them.

With `layout.offload: optimizer` parameters (the float32 masters) and moments are kept in host
memory. A step copies parameters to the device twice: for its passes, which cast them to the
precision of the layers, and again, with the moments, for the update, where XLA schedules each
parameter's copy by itself. The updated arrays are copied back. An array's memory is part of its JAX
type, so no computation on the host can slip in unnoticed.

Source: Ren et al., ZeRO-Offload, arXiv 2101.06840 (which computes the update on the host, too).
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.mesh import Layout
from jaxptd.optimizers.moments import Factors, factors
from jaxptd.params import Params, Stored
from jaxptd.step.skipping import new_guard

State = dict[str, Any]  # params: Params, optimizer: optax's, step: int32, guard: Guard

HOST, DEVICE = "pinned_host", "device"  # JAX's kinds of memory


def state_memory(layout: Layout) -> str:
    """The kind of memory of parameters and moments."""
    return HOST if "optimizer" in layout.offloaded else DEVICE


@dataclasses.dataclass(frozen=True, eq=False)
class States:
    """Describes and makes the states of a program.

    Args:
        stored: how the state holds each parameter; its moments are held alike, or as `Factors`.
        optimizer: whose moments are in the state.
        mesh: that the state is sharded over.
        dtype: of parameters and moments.
        model_dtype: that the model computes in.
        memory: the kind of memory of parameters and moments.
    """

    stored: Mapping[str, Stored]
    optimizer: optax.GradientTransformation
    mesh: Mesh
    dtype: Any
    model_dtype: Any
    memory: str

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
    def abstract(self) -> State:
        """Shapes, precisions and shardings, for compiling without a state."""

        def describe(x: Any, spec: P, memory: str) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, spec, memory_kind=memory)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return self.map(
            lambda x, each: describe(x, P(*each.spec), self.memory),
            self._shapes,
            lambda x: describe(x, P(), DEVICE),
        )

    def new(self, params: Params) -> State:
        """Makes the state of step 0 from parameters on the devices, which it donates.

        Each array that belongs in host memory is copied there as soon as it is made, so devices
        never hold a whole state.
        """
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        donated = 0 if self.memory == DEVICE else ()  # only memory of the same kind can be reused
        make = jax.jit(
            lambda params: self.to_host(self._make(params)),
            out_shardings=shardings,
            donate_argnums=donated,
        )
        return make(params)

    def in_state_memory(self, x: Array) -> Array:
        """Puts a parameter or moment into the state's memory; no copy if the array is there."""
        return jax.device_put(x, x.sharding.with_memory_kind(self.memory))

    # ---- inside a compiled step -----------------------------------------------------------------

    def to_device(self, tree: Any) -> Any:
        """Copies a state's arrays to device memory, if they are in host memory."""
        return self._moved(tree, jax.memory.Space.Device)

    def to_host(self, state: State) -> State:
        """Copies parameters and moments to host memory, if the state is kept there."""
        return self.map(lambda x, _: self._moved(x, jax.memory.Space.Host), state, lambda x: x)

    def _moved(self, tree: Any, space: Any) -> Any:
        if self.memory == DEVICE:
            return tree
        return jax.tree.map(lambda x: jax.device_put(x, space), tree)
