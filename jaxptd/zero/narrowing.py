"""Gradients of layers in the precision that they are computed in, where nothing is gathered.

JAX gives a gradient the precision of its parameter: float32, though a product computes it in
16 bits, and casts the parameter as it reads it. A loop stacks the gradients of all layers, twice as
many bytes as they have numbers for. So they belong to the handles of `gathering.Gatherable`, arrays
of the narrower precision that nothing reads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.pipeline.model import LayerInputs
from jaxptd.zero.gathering import is_gatherable


def with_narrow_gradients(
    run: Callable[[Any, LayerInputs, Any], Any],
) -> Callable[[Any, LayerInputs, Any], Any]:
    """Makes `run(layer, inputs, x)` give gradients to the handles of a layer's `Gatherable`s.

    Their shards are whole blocks. Of other parameters nothing changes.
    """

    def block(leaf: Any) -> Any:
        return _attached(leaf.shard, leaf.handle) if is_gatherable(leaf) else leaf

    return lambda layer, *others: run(jax.tree.map(block, layer, is_leaf=is_gatherable), *others)


@jax.custom_vjp
def _attached(block: Array, handle: Array) -> Array:
    """The block, whose gradient is the handle's, in the precision of the handle."""
    return block


def _attached_fwd(block: Array, handle: Array) -> tuple[Array, Array]:
    return block, jnp.zeros((0,), handle.dtype)


def _attached_bwd(like: Array, gradient: Array) -> tuple[None, Array]:
    return None, gradient.astype(like.dtype)


_attached.defvjp(_attached_fwd, _attached_bwd)
