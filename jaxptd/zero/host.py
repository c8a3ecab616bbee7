"""Copies between host and device memory, and functions that the host's CPUs compute.

The memory of an array is in its JAX type.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.experimental import compute_on, layout


def is_on_host(x: Array) -> bool:
    """True for an array in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def on_device(tree: Any) -> Any:
    """Copies arrays in host memory to the device; others are as they were."""

    def copied(x: Array) -> Array:
        return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x

    return jax.tree.map(copied, tree)


def on_host(tree: Any) -> Any:
    """Copies arrays on the device to host memory; others are as they were."""

    def copied(x: Array) -> Array:
        return x if is_on_host(x) else jax.device_put(x, jax.memory.Space.Host)

    return jax.tree.map(copied, tree)


def computed_on_host(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, computed by the host's CPUs; its results are in host memory."""
    run: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)  # 0.10.2 has the first
    computed = run(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return computed(*on_host(jax.tree.map(_by_rows, arguments)))


def _by_rows(x: Array) -> Array:
    """x with its last dim the fastest; XLA for GPUs refuses to give the host another layout."""
    if is_on_host(x):
        return x
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))
