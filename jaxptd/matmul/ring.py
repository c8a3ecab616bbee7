"""Matmuls whose gather or reduce-scatter runs around a ring, each hop hidden by a piece of matmul.

With the sequence sharded over n devices, the first matmul of a pair needs every device's block of
x, and the second leaves on every device a partial sum for every block. Instead of one collective
before or after the whole matmul:

| product           | computes at each of n steps              | sends, in n-1 hops            |
|-------------------|------------------------------------------|-------------------------------|
| `gather_product`  | y of the block of x that has arrived     | blocks of x                   |
| `product_scatter` | a partial sum for the block that is next | partial sums, to their owners |
| `visited_sums`    | any function of the block that arrived   | blocks, then sums after them  |

The derivative of x (of h) is the other of the two, with w transposed; that of w is a sum over
blocks, computed while the blocks of x (of dy) pass once more. So no gathered array is saved for
backward. Where a pipeline's schedule splits backward, blocks of dy pass in both halves; see
`pipeline/split_backward.py`.

Barriers between steps keep each hop from starting before the matmul that the previous hop
overlapped is done, and XLA from merging the steps' matmuls into one.

Letters: B batch, T position, D model, F hidden, n devices of the ring.
Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models, ASPLOS 2023.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.collectives import Axes, alike, as_varying, shift, varying_axes
from jaxptd.matmul.precision import COLUMNS_BY_COLUMNS, BlockMatmul, Dims, block_matmul

LAST_BY_FIRST: Dims = ((2,), (0,))  # x[B, T, D] w[D, F]
AGAIN = "passes again"  # names blocks that need not be saved: they may pass once more


def gather_product(
    x: Array, w: Array, axis: Axes, block_matmul: BlockMatmul = block_matmul
) -> Array:
    """x[B, T/n, D], w[D, *out] -> y[B, T, *out], in x's precision; blocks by `block_matmul`."""
    x, w, _ = alike(x, w, lax.axis_index(axis))
    return _gather_product(x, w, axis, block_matmul)


def product_scatter(
    h: Array,
    w: Array,
    axis: Axes,
    block_matmul: BlockMatmul = block_matmul,
    beside: tuple[Array, Array] | None = None,
) -> Array:
    """h[B, T, *in], w[*in, D] -> y[B, T/n, D]: the sum over the ring, in the precision of h.

    Args:
        h: this device's.
        w: this device's.
        axis: of the ring.
        block_matmul: multiplies blocks.
        beside: two more factors, `[B, T, R]` and `[R, D]`, whose product is part of the sum.

    Raises:
        ValueError: T does not split over the ring.
    """
    length, size = h.shape[1], lax.axis_size(axis)
    if length % size:
        raise ValueError(f"{length} tokens do not split over {axis}={size}")
    *arrays, _ = alike(h, w, *(beside or ()), lax.axis_index(axis))
    return _product_scatter(tuple(arrays[::2]), tuple(arrays[1::2]), axis, block_matmul)


def visited_sums(function: Callable[..., Array], x: Any, fixed: Array, w: Any, axis: Axes) -> Array:
    """The sum over the ring's devices of `function(x, fixed, w)`, for each device's x.

    A device's x passes all others, each of which computes with its own w. Backward x passes once
    more, with the gradient of its sum.

    Args:
        function: returns one array; its derivative is taken while x is there.
        x: arrays with gradients, a block of this device.
        fixed: an array without one, which passes with x.
        w: arrays of this device.
        axis: of the ring.
    """
    arrays, tree = jax.tree.flatten((x, fixed, w))
    *arrays, _ = alike(*arrays, lax.axis_index(axis))
    return _visited_sums(*jax.tree.unflatten(tree, arrays), function, axis)


# ---- derivatives: residuals are the inputs, of any dims; everything below them uses matrices -----

