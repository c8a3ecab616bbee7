"""Rotary positions: each pair of a head's numbers is turned by an angle that grows with position.

Scores then depend on distances only. The pairs are neighbours, (0, 1), (2, 3) ..., so that a device
that holds a slice of every head holds whole pairs.

Letters: B batch, T position, N heads, H head size, P pairs of H.
Source: Su et al., arXiv 2104.09864; Peng et al., arXiv 2309.00071 (yarn); Llama 3.1 (llama3).
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxptd.config import Rope


def rotate(x_BTNH: Array, position_T: Array, number_H: Array, *, rope: Rope, size: int) -> Array:
    """Queries or keys, turned by their positions; computed in float32 at least.

    Args:
        x_BTNH: queries or keys.
        position_T: of their tokens.
        number_H: which of a head's numbers they have; padding is at the end.
        rope: wavelengths.
        size: H without padding.
    """
    turns, length = frequencies(rope, size)
    wide = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    padded = jnp.asarray(np.append(turns, 0.0), wide)  # padding is not turned
    turn_P = padded[jnp.minimum(number_H[::2] // 2, size // 2)]
    angle_T1P = position_T[:, None, None].astype(wide) * turn_P
    cos, sin = length * jnp.cos(angle_T1P), length * jnp.sin(angle_T1P)
    even, odd = x_BTNH[..., ::2].astype(wide), x_BTNH[..., 1::2].astype(wide)
    pair = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return pair.reshape(x_BTNH.shape).astype(x_BTNH.dtype)


def frequencies(rope: Rope, size: int) -> tuple[np.ndarray, float]:
    """The angle of each pair at position 1, `[P]` in radians, and the factor of turned vectors."""
    turn_P = rope.theta ** -(np.arange(0, size, 2) / size)
    scaled_P = turn_P / rope.factor
    if rope.scaling in (None, "linear"):
        return scaled_P, 1.0
    low, high = rope.range
    if rope.scaling == "llama3":
        turns_P = rope.original_length * turn_P / (2 * math.pi)  # within the original length
        kept_P = np.clip((turns_P - low) / (high - low), 0, 1)
        return kept_P * turn_P + (1 - kept_P) * scaled_P, 1.0
    return _yarn(rope, turn_P, scaled_P, size)


def _yarn(
    rope: Rope, turn_P: np.ndarray, scaled_P: np.ndarray, size: int
) -> tuple[np.ndarray, float]:
    """Interpolates along the numbers of the pairs, and lengthens vectors, as published."""

    def pair_of(turns: float) -> float:  # the pair that makes so many turns in the original length
        length = rope.original_length / (2 * math.pi * turns)
        return size * math.log(length) / (2 * math.log(rope.theta))

    low, high = rope.range
    first, last = max(math.floor(pair_of(high)), 0), min(math.ceil(pair_of(low)), size - 1)
    number_P = np.arange(size // 2)
    scaled = np.clip((number_P - first) / max(last - first, 1e-3), 0, 1)
    length = 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    return scaled * scaled_P + (1 - scaled) * turn_P, length
