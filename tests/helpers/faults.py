"""Faults of a device, injected into arrays."""

import jax
import numpy as np


def with_a_flipped_bit(x: jax.Array, device: int, *, bit: int = 1) -> jax.Array:
    """The same array, except for a bit of the first number on one device."""
    pieces = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint32)[0] ^= bit
        pieces.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)
