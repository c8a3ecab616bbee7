"""ZeRO: state that data parallel devices would duplicate, sharded over them.

From stage 1 on, the state (parameters, moments) is held in shards (`shards.py`). The stages differ
in how a step treats the layers' parameters w. Parameters outside the layers (embeddings, the last
norm, those that all layers read) are treated as at stage 1. `[=]` is a device's shard, `[====]` the
block that all Z shards make up, dw its gradient of one micro-batch:

    stage 0  forward     reads w[====]
             backward    reads w[====], adds dw[====] to a sum; those of a loop's layers are stacked
                         in the precision that layers compute in

    stage 1  begin_step  w[=] -- all-gather --> w[====]
             forward     reads w[====]
             backward    reads w[====], adds dw[====] to a sum
             end_step    sum[====] -- reduce-scatter --> sum[=]

    stage 2  begin_step  w[=] -- all-gather --> w[====]
             forward     reads w[====]
             backward    reads w[====]; dw[====] -- reduce_scattered --> dw[=], added to a sum

    stage 3  forward     w[=] -- gathered --> w[====], read and freed
             backward    w[=] -- regathered --> w[====], read and freed;
                         dw[====] -- reduce_scattered --> dw[=], added to a sum

Layers in a loop are gathered at stages 1 and 2 while the first micro-batch runs forward, and at
stage 1 sums are reduce-scattered while the last one runs backward: the end of this file.

With `layout.offload: parameters` w[=] is in host memory (at stage 0 w[====]), and at every stage a
layer is fetched as at stage 3: copied to the device, then gathered. Gradients are as above.

Gathers move the precision that parameters are read in; gradients are summed in float32. Arrows with
the name of a function of `shards.py` carry all parameters of one layer, in few messages
(`shards.py` says which).

Letters: L layers, Z devices along dp x cp.
Source: Rajbhandari et al., arXiv 1910.02054.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import Axes, as_varying
from jaxptd.params import ParamInfo, Params, Stored
from jaxptd.shapes import ParamShape
from jaxptd.zero.plan import WHOLE, ParamPlan, StateShapes
from jaxptd.zero.shards import (
    LazyParam,
    ShardedInfo,
    grad_slot,
    is_on_host,
    on_device,
    with_grad_slot,
)

StepParams = dict[str, Any]  # parameters as a step's passes take them: arrays or `LazyParam`s


@dataclasses.dataclass(frozen=True)
class Zero(StateShapes):
    """Shards the state, and gathers parameters for a step."""

    infos: Mapping[str, ParamInfo]

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """Shapes, shardings and conversions of the parameters, as the state holds them."""
        if self.layers.shards == "none":
            return self.infos
        return {n: ShardedInfo(info, self.sizes, self.lead(n)) for n, info in self.infos.items()}

    def begin_step(
        self, params: Params, owed: Mapping[str, Axes] | None = None, *, training: bool = True
    ) -> StepParams:
        """The state's parameters -> parameters for a step's passes. Partner: `end_step`.

        Args:
            params: as the state holds them.
            owed: the axes over which each one's gradient is a partial sum; it varies over them.
            training: whether gradients will be computed.
        """
        begun: StepParams = {}
        for name, p in params.items():
            stored, plan = self.stored[name], self.plans[name]
            info = stored if isinstance(stored, ShardedInfo) else None
            p = as_varying(p, owed[name]) if owed else p
            if plan.gather == "layer":
                scattered = plan.reduce != "end" and not is_on_host(p)
                shape = p.shape if info is None or plan.reduce != "end" else info.local_shape(p)
                slot = p if scattered else grad_slot(p, plan, shape)
                begun[name] = LazyParam(p, slot, None, info, plan)
                continue
            block: Any = (p := on_device(p) if plan.where == "host" else p)
            if info is not None:
                held = training and plan.gather == "first_microbatch"
                block = None if held else info.gather(p, plan.gather_dtype)
            elif plan.where == "host":
                block = p.astype(plan.gather_dtype)
            begun[name] = block
            if training and plan.reduce != "end":
                begun[name] = LazyParam(p, p, block, info, plan)
            # A loop adds a layer's gradients to sums, or stacks them in a precision of their own.
            elif training and (plan.accumulate == "in_loop" or plan.narrows):
                begun[name] = with_grad_slot(block, plan)
        return begun

    def end_step(self, grads: Params, owed: Mapping[str, Axes]) -> Params:
        """Gradients that the passes return -> of what the state holds. Partner: `begin_step`.

        Gradients of sharded parameters are summed over dp x cp (those of layers that are gathered
        one by one already are), then all over the axes where they are owed: one all-reduce for each
        set of axes.
        """
        grads = dict(grads)
        groups: dict[Axes, list[str]] = {}
        for name, gradient in grads.items():
            stored = self.stored[name]
            if isinstance(stored, ShardedInfo) and self.plans[name].reduce == "end":
                grads[name] = stored.reduce_scatter(gradient)
            groups.setdefault(owed[name], []).append(name)
        for axes, names in groups.items():
            grads |= lax.psum({name: grads[name] for name in names}, axes)
        return grads


# ---- gradients of layers, added to those of the micro-batches before where they arise ------------
# A `LazyParam` gets the sum over the micro-batches before, and its gradient is the sum with its own
# micro-batch. So a micro-batch's gradients are never in memory as a whole. For each layer i:
#
#     stages 0 and 1 (`loop.py`, where nothing moves)      sum[i] += dw[i]
#     stage 1, the last micro-batch (below)      reduce_scattered(sum[i] + dw[i])
#     stages 2 and 3 (`loop.py`)                 sum[i] += reduce_scattered(dw[i])
#
# This is for layers in a loop. A stack in two loops (`model.remat_layers`) needs its sums split and
# joined again, which pays off for shards only; `plan._accumulate` lists the other cases.


def with_sums(params: Mapping[str, Any], sums: Params) -> tuple[dict[str, Any], Params]:
    """`params` with the sums that they add to, and the other sums, for `added`.

    sums: over the micro-batches before. In place of those that `params` now have zeros are left, of
    the shape that gradients will have.
    """
    having, rest = dict(params), dict(sums)
    for name, p in params.items():
        plan = p.plan if isinstance(p, LazyParam) else WHOLE
        if plan.reduce == "last_microbatch" or plan.accumulate == "in_loop":
            having[name] = dataclasses.replace(p, sum=sums[name])
            rest[name] = jnp.zeros_like(p.grad_slot)
    return having, rest


def added(params: Mapping[str, Any], rest: Params, gradients: Params) -> Params:
    """Adds gradients to what `with_sums` left; those of parameters with sums are sums already."""
    sums: Params = {}
    for name, p in params.items():
        has_sum = isinstance(p, LazyParam) and p.sum is not None
        sums[name] = gradients[name] if has_sum else rest[name] + gradients[name]
    return sums


# ---- gradients in another precision than that of their parameters --------------------------------
# JAX gives a gradient the precision of its parameter. Two kinds of parameters want another one:
#
#     layers in a loop, where nothing is gathered: parameters in float32, but a product reads
#         them, and computes their gradients, in 16 bits. The loop stacks gradients of all layers,
#         twice as many bytes as they have numbers for. So they are narrow.
#     parameters outside the layers, gathered in 16 bits, as they are read: but a look-up adds up
#         the gradients of equal tokens, and the output layer's are added to them. So they are wide.
#
# Both belong to the gradient slots of `LazyParam`s, arrays of that precision that nothing
# reads.


def with_wide_gradients(
    params: Mapping[str, Any], plans: Mapping[str, ParamPlan]
) -> dict[str, Any]:
    """Parameters of a step, those outside the layers as `LazyParam`s if they are narrow."""
    wide = dict(params)
    for name, p in params.items():
        plan = plans[name]
        if plan.runs == "outside" and p.dtype != plan.grad_dtype:
            wide[name] = with_grad_slot(p, plan)
    return wide


def grad_slots_of(params: Mapping[str, Any]) -> Params:
    """The arrays that gradients belong to: the slot of each `LazyParam`, other arrays as is."""
    return {n: p.grad_slot if isinstance(p, LazyParam) else p for n, p in params.items()}


def attached(params: Mapping[str, Any], grad_slots: Params) -> dict[str, Any]:
    """`params` for the model, with gradients that belong to these arrays: `grad_slots_of(params)`.

    Those of `with_wide_gradients` become arrays in float32; XLA reads the narrow ones instead. A
    loop over layers takes its `LazyParam`s as they are.
    """
    given: dict[str, Any] = {}
    for name, p in params.items():
        if isinstance(p, LazyParam):
            p = dataclasses.replace(p, grad_slot=grad_slots[name])
            given[name] = read_with_slot(p) if p.plan.runs == "outside" else p
        else:
            given[name] = grad_slots[name]
    return given


def read_with_slot(leaf: Any) -> Any:
    """The block of a `LazyParam` that is there, with a gradient that belongs to its slot."""
    return _attached(leaf.block, leaf.grad_slot) if isinstance(leaf, LazyParam) else leaf


@jax.custom_vjp
def _attached(block: Array, grad_slot: Array) -> Array:
    """The block in the wider precision of the two; its gradient is the slot's, in its own."""
    return _attached_fwd(block, grad_slot)[0]


