"""Gradients of layers, added to those of the micro-batches before where they arise.

A `Gatherable` gets the sum over the micro-batches before, and its gradient is the sum with its own
micro-batch. So a micro-batch's gradients are never in memory as a whole. For each layer i:

    stages 0 and 1 (`summing.py`)                 sum[i] += dw[i]
    stage 1, the last micro-batch (`ends.py`)     reduce_scattered(sum[i] + dw[i])
    stages 2 and 3 (`prefetching.py`)             sum[i] += reduce_scattered(dw[i])

This is for layers in a loop. Of a stack in two loops (`model.remat_layers`) sums are copied apart
and together, which is worth it for shards; `Config.sums_in_loops` says where else it is done.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.pipeline import pools
from jaxptd.zero.gathering import Gatherable, is_gatherable


def has_sums(stack: Any) -> bool:
    """True if a loop over a stack adds to sums."""
    return any(map(_adds, jax.tree.leaves(stack, is_leaf=is_gatherable)))


def fetches(params: Any) -> bool:
    """True if loops that add to sums fetch layers: `Config.joins_trips`."""
    leaves = jax.tree.leaves(params, is_leaf=is_gatherable)
    summed = (leaf for leaf in leaves if is_gatherable(leaf) and leaf.summed)
    return any(leaf.is_elsewhere and leaf.block is None and not leaf.held for leaf in summed)


def with_wide_sums(block: Array) -> Gatherable:
    """Makes a parameter of layers whose gradients a loop adds to sums, in float32 at least."""
    dtype = jnp.promote_types(block.dtype, jnp.float32)
    handle = as_varying(jnp.zeros(block.shape, dtype), sorted(varying_axes(block)))
    return Gatherable(block, handle, None, None, block.dtype, scattered=False, summed=True)


def with_sums(params: Any, sums: Any) -> tuple[Any, Any]:
    """`params` with the sums that they add to, and the other sums, for `added`.

    sums: over the micro-batches before. In place of those that `params` now have zeros are left, of
    the shape that gradients will have.
    """

    def with_sum(leaf: Any, total: Array) -> Any:
        return dataclasses.replace(leaf, sum=total) if _has_place(leaf) else leaf

    def rest(leaf: Any, total: Array) -> Array:
        return jnp.zeros_like(leaf.handle) if _has_place(leaf) else total

    return _map(with_sum, params, sums), _map(rest, params, sums)


def added(params: Any, rest: Any, gradients: Any) -> Any:
    """Adds gradients to what `with_sums` left; those of parameters with sums are sums already."""

    def one(leaf: Any, rest: Array, gradient: Array) -> Array:
        has_sum = is_gatherable(leaf) and leaf.sum is not None
        return gradient if has_sum else rest + gradient

    return _map(one, params, rest, gradients)


def start(stack: Any) -> Any:
    """Makes what a loop puts a stack's gradients into: the sums that it adds to, or zeros."""
    return _map(lambda leaf: leaf.sum if _adds(leaf) else jnp.zeros_like(_handle(leaf)), stack)


def with_layer(found: Any, gradients: Any, stack: Any, i: Any) -> Any:
    """Gradients of a stack with those of layer i, as `start` says."""

    def one(leaf: Any, pool: Array, gradient: Array) -> Array:
        put = pools.add if _adds(leaf) else pools.put
        found: Array = put(pool, gradient, i)
        return found

    return _map(one, stack, found, gradients)


def _has_place(leaf: Any) -> bool:
    return is_gatherable(leaf) and (leaf.last or leaf.summed)


def _adds(leaf: Any) -> bool:
    return is_gatherable(leaf) and leaf.summed and not leaf.last and leaf.sum is not None


def _handle(leaf: Gatherable | Array) -> Array:
    return leaf.handle if isinstance(leaf, Gatherable) else leaf


def _map(function: Any, *trees: Any) -> Any:
    return jax.tree.map(function, *trees, is_leaf=is_gatherable)
