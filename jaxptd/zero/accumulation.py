"""Gradients of layers, added to those of the micro-batches before where they arise.

A `LazyParam` gets the sum over the micro-batches before, and its gradient is the sum with its own
micro-batch. So a micro-batch's gradients are never in memory as a whole. For each layer i:

    stages 0 and 1 (`prefetching.accumulating_scan`)     sum[i] += dw[i]
    stage 1, the last micro-batch (below)      reduce_scattered(sum[i] + dw[i])
    stages 2 and 3 (`prefetching.py`)          sum[i] += reduce_scattered(dw[i])

This is for layers in a loop. A stack in two loops (`model.remat_layers`) needs its sums split and
joined again, which pays off for shards only; `Config.sums_in_loops` lists the other cases.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.pipeline import pools
from jaxptd.pipeline.pools import LayerInputs
from jaxptd.shapes import ParamShape
from jaxptd.zero.gathering import LazyParam, is_lazy


def has_sums(stack: Any) -> bool:
    """True if a loop over a stack adds to sums."""
    return any(map(_adds, jax.tree.leaves(stack, is_leaf=is_lazy)))


def fetches(params: Any) -> bool:
    """True if loops that add to sums fetch layers: `Config.joins_trips`."""
    leaves = jax.tree.leaves(params, is_leaf=is_lazy)
    summed = (leaf for leaf in leaves if is_lazy(leaf) and leaf.accumulate_in_loop)
    return any(
        leaf.is_elsewhere and leaf.block is None and not leaf.keep_gathered for leaf in summed
    )


def with_wide_sums(block: Array) -> LazyParam:
    """Makes a parameter of layers whose gradients a loop adds to sums, in float32 at least."""
    dtype = jnp.promote_types(block.dtype, jnp.float32)
    grad_slot = as_varying(jnp.zeros(block.shape, dtype), sorted(varying_axes(block)))
    return LazyParam(
        block, grad_slot, None, None, block.dtype, scattered=False, accumulate_in_loop=True
    )


def with_sums(params: Any, sums: Any) -> tuple[Any, Any]:
    """`params` with the sums that they add to, and the other sums, for `added`.

    sums: over the micro-batches before. In place of those that `params` now have zeros are left, of
    the shape that gradients will have.
    """

    def with_sum(leaf: Any, total: Array) -> Any:
        return dataclasses.replace(leaf, sum=total) if _has_place(leaf) else leaf

    def rest(leaf: Any, total: Array) -> Array:
        return jnp.zeros_like(leaf.grad_slot) if _has_place(leaf) else total

    return _map(with_sum, params, sums), _map(rest, params, sums)


def added(params: Any, rest: Any, gradients: Any) -> Any:
    """Adds gradients to what `with_sums` left; those of parameters with sums are sums already."""

    def one(leaf: Any, rest: Array, gradient: Array) -> Array:
        has_sum = is_lazy(leaf) and leaf.sum is not None
        return gradient if has_sum else rest + gradient

    return _map(one, params, rest, gradients)


def start(stack: Any) -> Any:
    """Makes what a loop puts a stack's gradients into: the sums that it adds to, or zeros."""
    return _map(lambda leaf: leaf.sum if _adds(leaf) else jnp.zeros_like(_grad_slot(leaf)), stack)


def with_layer(sums: Any, gradients: Any, stack: Any, i: Any) -> Any:
    """Gradients of a stack with those of layer i, as `start` says."""

    def one(leaf: Any, pool: Array, gradient: Array) -> Array:
        put = pools.add if _adds(leaf) else pools.put
        updated: Array = put(pool, gradient, i)
        return updated

    return _map(one, stack, sums, gradients)


def _has_place(leaf: Any) -> bool:
    return is_lazy(leaf) and (leaf.reduce_in_last_microbatch or leaf.accumulate_in_loop)


def _adds(leaf: Any) -> bool:
    return (
        is_lazy(leaf)
        and leaf.accumulate_in_loop
        and not leaf.reduce_in_last_microbatch
        and leaf.sum is not None
    )


def _grad_slot(leaf: LazyParam | Array) -> Array:
    return leaf.grad_slot if isinstance(leaf, LazyParam) else leaf


def _map(function: Any, *trees: Any) -> Any:
    return jax.tree.map(function, *trees, is_leaf=is_lazy)


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
    params: Mapping[str, Any], infos: Mapping[str, ParamShape]
) -> dict[str, Any]:
    """Parameters of a step, those outside the layers as `LazyParam`s if they are narrow."""
    return {n: _wide(p) if infos[n].stack is None else p for n, p in params.items()}


def attached(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of `with_wide_gradients` as arrays in float32, whose gradients are the slots'.

    XLA reads the narrow arrays instead.
    """
    return {n: _attached(p.shard, p.grad_slot) if _is_wide(p) else p for n, p in params.items()}


def _wide(p: Array) -> Any:
    """A narrow array with a gradient slot in float32."""
    dtype = jnp.promote_types(p.dtype, jnp.float32)
    if p.dtype == dtype:
        return p
    grad_slot = as_varying(jnp.zeros(p.shape, dtype), sorted(varying_axes(p)))
    return LazyParam(p, grad_slot, None, None, p.dtype, scattered=False)


def _is_wide(leaf: Any) -> bool:
    wide = is_lazy(leaf) and leaf.grad_slot.dtype.itemsize > leaf.shard.dtype.itemsize
    return (
        wide and leaf.info is None and not leaf.accumulate_in_loop
    )  # a loop takes these as they are


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


def holds(params: Any) -> bool:
    """True if any parameter is gathered in the first micro-batch and held."""
    return any(map(_is_held, jax.tree.leaves(params, is_leaf=is_lazy)))


def waits_for_last(params: Any) -> bool:
    """True if gradients of any parameter are reduce-scattered in the last micro-batch only."""
    return any(map(_waits, jax.tree.leaves(params, is_leaf=is_lazy)))


def first_microbatch_params(params: Any) -> Any:
    """`params` for the first micro-batch: gradients that wait for the last are whole."""

    def first(leaf: LazyParam) -> LazyParam:
        dtype = leaf.grad_slot.dtype if leaf.accumulate_in_loop else leaf.dtype
        grad_slot = as_varying(jnp.zeros(leaf.shape, dtype), sorted(varying_axes(leaf.shard)))
        return dataclasses.replace(
            leaf, grad_slot=grad_slot, scattered=False, reduce_in_last_microbatch=False
        )

    return _map_late(first, params)


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
    stacks = {n: info.stack or "" for n, info in infos.items() if _is_held(params[n])}
    blocks = {name: next(following[stack]) for name, stack in stacks.items()}
    return {
        name: dataclasses.replace(leaf, block=blocks[name]) if name in blocks else leaf
        for name, leaf in params.items()
    }


def middle_microbatch_params(params: Any) -> Any:
    """`params` for the micro-batches between: those that wait are blocks, and nothing is sent."""
    return _map_late(
        lambda leaf: with_wide_sums(leaf.block) if leaf.accumulate_in_loop else leaf.block, params
    )


def _is_held(leaf: Any) -> bool:
    return is_lazy(leaf) and leaf.keep_gathered and leaf.block is None


def _waits(leaf: Any) -> bool:
    return is_lazy(leaf) and leaf.reduce_in_last_microbatch


def _map_late(function: Any, params: Any) -> Any:
    return jax.tree.map(
        lambda leaf: function(leaf) if _waits(leaf) else leaf, params, is_leaf=is_lazy
    )
