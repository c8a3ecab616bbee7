"""The messages of a loop over layers in the first micro-batch of a step, and in the last one.

Stages 1 and 2 gather whole parameters once for all micro-batches, and stage 1 adds up whole
gradients over them, which it sends once. Before the first micro-batch and after the last there is
nothing to move them beside. So the first one gathers each layer while the one before computes, and
holds it for the others; and in the last of several each layer's gradients are added to those before
and sent at once, while other layers compute (`prefetching.py`, `sums.py`):

    the first    w[=] -- gathered --> w[====], read and held
                 stage 1                               sum[====] = dw[====]
                 stage 2   dw[====] -- reduce_scattered --> sum[=]
    between      stage 1                               sum[====] += dw[====]
                 stage 2   dw[====] -- reduce_scattered --> dw[=], added to sum[=]
    the last     stage 1   sum[====] + dw[====] -- reduce_scattered --> sum[=]
                 stage 2   as between

The passes are compiled again for each of the two.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.shapes import ParamShape
from jaxptd.zero.gathering import Gatherable, is_gatherable
from jaxptd.zero.sums import with_wide_sums


def holds(params: Any) -> bool:
    """True if any parameter is gathered in the first micro-batch and held."""
    return any(map(_is_held, jax.tree.leaves(params, is_leaf=is_gatherable)))


def waits_for_last(params: Any) -> bool:
    """True if gradients of any parameter are reduce-scattered in the last micro-batch only."""
    return any(map(_waits, jax.tree.leaves(params, is_leaf=is_gatherable)))


def in_first(params: Any) -> Any:
    """`params` for the first micro-batch: gradients that wait for the last are whole."""

    def first(leaf: Gatherable) -> Gatherable:
        dtype = leaf.handle.dtype if leaf.summed else leaf.dtype
        handle = as_varying(jnp.zeros(leaf.shape, dtype), sorted(varying_axes(leaf.shard)))
        return dataclasses.replace(leaf, handle=handle, scattered=False, last=False)

    return _map(first, params)


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


def before_last(params: Any) -> Any:
    """`params` for the micro-batches between: those that wait are blocks, and nothing is sent."""
    return _map(lambda leaf: with_wide_sums(leaf.block) if leaf.summed else leaf.block, params)


def _is_held(leaf: Any) -> bool:
    return is_gatherable(leaf) and leaf.held and leaf.block is None


def _waits(leaf: Any) -> bool:
    return is_gatherable(leaf) and leaf.last


def _map(function: Any, params: Any) -> Any:
    return jax.tree.map(
        lambda leaf: function(leaf) if _waits(leaf) else leaf, params, is_leaf=is_gatherable
    )
