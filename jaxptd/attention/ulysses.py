"""Ulysses: all-to-alls around attention, from a share of the tokens to a share of the heads.

Devices along an axis of u split each block of a sequence between layers. Before attention every
device sends, to each of the others, the heads that it attends with, and then has 1/u of the heads
of the whole block; afterwards outputs return. What lies between does not know of it: a kernel, or a
ring that shares the whole sequence with other devices.

A device that receives fewer than one head of keys and values receives a whole one, which several
devices share. It is repeated before it is sent, so that gradients add up on their way back.

Letters: T local tokens between layers, u devices, N heads, H head size.
Source: Jacobs et al., arXiv 2309.14509; Fang and Zhao, arXiv 2405.07719 (with a ring).
"""

import jax.numpy as jnp
from jax import Array, lax


def to_heads(x: Array, axis: str) -> Array:
    """x[.., T, N, H] -> [.., u T, N / u, H], at least one head: all-to-all along `axis`.

    Raises:
        ValueError: neither do the heads split over the devices, nor the devices over the heads.
    """
    devices, heads = lax.axis_size(axis), x.shape[-2]
    if heads % devices and devices % heads:
        raise ValueError(f"{heads} heads do not split over {axis}={devices}, nor the reverse")
    each = max(1, heads // devices)
    x = jnp.repeat(x, each * devices // heads, -2)
    blocks = x.reshape(*x.shape[:-2], devices, each, x.shape[-1])
    parts = jnp.moveaxis(_exchange(jnp.moveaxis(blocks, -3, 0), axis), 0, -4)
    return parts.reshape(*x.shape[:-3], -1, each, x.shape[-1])


def to_tokens(x: Array, axis: str) -> Array:
    """x[.., u T, N / u, H] -> [.., T, N, H]. Undoes `to_heads` where no head was repeated."""
    devices, (length, heads, size) = lax.axis_size(axis), x.shape[-3:]
    blocks = x.reshape(*x.shape[:-3], devices, length // devices, heads, size)
    parts = jnp.moveaxis(_exchange(jnp.moveaxis(blocks, -4, 0), axis), 0, -3)
    return parts.reshape(*x.shape[:-3], length // devices, devices * heads, size)


def _exchange(blocks: Array, axis: str) -> Array:
    """Sends block i of a leading dim to device i, and receives one from each; backward: the same.

    A leading dim: given another one, XLA for GPUs would lay out all arrays around it accordingly.
    """
    return lax.all_to_all(blocks, axis, 0, 0, tiled=True)
