"""Matmuls in 8-bit floating point: each operand is rounded with its own scale.

Forward operands are e4m3 (3 mantissa bits, up to 448), gradients of results e5m2 (2 bits, up to
57344); accumulation is in float32. The scale comes from the tensor's largest element ("current
scaling") and is rounded down to a power of two. Such a scale is exact, and all but the smallest
elements round the same under any of them. That lets each device use the largest element of its own
block, without a reduction, and a layout, a micro-batch or a ring still computes what one device
does. The exceptions are elements below about 2**-14 of the largest (e4m3; 2**-29, e5m2): their last
bits depend on the scale, as they do on a sum's order.

On GPUs XLA turns this into cuBLASLt's 8-bit matmuls (an option in `step/program.py`);
elsewhere it computes in wider precision, with the same results.
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
from jaxptd.kernels.rounding import CAPABILITY, FORWARD, scale_of
from jaxptd.layers.tensor_parallel import NATIVE, MatmulPrecision
from jaxptd.matmul.precision import Dims

BACKWARD = jnp.float8_e5m2


class Scaled(NamedTuple):
    """An array in 8 bits with its scale."""

    bits: Array
    scale: Array

    @property
    def values(self) -> Array:
        """The represented values, float32."""
        return self.bits.astype(jnp.float32) / self.scale


def quantised(x: Array, dtype: DTypeLike) -> Scaled:
    """Rounds x to `dtype`, scaled so that its largest element is in the upper half of the range.

    Infinities and NaNs pass through: nothing is clipped.
    """
    wide = x.astype(jnp.float32)
    scale = scale_of(jnp.max(jnp.abs(wide)), dtype)
    return Scaled((wide * scale).astype(dtype), scale)


def fp8_matmul(x: Array, w: Array, contract: int) -> Array:
    """Contracts the last `contract` dims of x with the first of w, in fp8.

    As in `tensor_parallel.matmul`, w is read and its gradient computed in x's precision, in which
    ZeRO gathers w: every layout rounds alike. For backward it saves x in 8 bits and w unchanged.
    Backward rounds w again, so a scan over layers saves no second copy of all weights.
    """
    return _product(*alike(x, w), contract)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, w: Array, contract: int) -> Array:
    return _forward(x, w, contract)[0]


def _forward(x: Array, w: Array, contract: int) -> tuple[Array, tuple[Scaled, Array]]:
    x8, w8 = quantised(x, FORWARD), quantised(w.astype(x.dtype), FORWARD)
    return _dot(x8, w8, (_last(x, contract), tuple(range(contract))), x.dtype), (x8, w)


def _backward(contract: int, residuals: tuple[Scaled, Array], dy: Array) -> tuple[Array, Array]:
    x8, w = residuals
    dy8, w8 = quantised(dy, BACKWARD), quantised(w.astype(dy.dtype), FORWARD)
    rows, out = tuple(range(x8.bits.ndim - contract)), w.ndim - contract
    dx = _dot(dy8, w8, (_last(dy, out), _last(w, out)), dy.dtype, EXACT)
    return dx, _dot(x8, dy8, (rows, rows), dy.dtype, EXACT).astype(w.dtype)


_product.defvjp(_forward, _backward)


def fp8_block_matmul(
    a: Array, b: Array, dims: Dims, dtype: DTypeLike, *, gradient: int | None = None
) -> Array:
    """Multiplies two blocks in fp8; see `matmul.precision.BlockMatmul`."""
    formats = [BACKWARD if number == gradient else FORWARD for number in range(2)]
    a8, b8 = (quantised(x, to) for x, to in zip((a, b), formats, strict=True))
    return _dot(a8, b8, dims, dtype, None if gradient is None else EXACT)


# cuBLASLt accumulates these in full float32; forward allows its faster, less exact accumulation.
EXACT = lax.Precision.HIGHEST
WIDE = jnp.bfloat16


def _dot(
    a: Scaled, b: Scaled, dims: Any, dtype: DTypeLike, precision: lax.Precision | None = None
) -> Array:
    """Contracts `dims` of a and b into a result in `dtype`.

    Written in the pattern that XLA recognises: scaled operands in bfloat16, and the matmul's own
    result in bfloat16 where that is `dtype`. Then cuBLASLt scales and rounds.
    """

    def product(a: Scaled, b: Scaled) -> Array:
        left, right = ((x.bits.astype(WIDE) * (1 / x.scale).astype(WIDE)) for x in (a, b))
        result = jnp.promote_types(dtype, WIDE)
        return lax.dot_general(
            left, right, (dims, ((), ())), precision=precision, preferred_element_type=result
        )

    # One operation, so that XLA hoists no part of it out of a loop over layers.
    return jax.checkpoint(product, prevent_cse=False)(a, b).astype(dtype)


def _last(x: Array, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))


# ---- which devices support it -------------------------------------------------------------------


FP8 = MatmulPrecision(fp8_matmul, fp8_block_matmul, apart=False)


def choose_precision(products: Products, device: Any) -> MatmulPrecision:
    """Chooses how a layer's matrices multiply, by `model.products` and the device.

    Raises:
        UserError: the GPU lacks fp8. (CPUs compute it in wider precision.)
    """
    if products == "native":
        return NATIVE
    capability = float(getattr(device, "compute_capability", CAPABILITY))
    if device.platform != "cpu" and capability < CAPABILITY:
        raise UserError(
            f"model.products=fp8 needs a GPU of compute capability {CAPABILITY} or higher; "
            f"{getattr(device, 'device_kind', 'this one')} has {capability}; use "
            "model.products=native"
        )
    return FP8
