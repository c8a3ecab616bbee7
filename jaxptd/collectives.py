"""Collectives in conjugate pairs: a collective's backward is its partner's forward.

| function         | forward                      | backward          | partner          |
|------------------|------------------------------|-------------------|------------------|
| `copy_to`        | nothing                      | all-reduce        | `reduce_from`    |
| `reduce_from`    | all-reduce                   | nothing           | `copy_to`        |
| `scatter_to`     | nothing: takes local block   | all-gather        | `gather_from`    |
| `gather_from`    | all-gather                   | nothing           | `scatter_to`     |
| `all_gather`     | all-gather                   | reduce-scatter    | `reduce_scatter` |
| `reduce_scatter` | reduce-scatter               | all-gather        | `all_gather`     |
| `shift`          | permute to the next device   | permute backwards | itself, reversed |
| `broadcast`      | broadcast (or all-reduce)    | all-reduce        | `reduce_to`      |
| `reduce_to`      | all-reduce                   | broadcast         | `broadcast`      |

The first two pairs convert between replicated values and blocks (tensor parallelism), the third
between blocks of the sequence and blocks of the hidden dim (sequence parallelism): every device has
the same result of `all_gather`, but computes something different from it. Rings use `shift`, and
matmuls on a grid use all of the last three pairs; the grid defines its backward itself.
`all_gather` and `reduce_scatter` move blocks along a new leading dim: given the real dim, XLA for
GPUs would put that dim first in the layout of all arrays around it, and copy for kernels that want
another layout.

Under `check_vma=True` the type of a value says along which axes it varies. Only `varying_axes` and
`as_varying` use that part of the type, because its spelling differs between versions of JAX.

Source: Shoeybi et al., arXiv 1909.08053 (f and g); Korthikanti et al., arXiv 2205.05198 (g, g-bar).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.mesh import Axis

T = TypeVar("T")
Axes = str | tuple[str, ...]  # several axes act as one, devices numbered in row-major order


def varying_axes(x: Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """The mesh axes along which `x`, an array or its shape, differs from device to device."""
    shape = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return frozenset(shape.manual_axis_type.varying)


def as_varying(x: Array, axes: Iterable[str]) -> Array:
    """Types `x` as varying also over `axes`, without communication; backward: all-reduce."""
    known = varying_axes(x)
    missing = tuple(axis for axis in axes if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def as_same(x: Array, *, but: Iterable[str] = ()) -> Array:
    """`x`, the same along all axes `but` some, typed as varying over none: an all-reduce (max)."""
    axes = sorted(varying_axes(x) - set(but))
    return lax.pmax(x, tuple(axes)) if axes else x


def alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, each typed as varying over the union of their varying axes."""
    axes = sorted(frozenset().union(*(varying_axes(x) for x in arrays)))
    return tuple(as_varying(x, axes) for x in arrays)


def after(tree: T, others: Any) -> T:
    """Makes XLA read a tree's arrays only when all of them and all of another tree are computed.

    XLA may not wait for an array that nobody reads from here. Before jax 0.11 all results of a
    barrier vary over the same axes, so there the tree is returned without one.
    """
    if jax.__version_info__ < (0, 11):
        return tree
    arrays, structure = jax.tree.flatten(tree)
    waited = lax.optimization_barrier((arrays, jax.tree.leaves(others)))[0]
    return cast(T, jax.tree.unflatten(structure, waited))


def copy_to(x: Array, axis: str) -> Array:
    """x -> x, for different uses along `axis`; backward: all-reduce. Partner: `reduce_from`."""
    return lax.pcast(x, axis, to="varying")


def reduce_from(x: Array, axis: str) -> Array:
    """x{+axis} -> x: all-reduce; backward: nothing. Partner: `copy_to`."""
    return lax.psum(x, axis)


