"""Products whose gather or reduce-scatter goes round a ring, each hop under a part of them.

With the sequence cut over n devices, the first product of a pair needs every device's block of x,
and the second leaves on every device a part of a sum for every block. Instead of one collective
before or after the whole product:

| product           | at each of n steps                         | what travels, n-1 hops     |
|-------------------|--------------------------------------------|----------------------------|
| `gather_product`  | y of the block that is there               | blocks of x                |
| `product_scatter` | the part for the block whose sum comes now | sums, to where they belong |

The derivative of x (of h) is the other product, with w transposed; that of w is a sum of parts,
too, made as the blocks of x (of dy) come by once more. So nothing whole is kept for backward.

Barriers between steps: no hop leaves before the part is done over which the one before it lay, and
XLA does not glue the parts together to one product again.

Letters: B batch, T position, D model, F hidden, n devices of the ring.
Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models, ASPLOS 2023.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.attention.ring import Ring
from jaxptd.collectives import alike, as_varying, varying_axes


def gather_product(x: Array, w: Array, ring: Ring) -> Array:
    """x[B, T/n, D], w[D, *out] -> y[B, T, *out], in the precision of x."""
    x, w, _ = alike(x, w, lax.axis_index(ring.axis))
    return _gather_product(x, w, ring)


def product_scatter(h: Array, w: Array, ring: Ring) -> Array:
    """h[B, T, *in], w[*in, D] -> y[B, T/n, D]: the sum over the ring, in the precision of h.

    Raises:
        ValueError: T does not split over the ring.
    """
    length, size = h.shape[1], lax.axis_size(ring.axis)
    if length % size:
        raise ValueError(f"{length} tokens do not split over {ring.axis}={size}")
    h, w, _ = alike(h, w, lax.axis_index(ring.axis))
    return _product_scatter(h, w, ring)


# ---- derivatives: what is kept is what came in, of any dims; all beyond works on matrices --------

Kept = tuple[Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_product(x: Array, w: Array, ring: Ring) -> Array:
    y = _times_each(x, as_matrix(w, 1).astype(x.dtype), ring)[0]
    return y.reshape(*y.shape[:2], *w.shape[1:])


def _gather_product_bwd(ring: Ring, kept: Kept, dy: Array) -> Kept:
    x, w = kept
    dy = dy.reshape(*dy.shape[:2], -1)
    dx, dw = _sum_of_each(dy, as_matrix(w, 1).astype(x.dtype).T, ring, bring=x)
    return dx, dw.reshape(w.shape).astype(w.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product_scatter(h: Array, w: Array, ring: Ring) -> Array:
    rows = h.reshape(*h.shape[:2], -1)
    return _sum_of_each(rows, as_matrix(w, w.ndim - 1).astype(h.dtype), ring)[0]


def _product_scatter_bwd(ring: Ring, kept: Kept, dy: Array) -> Kept:
    h, w = kept
    rows = h.reshape(*h.shape[:2], -1)
    w_DF = as_matrix(w, w.ndim - 1).astype(h.dtype).T
    dh, dw = _times_each(dy, w_DF, ring, other=rows)
    return dh.reshape(h.shape), dw.reshape(w.shape).astype(w.dtype)


def _keep(product: Any, x: Array, w: Array, ring: Ring) -> tuple[Array, Kept]:
    return product(x, w, ring), (x, w)


_gather_product.defvjp(partial(_keep, _gather_product), _gather_product_bwd)
_product_scatter.defvjp(partial(_keep, _product_scatter), _product_scatter_bwd)


def as_matrix(w: Array, contract: int) -> Array:
    """w of which the first `contract` dims are summed over -> [these, the others]."""
    return w.reshape(math.prod(w.shape[:contract]), -1)


# ---- rounds: a hop is under way during each step but the last -----------------------------------


def _times_each(x: Array, w: Array, ring: Ring, other: Array | None = None) -> tuple[Array, Any]:
    """x[B, T/n, D], w[D, F] -> y[B, T, F], x w of every device's block.

    And, of another h[B, T, G], h^T x over all blocks, [G, D].
    """
    me, size = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    y, dw = _zeros((x.shape[0], x.shape[1] * size, w.shape[-1]), x), None
    for step in range(size):
        x, y = lax.optimization_barrier((x, y))
        source, now = (me - step) % size, x
        x = ring.shift(x) if step < size - 1 else x
        y = _put(y, now @ w, source)
        if other is not None:
            dw = _added(dw, _transposed_times(_take(other, source, size), now))
    return y, dw


def _sum_of_each(h: Array, w: Array, ring: Ring, bring: Array | None = None) -> tuple[Array, Any]:
    """h[B, T, F], w[F, D] -> the own block of the sum of all h w, [B, T/n, D].

    And, of a block x[B, T/n, G] to bring, x^T h over all blocks, [G, F].
    """
    me, size = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    x, before, dw = bring, _take(h, me, size), None
    total: Any = None
    for step in range(size):
        total, h = lax.optimization_barrier((total, h))
        x, dw = lax.optimization_barrier((x, dw))
        arrived, now = None if total is None else ring.shift(total), x
        x = x if x is None or step == size - 1 else ring.shift(x)
        if now is not None:
            dw = _added(dw, _transposed_times(now, before))
        before = _take(h, (me - 1 - step) % size, size)
        # Apart, or the product would add to what arrived, and wait for it.
        total = _added(arrived, lax.optimization_barrier(before @ w))
    return total, dw


def _added(total: Array | None, part: Array) -> Array:
    return part if total is None else total + part


def _transposed_times(x: Array, y: Array) -> Array:
    """x^T y of all tokens, float32 at least."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x, y = (each.reshape(-1, each.shape[-1]) for each in (x, y))
    return jnp.matmul(x.T, y, preferred_element_type=wide)


def _zeros(shape: tuple[int, ...], like: Array) -> Array:
    return as_varying(jnp.zeros(shape, like.dtype), sorted(varying_axes(like)))


def _take(every: Array, source: Array, size: int) -> Array:
    """The block of device `source`."""
    length = every.shape[1] // size
    return lax.dynamic_slice_in_dim(every, source * length, length, 1)


def _put(every: Array, x: Array, source: Array) -> Array:
    """`every` with the block of device `source`."""
    return lax.dynamic_update_slice_in_dim(every, x, source * x.shape[1], 1)
