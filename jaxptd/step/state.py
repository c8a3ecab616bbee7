"""The state of a run: parameters, optimizer moments, step, guard; and the memory that holds them.

With `layout.offload: optimizer` parameters (the float32 masters) and moments are kept in host
memory, with `parameters` the parameters alone. A step copies parameters to the device twice: for
its passes, which cast them to the precision of the layers (with `parameters` a layer's whenever it
runs), and again, with the moments, for the update (`optimizer.py`). The updated arrays are copied
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
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.config import Dtype
from jaxptd.mesh import Layout
from jaxptd.optimizers.moments import Average, Factors, factors
from jaxptd.params import Params, Stored
from jaxptd.zero.shards import on_device, on_host

# ---- skips steps with non-finite or exploding gradients, and scales the float16 loss -------------
# A skipped step leaves parameters and moments as they were. Loss scaling: float16's smallest
# number is 6e-8, so gradients are computed of loss x scale, and divided by the scale in float32.
# An overflow skips the step and halves the scale; a long run of good steps doubles the scale. The
# scale is a power of two, so it changes no digit.
#
# All of this is part of the state, the same on every device, so a resumed run continues
# identically. Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section
# 3.2.

# scale: of the loss, float32. As int32, good: steps since the scale changed or a step was skipped;
# skipped: steps skipped in all; in_row: steps skipped since the last one that was taken.
Guard = dict[str, Array]
Metrics = dict[str, Array]

SCALED = "float16"  # the precision of the model in which the loss is scaled
FIRST_SCALE = 2.0**15  # half of float16's range: the gradient of one token's loss is at most 1
LARGEST_SCALE = 2.0**64  # gradients of zero would double it for ever
GROW_AFTER = 2000  # good steps, as in PyTorch's GradScaler


def new_guard(dtype: Dtype) -> Guard:
    """The guard of step 0, with the same fields in every precision. dtype: of the model."""
    none = jnp.zeros((), jnp.int32)
    scale = jnp.float32(FIRST_SCALE if dtype == SCALED else 1)
    return {"scale": scale, "good": none, "skipped": none, "in_row": none}


def is_sound(loss: Array, norm: Array, limit: float) -> Array:
    """True if a step is to be taken. limit: largest gradient norm of such a step; 0: any."""
    sound = jnp.isfinite(loss) & jnp.isfinite(norm)
    return sound & (norm <= limit) if limit else sound


@jax.named_scope("optimizer")
def after_step(guard: Guard, sound: Array, norm: Array, dtype: Dtype) -> Guard:
    """The guard after a step.

    Args:
        guard: before the step.
        sound: whether the step was taken.
        norm: of the gradients; the scale is halved if the norm is not finite, not if it is above
            the limit.
        dtype: of the model.
    """
    good, scale = jnp.where(sound, guard["good"] + 1, 0), guard["scale"]
    if dtype == SCALED:
        scale = jnp.where(good == GROW_AFTER, jnp.minimum(scale * 2, LARGEST_SCALE), scale)
        scale = jnp.where(jnp.isfinite(norm), scale, jnp.maximum(scale / 2, 1))
        good = jnp.where(good == GROW_AFTER, 0, good)
    return {
        "scale": scale,
        "good": good,
        "skipped": guard["skipped"] + ~sound,
        "in_row": jnp.where(sound, 0, guard["in_row"] + 1),
    }


# ---- the state of a step -------------------------------------------------------------------------

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
    model_dtype: Dtype
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
            self.trained,
            transform_non_params=other,
            is_leaf=lambda x: isinstance(x, Factors | optax.MaskedNode),
        )
        rest = {name: jax.tree.map(other, state[name]) for name in ("step", "guard")}
        return {"params": params, "optimizer": optimizer, **rest}

    def averaged(self, state: State) -> Params:
        """The parameters, the moving average of each in its place if the state has one.

        They are in the same memory. Biases of experts, which no optimizer updates, have no average.
        """
        params, last = dict(state["params"]), state["optimizer"][-1]
        average = last.average if isinstance(last, Average) else {}
        return params | {n: jax.device_put(x, params[n].sharding) for n, x in average.items()}

    @cached_property
    def trained(self) -> Mapping[str, Stored]:
        """The stored forms of the parameters that the optimizer updates, which have moments."""
        return {name: each for name, each in self.stored.items() if each.info.optimized}

    def _make(self, params: Params) -> State:
        return {
            "params": params,
            "optimizer": self.optimizer.init({name: params[name] for name in self.trained}),
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
        if HOST not in self.memory:
            return state
        return jax.tree.map(
            lambda x, kind: on_host(x) if kind == HOST else on_device(x), state, self.kinds
        )