def local_block(x: Array, axis: str, dim: int) -> Array:
    """x[.., n, ..] -> x[.., n/axis, ..]: this device's block of `dim`.

    Raises:
        ValueError: `dim` does not split over `axis`.
    """
    size, blocks = x.shape[dim], lax.axis_size(axis)
    if size % blocks:
        raise ValueError(f"dim {dim} of {x.shape} does not split over {axis}={blocks}")
    start = lax.axis_index(axis) * (size // blocks)
    return lax.dynamic_slice_in_dim(as_varying(x, [axis]), start, size // blocks, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter_to(x: Array, axis: str, dim: int = -1) -> Array:
    """x[.., n] -> x[.., n/axis]: local block; backward: all-gather. Partner: `gather_from`."""
    return local_block(x, axis, dim)


def _scatter_fwd(x: Array, axis: str, dim: int) -> tuple[Array, None]:
    return local_block(x, axis, dim), None


def _scatter_bwd(axis: str, dim: int, _: None, dy: Array) -> tuple[Array]:
    return (gather_from(dy, axis, dim),)


scatter_to.defvjp(_scatter_fwd, _scatter_bwd)


def gather_from(x: Array, axis: Axes, dim: int = -1) -> Array:
    """x[.., n/axis] -> x[.., n]: all-gather; backward: local block. Partner: `scatter_to`."""
    return lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True, to="invarying")


def all_gather(x: Array, axis: Axes, dim: int = 1) -> Array:
    """x[B, T/axis, D] -> x[B, T, D]: all-gather; backward: reduce-scatter.

    Partner: `reduce_scatter`.
    """
    dim %= x.ndim
    y = jnp.moveaxis(lax.all_gather(x, axis), 0, dim)
    return y.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def reduce_scatter(x: Array, axis: Axes, dim: int = 1) -> Array:
    """x[B, T, D]{+axis} -> x[B, T/axis, D]: reduce-scatter; backward: all-gather.

    Partner: `all_gather`.
    """
    dim %= x.ndim
    y = x.reshape(*x.shape[:dim], lax.axis_size(axis), -1, *x.shape[dim + 1 :])
    return lax.psum_scatter(jnp.moveaxis(y, dim, 0), axis)


def shift(x: Array, axis: Axes, by: int = 1) -> Array:
    """Receives the x of the device `by` places before this one in the ring along `axis`: permute.

    Backward: permute. Partner: itself, in the other direction.
    """
    size = lax.axis_size(axis)
    return permute(x, axis, [(i, (i + by) % size) for i in range(size)])


def permute(x: Array, axis: Axes, pairs: Sequence[tuple[int, int]]) -> Array:
    """Receives the x of the device that is paired with this one.

    Args:
        x: one value per device.
        axis: mesh axis, or several.
        pairs: (source, target) for every device along `axis`.
    """
    if permutes_natively():
        return lax.ppermute(x, axis, pairs)
    return permute_by_gather(x, axis, pairs)


def permutes_natively() -> bool:
    """True if every loop of this mesh's devices can use XLA's permute.

    XLA for CPUs synchronises all devices of the mesh in a permute. That deadlocks in a loop whose
    number of iterations differs between devices, as it does between the stages of a pipeline.
    """
    return traced_for_gpus() or jax.sharding.get_abstract_mesh().shape.get(Axis.PP, 1) == 1


def traced_for_gpus() -> bool:
    """True if the surrounding shard_map is over GPUs."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform in ("gpu", "cuda")


def permute_by_gather(x: Array, axis: Axes, pairs: Sequence[tuple[int, int]]) -> Array:
    """`permute` as an all-gather along the axes that values move along, followed by a choice.

    Unlike XLA's permute, an all-gather synchronises only the devices along its axes.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    sizes = [lax.axis_size(each) for each in axes]
    moved = moved_along(pairs, sizes)
    if not moved:
        return x
    source_of = np.array([source for source, _ in sorted(pairs, key=lambda pair: pair[1])])
    coordinates = [np.unravel_index(source_of, sizes)[i] for i in moved]
    number = np.ravel_multi_index(coordinates, [sizes[i] for i in moved])
    x, _ = alike(x, lax.axis_index(axes))
    every = lax.all_gather(x, tuple(axes[i] for i in moved))
    mine = jnp.asarray(number, jnp.int32)[lax.axis_index(axes)]
    return lax.dynamic_index_in_dim(every, mine, 0, keepdims=False)


def moved_along(pairs: Iterable[tuple[int, int]], sizes: Sequence[int]) -> list[int]:
    """Indices of the axes along which a permute moves anything.

    Args:
        pairs: (source, target), devices numbered through over all axes.
        sizes: devices along each axis.
    """
    coordinates = np.array(np.unravel_index(np.array(list(pairs)), sizes))
    differ = (coordinates[..., 0] != coordinates[..., 1]).any(axis=1)
    return np.nonzero(differ)[0].tolist()


def broadcast(x: Array, axis: str, source: int | Array) -> Array:
    """Receives the x of device `source` along `axis`. Partner: `reduce_to`.

    GPUs run XLA's broadcast, which needs the same source for all groups along `axis`. In other
    cases, and on CPUs, it is an all-reduce to which the other devices add zeros.

    Args:
        x: one value per device.
        axis: mesh axis.
        source: an int, the same for all groups along `axis`, or an array for each device's group.
    """
    if isinstance(source, int) and traced_for_gpus():
        return lax.pbroadcast(as_varying(x, [axis]), (axis,), source)
    mine = jnp.where(lax.axis_index(axis) == source, x, jnp.zeros_like(x))
    return as_varying(lax.psum(mine, axis), [axis])


def reduce_to(x: Array, axis: str, target: int | Array) -> Array:
    """x{+axis} -> its sum on device `target` along `axis`, zeros elsewhere. Partner: `broadcast`.

    Uses an all-reduce, because JAX has no reduction to one device.
    """
    total = lax.psum(x, axis)
    return jnp.where(lax.axis_index(axis) == target, total, jnp.zeros_like(total))
