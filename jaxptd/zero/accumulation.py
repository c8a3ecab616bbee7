"""Gradients of layers, added to those of the micro-batches before where they arise.

A `LazyParam` gets the sum over the micro-batches before, and its gradient is the sum with its own
micro-batch. So a micro-batch's gradients are never in memory as a whole. For each layer i:

    stages 0 and 1 (`prefetching.accumulating_scan`)     sum[i] += dw[i]
    stage 1, the last micro-batch (below)      reduce_scattered(sum[i] + dw[i])
    stages 2 and 3 (`prefetching.py`)          sum[i] += reduce_scattered(dw[i])

This is for layers in a loop. A stack in two loops (`model.remat_layers`) needs its sums split and
joined again, which pays off for shards only; `plan._accumulate` lists the other cases.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.pipeline import pools
from jaxptd.pipeline.pools import LayerInputs
from jaxptd.shapes import ParamShape
from jaxptd.zero.gathering import LazyParam, grad_slot, is_lazy
from jaxptd.zero.plan import WHOLE, ParamPlan


def with_sums(params: Any, sums: Any) -> tuple[Any, Any]:
    """`params` with the sums that they add to, and the other sums, for `added`.

    sums: over the micro-batches before. In place of those that `params` now have zeros are left, of
    the shape that gradients will have.
    """

    def takes(leaf: Any) -> bool:
        plan = leaf.plan if is_lazy(leaf) else WHOLE
        return plan.reduce == "last_microbatch" or plan.accumulate == "in_loop"

    def with_sum(leaf: Any, total: Array) -> Any:
        return dataclasses.replace(leaf, sum=total) if takes(leaf) else leaf

    def rest(leaf: Any, total: Array) -> Array:
        return jnp.zeros_like(leaf.grad_slot) if takes(leaf) else total

    having = jax.tree.map(with_sum, params, sums, is_leaf=is_lazy)
    return having, jax.tree.map(rest, params, sums, is_leaf=is_lazy)


def added(params: Any, rest: Any, gradients: Any) -> Any:
    """Adds gradients to what `with_sums` left; those of parameters with sums are sums already."""

    def one(leaf: Any, rest: Array, gradient: Array) -> Array:
        has_sum = is_lazy(leaf) and leaf.sum is not None
        return gradient if has_sum else rest + gradient

    return jax.tree.map(one, params, rest, gradients, is_leaf=is_lazy)


def start(stack: Any) -> Any:
    """Makes what a loop puts a stack's gradients into: the sums that it adds to, or zeros."""
    return jax.tree.map(
        lambda leaf: leaf.sum if leaf.adds else jnp.zeros_like(leaf.grad_slot),
        stack,
        is_leaf=is_lazy,
    )


def with_layer(sums: Any, gradients: Any, stack: Any, i: Any) -> Any:
    """Gradients of a stack with those of layer i, as `start` says."""

    def one(leaf: LazyParam, pool: Array, gradient: Array) -> Array:
        put = pools.add if leaf.adds else pools.put
        updated: Array = put(pool, gradient, i)
        return updated

    return jax.tree.map(one, stack, sums, gradients, is_leaf=is_lazy)


# ---- gradients in another precision than that of their parameters --------------------------------
# JAX gives a gradient the precision of its parameter. Two kinds of parameters want another one:
#
#     layers in a loop, where nothing is gathered: parameters in float32, but a product reads
#         them, and computes their gradients, in 16 bits. The loop stacks gradients of all layers,
#         twice as many bytes as they have numbers for. So they are narrow.
#     parameters outside the layers, gathered in 16 bits, as they are read: but a look-up adds up
#         the gradients of equal tokens, and the output layer's are added to them. So they are wide.
#
# Both belong to the gradient slots of `gathering.LazyParam`s, arrays of that precision that nothing
# reads.


def with_narrow_gradients(
    run: Callable[[Any, LayerInputs, Any], Any],
) -> Callable[[Any, LayerInputs, Any], Any]:
    """Makes `run(layer, inputs, x)` give gradients to the gradient slots of a layer's `LazyParam`s.

    Their shards are whole blocks. Other parameters are unchanged.
    """

    def block(leaf: Any) -> Any:
        return _attached(leaf.shard, leaf.grad_slot) if is_lazy(leaf) else leaf

    return lambda layer, *others: run(jax.tree.map(block, layer, is_leaf=is_lazy), *others)


def with_wide_gradients(
    params: Mapping[str, Any], plans: Mapping[str, ParamPlan]
) -> dict[str, Any]:
    """Parameters of a step, those outside the layers as `LazyParam`s if they are narrow."""

    def wide(p: Any, plan: ParamPlan) -> Any:
        if plan.runs != "outside" or p.dtype == plan.grad_dtype:
            return p
        return LazyParam(p, grad_slot(p, plan), None, None, plan)

    return {name: wide(p, plans[name]) for name, p in params.items()}


def attached(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of `with_wide_gradients` as arrays in float32, whose gradients are the slots'.

    XLA reads the narrow arrays instead. A loop over layers takes its `LazyParam`s as they are.
    """

    def is_wide(p: Any) -> bool:
        return is_lazy(p) and p.plan.runs == "outside"

    return {n: _attached(p.shard, p.grad_slot) if is_wide(p) else p for n, p in params.items()}


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
# before and sent at once, while other layers compute (`prefetching.py`, `accumulation.py`):
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


def first_microbatch_params(params: Any) -> Any:
    """`params` for the first micro-batch: gradients that wait for the last are whole."""

    def first(leaf: Any) -> Any:
        if not (is_lazy(leaf) and leaf.plan.reduce == "last_microbatch"):
            return leaf
        plan, shape = leaf.plan.first, leaf.info.local_shape(leaf.shard)
        return dataclasses.replace(leaf, grad_slot=grad_slot(leaf.shard, plan, shape), plan=plan)

    return jax.tree.map(first, params, is_leaf=is_lazy)


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


def middle_microbatch_params(params: Any) -> Any:
    """`params` for the micro-batches between: those that wait are blocks, and nothing is sent."""

    def middle(leaf: Any) -> Any:
        if not (is_lazy(leaf) and leaf.plan.reduce == "last_microbatch"):
            return leaf
        plan, block = leaf.plan.middle, leaf.block
        if plan.accumulate == "after":
            return block
        return LazyParam(block, grad_slot(block, plan), None, None, plan)

    return jax.tree.map(middle, params, is_leaf=is_lazy)