def _attached_fwd(block: Array, grad_slot: Array) -> tuple[Array, Array]:
    wide = block.astype(jnp.promote_types(block.dtype, grad_slot.dtype))
    return wide, jnp.zeros((0,), grad_slot.dtype)


def _attached_bwd(like: Array, gradient: Array) -> tuple[None, Array]:
    return None, gradient.astype(like.dtype)


_attached.defvjp(_attached_fwd, _attached_bwd)


# ---- the first and the last micro-batch ----------------------------------------------------------
# The messages of a loop over layers in the first micro-batch of a step, and in the last one.
#
# Stages 1 and 2 gather whole parameters once for all micro-batches, and stage 1 adds up whole
# gradients over them, which it sends once. Before the first micro-batch and after the last there is
# nothing to move them beside. So the first one gathers each layer while the one before computes,
# and holds it for the others; and in the last of several each layer's gradients are added to those
# before and sent at once, while other layers compute (`loop.py`):
#
#     the first    w[=] -- gathered --> w[====], read and held
#                  stage 1                               sum[====] = dw[====]
#                  stage 2   dw[====] -- reduce_scattered --> sum[=]
#     between      stage 1                               sum[====] += dw[====]
#                  stage 2   dw[====] -- reduce_scattered --> dw[=], added to sum[=]
#     the last     stage 1   sum[====] + dw[====] -- reduce_scattered --> sum[=]
#                  stage 2   as between
#
# The passes are compiled again for each of the two.


