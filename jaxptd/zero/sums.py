"""Gradients of layers, added to those of the micro-batches before where they arise.

A `Gatherable` gets the sum over the micro-batches before, and its gradient is the sum with its own
micro-batch. So a micro-batch's gradients are never in memory as a whole. For each layer i:

    a loop that fetches layers, or of stage 2     sum[i] += reduce_scattered(dw[i])
    stage 1, the last micro-batch (`last.py`)     reduce_scattered(sum[i] + dw[i]), sum of blocks
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.pipeline import pools
from jaxptd.zero.gathering import Gatherable, is_gatherable


def adds_in_loops(params: Any) -> bool:
    """True if loops over layers add gradients to the sums that they get."""
    leaves = jax.tree.leaves(params, is_leaf=is_gatherable)
    return any(is_gatherable(leaf) and leaf.summed for leaf in leaves)


def with_sums(params: Any, sums: Any) -> tuple[Any, Any]:
    """`params` with the sums that they add to, and the arrays to add the gradients of handles to.

    sums: over the micro-batches before. In place of those that `params` now have zeros are left.
    """

    def with_sum(leaf: Any, total: Array) -> Any:
        return dataclasses.replace(leaf, sum=total) if _has_place(leaf) else leaf

    def rest(leaf: Any, total: Array) -> Array:
        return jnp.zeros_like(leaf.handle) if _has_place(leaf) else total

    return _map(with_sum, params, sums), _map(rest, params, sums)


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
    return is_gatherable(leaf) and leaf.summed and leaf.sum is not None


def _handle(leaf: Gatherable | Array) -> Array:
    return leaf.handle if isinstance(leaf, Gatherable) else leaf


def _map(function: Any, *trees: Any) -> Any:
    return jax.tree.map(function, *trees, is_leaf=is_gatherable)
