"""Copies between host and device memory; the memory of an array is in its JAX type."""

from typing import Any

import jax
from jax import Array


def is_on_host(x: Array) -> bool:
    """True for an array in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def on_device(tree: Any) -> Any:
    """Copies arrays in host memory to the device; others are as they were."""

    def copied(x: Array) -> Array:
        return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x

    return jax.tree.map(copied, tree)


def on_host(x: Array) -> Array:
    """Copies an array to host memory."""
    return jax.device_put(x, jax.memory.Space.Host)