def first_microbatch_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` for the first micro-batch: gradients that wait for the last are whole."""
    first = dict(params)
    for name, p in params.items():
        if isinstance(p, LazyParam) and p.plan.reduce == "last_microbatch":
            assert p.info is not None
            assert p.shard is not None
            plan, shape = p.plan.first, p.info.local_shape(p.shard)
            first[name] = dataclasses.replace(
                p, grad_slot=grad_slot(p.shard, plan, shape), plan=plan
            )
    return first


def with_held(
    params: Mapping[str, Any],
    held: Mapping[str, Sequence[Array]],
    infos: Mapping[str, ParamShape],
) -> dict[str, Any]:
    """`params` with the blocks that the first micro-batch holds.

    Args:
        params: by name.
        held: the blocks of each stack.
        infos: of the parameters, in the order of the model, which is that of a stack's blocks.
    """
    following = {stack: iter(blocks) for stack, blocks in held.items()}
    stacks = {name: info.stack for name, info in infos.items() if info.stack is not None}
    blocks = {name: next(following[stack]) for name, stack in stacks.items()}
    return {
        name: dataclasses.replace(leaf, block=blocks[name]) if name in blocks else leaf
        for name, leaf in params.items()
    }


def middle_microbatch_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` for the micro-batches between: those that wait are blocks, and nothing is sent."""
    middle = dict(params)
    for name, p in params.items():
        if isinstance(p, LazyParam) and p.plan.reduce == "last_microbatch":
            plan, block = p.plan.middle, p.block
            assert block is not None
            middle[name] = block if plan.accumulate == "after" else with_grad_slot(block, plan)
    return middle
