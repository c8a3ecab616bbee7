"""Rotary positions: each pair of a head's numbers is turned by an angle that grows with position.

Scores then depend on distances only. The pairs are neighbours, (0, 1), (2, 3) ..., so that a device
that holds a slice of every head holds whole pairs.

Letters: B batch, T position, N heads, H head size, P pairs of H.
Source: Su et al., arXiv 2104.09864.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array


def rotate(
    x_BTNH: Array, position_T: Array, number_H: Array, *, turns: np.ndarray, length: float
) -> Array:
    """Queries or keys, turned by their positions; computed in float32 at least.

    Args:
        x_BTNH: queries or keys.
        position_T: of their tokens.
        number_H: which of a head's numbers they have; padding is at the end.
        turns: the angle of each pair of a head at position 1, `[P]`, in radians.
        length: the factor of turned vectors.
    """
    wide = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    padded = jnp.asarray(np.append(turns, 0.0), wide)  # padding is not turned
    turn_P = padded[jnp.minimum(number_H[::2] // 2, len(turns))]
    angle_T1P = position_T[:, None, None].astype(wide) * turn_P
    cos, sin = length * jnp.cos(angle_T1P), length * jnp.sin(angle_T1P)
    even, odd = x_BTNH[..., ::2].astype(wide), x_BTNH[..., 1::2].astype(wide)
    pair = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return pair.reshape(x_BTNH.shape).astype(x_BTNH.dtype)
