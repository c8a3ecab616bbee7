"""Gradients in another precision than that of their parameters.

JAX gives a gradient the precision of its parameter. Two kinds of parameters want another one:

    layers in a loop, where nothing is gathered: parameters in float32, but a product reads them,
        and computes their gradients, in 16 bits. The loop stacks gradients of all layers, twice as
        many bytes as they have numbers for. So they are narrow.
    parameters outside the layers, gathered in 16 bits, as they are read: but a look-up adds up the
        gradients of equal tokens, and the output layer's are added to them. So they are wide.

Both belong to the handles of `gathering.Gatherable`s, arrays of that precision that nothing reads.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.pipeline.model import LayerInputs
from jaxptd.shapes import ParamShape
from jaxptd.zero.gathering import Gatherable, is_gatherable


def with_narrow_gradients(
    run: Callable[[Any, LayerInputs, Any], Any],
) -> Callable[[Any, LayerInputs, Any], Any]:
    """Makes `run(layer, inputs, x)` give gradients to the handles of a layer's `Gatherable`s.

    Their shards are whole blocks. Of other parameters nothing changes.
    """

    def block(leaf: Any) -> Any:
        return _attached(leaf.shard, leaf.handle) if is_gatherable(leaf) else leaf

    return lambda layer, *others: run(jax.tree.map(block, layer, is_leaf=is_gatherable), *others)


def with_wide_gradients(
    params: Mapping[str, Any], infos: Mapping[str, ParamShape]
) -> dict[str, Any]:
    """Parameters of a step, those outside the layers as `Gatherable`s if they are narrow."""
    return {n: _wide(p) if infos[n].stack is None else p for n, p in params.items()}


def attached(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of `with_wide_gradients` as arrays in float32, whose gradients are the handles'.

    XLA reads the narrow arrays instead.
    """
    return {n: _attached(p.shard, p.handle) if _is_wide(p) else p for n, p in params.items()}


def _wide(p: Array) -> Any:
    """A narrow array with a handle in float32."""
    dtype = jnp.promote_types(p.dtype, jnp.float32)
    if p.dtype == dtype:
        return p
    handle = as_varying(jnp.zeros(p.shape, dtype), sorted(varying_axes(p)))
    return Gatherable(p, handle, None, None, p.dtype, scattered=False)


def _is_wide(leaf: Any) -> bool:
    wide = is_gatherable(leaf) and leaf.handle.dtype.itemsize > leaf.shard.dtype.itemsize
    return wide and leaf.info is None and not leaf.summed  # a loop takes these as they are


@jax.custom_vjp
def _attached(block: Array, handle: Array) -> Array:
    """The block in the wider precision of the two; its gradient is the handle's, in its own."""
    return _attached_fwd(block, handle)[0]


def _attached_fwd(block: Array, handle: Array) -> tuple[Array, Array]:
    wide = block.astype(jnp.promote_types(block.dtype, handle.dtype))
    return wide, jnp.zeros((0,), handle.dtype)


def _attached_bwd(like: Array, gradient: Array) -> tuple[None, Array]:
    return None, gradient.astype(like.dtype)


_attached.defvjp(_attached_fwd, _attached_bwd)
