"""Collectives in conjugate pairs: what one moves forward, its partner moves backward.

| function         | forward moves              | backward moves | partner          |
|------------------|----------------------------|----------------|------------------|
| `copy_to`        | nothing                    | all-reduce     | `reduce_from`    |
| `reduce_from`    | all-reduce                 | nothing        | `copy_to`        |
| `scatter_to`     | nothing: keep own block    | all-gather     | `gather_from`    |
| `gather_from`    | all-gather                 | nothing        | `scatter_to`     |
| `all_gather`     | all-gather                 | reduce-scatter | `reduce_scatter` |
| `reduce_scatter` | reduce-scatter             | all-gather     | `all_gather`     |
| `shift`          | permute, to the next one   | permute, back  | itself, turned   |
| `broadcast`      | broadcast (or all-reduce)  | all-reduce     | `reduce_to`      |
| `reduce_to`      | all-reduce                 | broadcast      | `broadcast`      |

The first two pairs stand between replicated values and blocks (tensor parallelism), the third
between blocks of the sequence and blocks of the hidden dim (sequence parallelism): what leaves
`all_gather` is whole on every device, but each device will make something else of it. `shift`
stands in rings, it and the last two inside the products of a grid; both have a backward of their
own. `all_gather` and `reduce_scatter` put blocks first and move them by themselves: told the dim,
XLA for GPUs lays all around it with that dim first, and copies where a kernel wants another.

Under `check_vma=True` the type of a value says along which axes it varies; only `varying_axes`
and `as_varying` touch that type, because its spelling differs between versions of JAX.

Source: Shoeybi et al., arXiv 1909.08053 (f and g); Korthikanti et al., arXiv 2205.05198 (g, g-bar).
"""

from collections.abc import Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Axes = str | tuple[str, ...]  # several are one, numbered through


