"""Rounding to 8-bit floating point, with scales that are powers of two.

Such a scale is exact: elements round alike under any of them, except those below about 2**-14 of
the largest (e4m3).

Letters: A rows and B columns of a matrix.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

FORWARD = jnp.float8_e4m3fn
CAPABILITY = 8.9  # CUDA compute capability with 8-bit matmuls: Ada, Hopper and later
SMALLEST = 2.0**-100  # lower bound of the largest element: keeps the scale finite
BLOCK = 128  # columns of a block, and rows of a block of a matrix


def scale_of(largest: Array, dtype: DTypeLike) -> Array:
    """The scale that moves the largest element into the upper half of the range of `dtype`."""
    top = jnp.finfo(dtype).max.astype(jnp.float32)
    return _power_of_two(top / jnp.maximum(largest, SMALLEST))


def _power_of_two(x: Array) -> Array:
    """The largest power of two that is not above x, from the exponent bits of a float32."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    return lax.bitcast_convert_type(bits, jnp.float32)


class Operand(NamedTuple):
    """Matrices to multiply.

    array: `[.., A, B]`, in 8 bits or as it is. unit: the factor of each block of an array in 8
    bits, `[.., A / rows, B / 128]` in float32, or None.
    """

    array: Array
    unit: Array | None = None

    def values(self, rows: int) -> Array:
        """The values of an array in 8 bits, which bfloat16 holds exactly. rows: of a block."""
        assert self.unit is not None
        unit = self.unit.astype(jnp.bfloat16).repeat(rows, -2).repeat(BLOCK, -1)
        size, columns = self.array.shape[-2:]
        return self.array.astype(jnp.bfloat16) * unit[..., :size, :columns]


def in_blocks(x: Array, rows: int) -> Operand:
    """Rounds x[.., A, B] to e4m3 in blocks of `rows` rows and 128 columns, each with its scale.

    Source: DeepSeek-AI, arXiv 2412.19437, section 3.3.
    """
    *lead, size, columns = x.shape
    missing = (0, -size % rows), (0, -columns % BLOCK)
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(lead) + [*missing])
    blocks = padded.reshape(*lead, -(-size // rows), rows, -(-columns // BLOCK), BLOCK)
    scale = scale_of(jnp.abs(blocks).max((-3, -1), keepdims=True), FORWARD)
    bits = (blocks * scale).astype(FORWARD).reshape(padded.shape)
    return Operand(bits[..., :size, :columns], 1 / scale.squeeze((-3, -1)))