Residuals = tuple[Array, Array]
Several = tuple[Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gather_product(x: Array, w: Array, axis: Axes, block_matmul: BlockMatmul) -> Array:
    y = _times_each(x, as_matrix(w, 1).astype(x.dtype), axis, block_matmul)[0]
    return y.reshape(*y.shape[:2], *w.shape[1:])


def _gather_product_bwd(
    axis: Axes, block_matmul: BlockMatmul, residuals: Residuals, dy: Array
) -> Residuals:
    x, w = residuals
    dy = dy.reshape(*dy.shape[:2], -1)
    w_FD = as_matrix(w, 1).astype(x.dtype).T
    dx, dw = _sum_of_each(dy, w_FD, axis, partial(block_matmul, gradient=0), passing=x)
    return dx, dw.reshape(w.shape).astype(w.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product_scatter(h: Several, w: Several, axis: Axes, block_matmul: BlockMatmul) -> Array:
    return _sum_of_each(*_as_one(h, w), axis, block_matmul)[0]


def _product_scatter_bwd(
    axis: Axes, block_matmul: BlockMatmul, residuals: tuple[Several, Several], dy: Array
) -> tuple[Several, Several]:
    h, w = residuals
    rows, w_FD = _as_one(h, w)
    dh, dw = _times_each(dy, w_FD.T, axis, partial(block_matmul, gradient=0), other=rows)
    columns = [math.prod(each.shape[:-1]) for each in w]
    dhs, dws = lax.split(dh, columns, 2), lax.split(dw, columns, 0)
    return (
        tuple(part.reshape(each.shape) for part, each in zip(dhs, h, strict=True)),
        tuple(p.reshape(x.shape).astype(x.dtype) for p, x in zip(dws, w, strict=True)),
    )


def _as_one(h: Several, w: Several) -> tuple[Array, Array]:
    """Factors h[B, T, *in] and w[*in, D] of a sum of products -> those of one, `in` flattened."""
    rows = [each.reshape(*each.shape[:2], -1) for each in h]
    matrices = [as_matrix(each, each.ndim - 1).astype(h[0].dtype) for each in w]
    if len(h) == 1:
        return rows[0], matrices[0]
    return jnp.concatenate(rows, 2), jnp.concatenate(matrices, 0)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _visited_sums(x: Any, fixed: Array, w: Any, function: Callable[..., Array], axis: Axes) -> Any:
    return _visits((x, fixed), lambda block: (function(*block, w), ()), axis)[0]


def _visited_sums_fwd(
    x: Any, fixed: Array, w: Any, function: Callable[..., Array], axis: Axes
) -> Any:
    return _visited_sums(x, fixed, w, function, axis), (x, fixed, w)


def _visited_sums_bwd(function: Callable[..., Array], axis: Axes, saved: Any, dy: Array) -> Any:
    x, fixed, w = saved

    def gradients(block: Any) -> Any:
        x, fixed, dy = block
        dx, dw = jax.vjp(lambda x, w: function(x, fixed, w), x, w)[1](dy)
        # Added up over blocks in float32 at least: in bfloat16 256 + 1 is 256.
        return dx, jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), dw)

    dx, dw = _visits((x, fixed, dy), gradients, axis)
    return dx, None, jax.tree.map(lambda g, p: g.astype(p.dtype), dw, w)


_visited_sums.defvjp(_visited_sums_fwd, _visited_sums_bwd)


def _forward(
    product: Any, x: Any, w: Any, axis: Axes, block_matmul: BlockMatmul
) -> tuple[Array, Any]:
    return product(x, w, axis, block_matmul), (x, w)


_gather_product.defvjp(partial(_forward, _gather_product), _gather_product_bwd)
_product_scatter.defvjp(partial(_forward, _product_scatter), _product_scatter_bwd)


def as_matrix(w: Array, contract: int) -> Array:
    """w whose first `contract` dims are contracted -> a matrix [contracted, others]."""
    return w.reshape(math.prod(w.shape[:contract]), -1)


# ---- passes around the ring: a hop is in flight during each step but the last --------------------