def varying_axes(x: Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """The mesh axes along which `x`, an array or its shape, differs from device to device."""
    shape = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return frozenset(shape.manual_axis_type.varying)


def as_varying(x: Array, axes: Iterable[str]) -> Array:
    """`x`, typed as varying over `axes` too. Moves nothing; its gradient is summed over those."""
    known = varying_axes(x)
    missing = tuple(axis for axis in axes if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def as_same(x: Array) -> Array:
    """`x`, of which every device has the same numbers, typed as varying nowhere: an all-reduce."""
    axes = sorted(varying_axes(x))
    return lax.pmax(x, tuple(axes)) if axes else x


def alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, each varying over every axis that one of them varies over."""
    axes = sorted(frozenset().union(*(varying_axes(x) for x in arrays)))
    return tuple(as_varying(x, axes) for x in arrays)


def copy_to(x: Array, axis: str) -> Array:
    """x -> x, to be used differently along `axis`; backward: all-reduce. Partner: `reduce_from`."""
    return lax.pcast(x, axis, to="varying")


def reduce_from(x: Array, axis: str) -> Array:
    """x{+axis} -> x: all-reduce; backward: nothing. Partner: `copy_to`."""
    return lax.psum(x, axis)


def local_block(x: Array, axis: str, dim: int) -> Array:
    """x[.., n, ..] -> x[.., n/axis, ..]: this device's block of `dim`.

    Raises:
        ValueError: `dim` does not split over `axis`.
    """
    size, parts = x.shape[dim], lax.axis_size(axis)
    if size % parts:
        raise ValueError(f"dim {dim} of {x.shape} does not split over {axis}={parts}")
    start = lax.axis_index(axis) * (size // parts)
    return lax.dynamic_slice_in_dim(as_varying(x, [axis]), start, size // parts, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter_to(x: Array, axis: str, dim: int = -1) -> Array:
    """x[.., n] -> x[.., n/axis]: own block; backward: all-gather. Partner: `gather_from`."""
    return local_block(x, axis, dim)


def _scatter_fwd(x: Array, axis: str, dim: int) -> tuple[Array, None]:
    return local_block(x, axis, dim), None


def _scatter_bwd(axis: str, dim: int, _: None, dy: Array) -> tuple[Array]:
    return (gather_from(dy, axis, dim),)


scatter_to.defvjp(_scatter_fwd, _scatter_bwd)


def gather_from(x: Array, axis: str, dim: int = -1) -> Array:
    """x[.., n/axis] -> x[.., n]: all-gather; backward: own block. Partner: `scatter_to`."""
    return lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True, to="invarying")


def all_gather(x: Array, axis: str, dim: int = 1) -> Array:
    """x[B, T/axis, D] -> x[B, T, D]: all-gather; backward: reduce-scatter.

    Partner: `reduce_scatter`.
    """
    dim %= x.ndim
    y = jnp.moveaxis(lax.all_gather(x, axis), 0, dim)
    return y.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def reduce_scatter(x: Array, axis: str, dim: int = 1) -> Array:
    """x[B, T, D]{+axis} -> x[B, T/axis, D]: reduce-scatter; backward: all-gather.

    Partner: `all_gather`.
    """
    dim %= x.ndim
    y = x.reshape(*x.shape[:dim], lax.axis_size(axis), -1, *x.shape[dim + 1 :])
    return lax.psum_scatter(jnp.moveaxis(y, dim, 0), axis)


def shift(x: Array, axis: Axes, by: int = 1, *, native: bool = True) -> Array:
    """x -> what the device `by` places before this one along `axis`, a ring, has: permute.

    Backward: permute. Partner: itself, with the ring turned round.
    """
    size = lax.axis_size(axis)
    return permute(x, axis, [(i, (i + by) % size) for i in range(size)], native=native)


def permute(x: Array, axis: Axes, pairs: Sequence[tuple[int, int]], *, native: bool) -> Array:
    """x -> what the device that is paired with this one has.

    Args:
        x: of which each device has its own.
        axis: of the mesh.
        pairs: (source, target) for every device along `axis`.
        native: by XLA's permute. XLA for CPUs brings all devices of the mesh together for it, which
            a loop cannot do whose trips differ from device to device, as in a pipeline's stages:
            there by an all-gather along the axes that it moves along, of which one part is taken.
    """
    if native:
        return lax.ppermute(x, axis, pairs)
    axes = axis if isinstance(axis, tuple) else (axis,)
    sizes = [lax.axis_size(each) for each in axes]
    moved = moved_along(pairs, sizes)
    if not moved:
        return x
    source_of = np.array([source for source, _ in sorted(pairs, key=lambda pair: pair[1])])
    places = [np.unravel_index(source_of, sizes)[i] for i in moved]
    number = np.ravel_multi_index(places, [sizes[i] for i in moved])
    x, _ = alike(x, lax.axis_index(axes))
    every = lax.all_gather(x, tuple(axes[i] for i in moved))
    mine = jnp.asarray(number, jnp.int32)[lax.axis_index(axes)]
    return lax.dynamic_index_in_dim(every, mine, 0, keepdims=False)


def moved_along(pairs: Iterable[tuple[int, int]], sizes: Sequence[int]) -> list[int]:
    """Which of several axes of these sizes, numbered through, a permute moves anything along."""
    places = np.array(np.unravel_index(np.array(list(pairs)), sizes))
    differ = (places[..., 0] != places[..., 1]).any(axis=1)
    return np.nonzero(differ)[0].tolist()


def broadcast(x: Array, axis: str, source: int | Array, *, native: bool = False) -> Array:
    """x -> what device `source` along `axis` has. Partner: `reduce_to`.

    Args:
        x: of which each device has its own.
        axis: of the mesh.
        source: a number that all groups along `axis` share, or one for each device's group.
        native: by XLA's broadcast, which GPUs have and CPUs have not; its source must be shared.
            Else by an all-reduce, to which the other devices add zeros.
    """
    if native and isinstance(source, int):
        return lax.pbroadcast(as_varying(x, [axis]), (axis,), source)
    mine = jnp.where(lax.axis_index(axis) == source, x, jnp.zeros_like(x))
    return as_varying(lax.psum(mine, axis), [axis])


def reduce_to(x: Array, axis: str, target: int | Array) -> Array:
    """x{+axis} -> its sum on device `target` along `axis`, zeros elsewhere. Partner: `broadcast`.

    JAX has no reduction to one device: an all-reduce.
    """
    total = lax.psum(x, axis)
    return jnp.where(lax.axis_index(axis) == target, total, jnp.zeros_like(total))
