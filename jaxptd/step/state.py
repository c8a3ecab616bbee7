"""The state of a run: parameters, the optimizer's moments, the step, the guard; in which memory.

With `layout.offload: optimizer` parameters (the float32 masters) and moments lie in host memory. A
step brings parameters twice: for its passes, as copies in the precision that layers compute in, and
again, with the moments, for the update, each when the compiler has it updated; what is new goes
back. JAX's types say in which memory an array is, so nothing is computed in the host's unseen.

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
from jaxptd.params import Params, Stored
from jaxptd.step.skipping import new_guard

State = dict[str, Any]  # params: Params, optimizer: optax's, step: int32, guard: Guard

HOST, DEVICE = "pinned_host", "device"  # JAX's kinds of memory


def state_memory(layout: Layout) -> str:
    """The kind of memory of all that is held as parameters are."""
    return HOST if layout.offload == "optimizer" else DEVICE


@dataclasses.dataclass(frozen=True, eq=False)
class States:
    """States of a program.

    Args:
        stored: how parameters are held, and whatever is shaped as they are.
        optimizer: whose state belongs to it.
        mesh: on which it lies.
        dtype: of parameters.
        model_dtype: in which the model computes.
        memory: the kind of memory of all that is held as parameters are.
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
        """`fn(leaf, how it is held)` on leaves that are held as parameters, `other(leaf)` else."""
        params = {name: fn(x, self.stored[name]) for name, x in state["params"].items()}
        optimizer = optax.tree_map_params(
            self.optimizer, fn, state["optimizer"], self.stored, transform_non_params=other
        )
        alike = {name: jax.tree.map(other, state[name]) for name in ("step", "guard")}
        return {"params": params, "optimizer": optimizer, **alike}

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
            name: jax.ShapeDtypeStruct(each.held, self.dtype) for name, each in self.stored.items()
        }
        return jax.eval_shape(self._make, shapes)

    @cached_property
    def specs(self) -> State:
        return self.map(lambda _, each: each.spec, self._shapes, lambda _: P())

    @cached_property
    def abstract(self) -> State:
        """Shapes, precisions and shardings, for compiling without a state."""

        def place(x: Any, spec: P, memory: str) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, spec, memory_kind=memory)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return self.map(
            lambda x, each: place(x, each.spec, self.memory),
            self._shapes,
            lambda x: place(x, P(), DEVICE),
        )

    def new(self, params: Params) -> State:
        """The state of step 0, of parameters on the devices, which are used up.

        What goes to host memory goes as it is made, so devices never hold a whole state.
        """
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        used_up = 0 if self.memory == DEVICE else ()  # memory of another kind is of no use
        make = jax.jit(
            lambda params: self.put_back(self._make(params)),
            out_shardings=shardings,
            donate_argnums=used_up,
        )
        return make(params)

    def settled(self, x: Array) -> Array:
        """An array that is held as parameters are, in their memory; not copied if it is there."""
        return jax.device_put(x, x.sharding.with_memory_kind(self.memory))

    # ---- inside a compiled step -----------------------------------------------------------------

    def brought(self, tree: Any) -> Any:
        """Arrays of a state, on the device."""
        return self._moved(tree, jax.memory.Space.Device)

    def put_back(self, state: State) -> State:
        """The state with each array in the memory where a state has it."""
        return self.map(lambda x, _: self._moved(x, jax.memory.Space.Host), state, lambda x: x)

    def _moved(self, tree: Any, space: Any) -> Any:
        if self.memory == DEVICE:
            return tree
        return jax.tree.map(lambda x: jax.device_put(x, space), tree)