def _times_each(
    x: Array, w: Array, axis: Axes, block_matmul: BlockMatmul, other: Array | None = None
) -> tuple[Array, Any]:
    """x[B, T/n, D], w[D, F] -> y[B, T, F], x w for every device's block of x.

    With other = h[B, T, G] it also returns h^T x over all blocks, [G, D]; x is a gradient then.
    """
    me, size = lax.axis_index(axis), lax.axis_size(axis)
    y, dw = _zeros((x.shape[0], x.shape[1] * size, w.shape[-1]), x), None
    for step in range(size):
        x, y = lax.optimization_barrier((x, y))
        source, block = (me - step) % size, x
        x = checkpoint_name(shift(x, axis), AGAIN) if step < size - 1 else x
        y = _put(y, block_matmul(block, w, LAST_BY_FIRST, block.dtype), source)
        if other is not None:
            dw = _added(dw, _transposed_times(_take(other, source, size), block, block_matmul))
    return y, dw


def _sum_of_each(
    h: Array, w: Array, axis: Axes, block_matmul: BlockMatmul, passing: Array | None = None
) -> tuple[Array, Any]:
    """h[B, T, F], w[F, D] -> this device's block of the sum over devices of h w, [B, T/n, D].

    With passing = x[B, T/n, G], whose blocks also pass, it also returns x^T h over all blocks, [G,
    F]; h is a gradient then.
    """
    me, size = lax.axis_index(axis), lax.axis_size(axis)
    x, before, dw = passing, _take(h, me, size), None
    total: Any = None
    for step in range(size):
        total, h = lax.optimization_barrier((total, h))
        x, dw = lax.optimization_barrier((x, dw))
        arrived, block = None if total is None else shift(total, axis), x
        x = x if x is None or step == size - 1 else shift(x, axis)
        if block is not None:
            dw = _added(dw, _transposed_times(block, before, block_matmul))
        before = _take(h, (me - 1 - step) % size, size)
        # Without this barrier the matmul would add to what arrived, and so wait for it.
        term = block_matmul(before, w, LAST_BY_FIRST, before.dtype)
        total = _added(arrived, lax.optimization_barrier(term))
    return total, dw


def _visits(block: Any, work: Callable[[Any], tuple[Any, Any]], axis: Axes) -> tuple[Any, Any]:
    """Sums of what devices make of this device's block, and of what this one makes of all blocks.

    work: a block -> a tree of the first sums' terms, and a tree of the second's.
    """
    size = lax.axis_size(axis)
    own, total, stays = None, None, None
    for step in range(size):
        block, total, stays = lax.optimization_barrier((block, total, stays))
        arrived, here = jax.tree.map(partial(shift, axis=axis), total), block
        if step < size - 1:
            block = jax.tree.map(partial(shift, axis=axis), block)
        term, stay = lax.optimization_barrier(work(here))
        stays = stay if stays is None else jax.tree.map(jnp.add, stays, stay)
        if step == 0:  # the sum of the others follows the block, and ends here
            own = term
        else:
            total = term if total is None else jax.tree.map(jnp.add, arrived, term)
    if total is None:
        return own, stays
    return jax.tree.map(lambda own, x: own + shift(x, axis), own, total), stays


def _added(total: Array | None, term: Array) -> Array:
    return term if total is None else total + term


def _transposed_times(x: Array, y: Array, block_matmul: BlockMatmul) -> Array:
    """x^T y, contracted over all tokens, in float32 or wider; y is a gradient."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x, y = (each.reshape(-1, each.shape[-1]) for each in (x, y))
    return block_matmul(x, y, COLUMNS_BY_COLUMNS, wide, gradient=1)


def _zeros(shape: tuple[int, ...], like: Array) -> Array:
    return as_varying(jnp.zeros(shape, like.dtype), sorted(varying_axes(like)))


def _take(every: Array, source: Array, size: int) -> Array:
    """The block of device `source` in `every`, which holds the blocks of `size` devices."""
    length = every.shape[1] // size
    return lax.dynamic_slice_in_dim(every, source * length, length, 1)


def _put(every: Array, x: Array, source: Array) -> Array:
    """Writes x into `every` as the block of device `source`."""
    return lax.dynamic_update_slice_in_dim(every, x, source * x.shape[1], 1)
