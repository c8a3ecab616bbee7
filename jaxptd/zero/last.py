"""Gradients of layers that are reduce-scattered in the last micro-batch only.

Stage 1 adds up whole gradients over the micro-batches and sends the sums once. After the last
micro-batch there is nothing left to send them beside. So in it each layer's gradients are added to
those before and sent at once, while other layers compute (`prefetching.py`):

    begin_step         w[=] -- all-gather --> w[====]
    before the last    dw[====] added to sum[====]
    the last           sum[====] + dw[====] -- reduce_scattered --> sum[=]

Its passes are compiled a second time for that.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.zero.gathering import is_gatherable


def waits_for_last(params: Any) -> bool:
    """True if gradients of any parameter are reduce-scattered in the last micro-batch only."""
    return any(map(_waits, jax.tree.leaves(params, is_leaf=is_gatherable)))


def before_last(params: Any) -> Any:
    """`params` for the micro-batches before the last: such parameters are blocks, as at stage 1."""
    return _map(lambda leaf: leaf.block if _waits(leaf) else leaf, params)


def for_last(params: Any, sums: Any) -> tuple[Any, Any]:
    """`params` for the last micro-batch, and the arrays to add the gradients of handles to.

    sums: of the gradients of `before_last(params)`. Where they are reduce-scattered they are added
    before, so that zeros are left.
    """

    def with_sum(leaf: Any, of_block: Array) -> Any:
        return dataclasses.replace(leaf, sum=of_block) if _waits(leaf) else leaf

    def rest(leaf: Any, of_block: Array) -> Array:
        return jnp.zeros_like(leaf.handle) if _waits(leaf) else of_block

    return _map(with_sum, params, sums), _map(rest, params, sums)


def _waits(leaf: Any) -> bool:
    return is_gatherable(leaf) and leaf.last


def _map(function: Any, *trees: Any) -> Any:
    return jax.tree.map(function, *trees, is_leaf=is_gatherable)
