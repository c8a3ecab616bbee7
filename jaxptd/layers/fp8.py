"""Products in 8-bit floating point: the operands rounded, each with a scale of its own.

Forward operands are e4m3 (3 bits of mantissa, up to 448), the gradient of a result is e5m2 (2 bits,
up to 57344); products are summed in float32. A scale is made of the largest element at hand
("current scaling") and rounded down to a power of two. That makes it exact, and makes it the same
to all elements but the smallest which scale they get: scaling by two rounds as not scaling. So each
device takes the largest element of its own block, nothing is reduced, and a layout, a micro-batch
or a ring still computes what one device does. The exception are elements below about 2**-14
of the largest (e4m3; 2**-29, e5m2): their last bits depend on the scale, as on a sum's order.

XLA for GPUs makes cuBLASLt's 8-bit products of this (with an option, `compiler.py`); elsewhere it
computes them in wider precision, with the same results.
Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; power-of-two scales:
DeepSeek-AI, arXiv 2412.19437, section 3.3.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxptd.collectives import alike
from jaxptd.config import Products
from jaxptd.errors import UserError
from jaxptd.layers.form import Product, product

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
CAPABILITY = 8.9  # of CUDA GPUs with 8-bit products: Ada, Hopper and later
SMALLEST = 2.0**-100  # a largest element below it counts as this: the scale stays finite


class Scaled(NamedTuple):
    """An array in 8 bits."""

    bits: Array
    scale: Array

    @property
    def values(self) -> Array:
        """What it stands for, float32."""
        return self.bits.astype(jnp.float32) / self.scale


def quantised(x: Array, dtype: DTypeLike) -> Scaled:
    """x rounded to `dtype`, its largest element in the upper half of that one's range.

    What is not finite stays so: no element is clipped.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(wide)), SMALLEST)
    scale = _power_of_two(jnp.finfo(dtype).max.astype(jnp.float32) / largest)
    return Scaled((wide * scale).astype(dtype), scale)


def _power_of_two(x: Array) -> Array:
    """The largest one not above x, by the exponent of a float32."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    return lax.bitcast_convert_type(bits, jnp.float32)


def fp8_product(x: Array, w: Array, contract: int) -> Array:
    """As `form.product`, in fp8: contracts the last `contract` dims of x with the first of w.

    As there, w is read and its gradient made in the precision of x, whatever w has: with ZeRO it
    comes in that precision, and every layout rounds alike. Kept for backward: x in 8 bits, and w as
    it is, to be rounded again, so that a scan over layers keeps no second copy of all weights.
    """
    return _product(*alike(x, w), contract)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, w: Array, contract: int) -> Array:
    return _forward(x, w, contract)[0]


def _forward(x: Array, w: Array, contract: int) -> tuple[Array, tuple[Scaled, Array]]:
    x8, w8 = quantised(x, FORWARD), quantised(w.astype(x.dtype), FORWARD)
    return _dot(x8, w8, (_last(x, contract), tuple(range(contract))), x.dtype), (x8, w)


def _backward(contract: int, kept: tuple[Scaled, Array], dy: Array) -> tuple[Array, Array]:
    x8, w = kept
    dy8, w8 = quantised(dy, BACKWARD), quantised(w.astype(dy.dtype), FORWARD)
    rows, out = tuple(range(x8.bits.ndim - contract)), w.ndim - contract
    dx = _dot(dy8, w8, (_last(dy, out), _last(w, out)), dy.dtype, EXACT)
    return dx, _dot(x8, dy8, (rows, rows), dy.dtype, EXACT).astype(w.dtype)


_product.defvjp(_forward, _backward)

# cuBLASLt then adds in full float32; it may be quicker and rougher in forward only.
EXACT = lax.Precision.HIGHEST


def _dot(
    a: Scaled, b: Scaled, dims: Any, dtype: DTypeLike, precision: lax.Precision | None = None
) -> Array:
    """Contracts `dims` of a and of b -> `dtype`."""
    y = lax.dot_general(
        a.bits, b.bits, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    return (y * (1 / a.scale) * (1 / b.scale)).astype(dtype)


def _last(x: Array, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))


# ---- where they can run -------------------------------------------------------------------------


def choose_product(products: Products, device: Any) -> Product:
    """The product of a block's matrices that `model.products` means on a device.

    Raises:
        UserError: fp8 is asked for on a GPU that has none. (CPUs compute it in wider precision.)
    """
    if products == "native":
        return product
    capability = float(getattr(device, "compute_capability", CAPABILITY))
    if device.platform != "cpu" and capability < CAPABILITY:
        raise UserError(
            f"model.products=fp8 needs a GPU of compute capability {CAPABILITY} or more, "
            f"{getattr(device, 'device_kind', 'this one')} has {capability}; use "
            "model.products=native"
        )
    return fp8_product
