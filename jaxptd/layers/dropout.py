"""Dropout whose mask is a function of (seed, layer, site, global position), never of the device.

The mask is hashed from global numbers, so that every layout drops the same values, and it is hashed
again in backward instead of being kept.

Letters: B batch, T query position, D model.
Source of the hash: Jarzynski and Olano, Hash Functions for GPU Rendering, JCGT 9(3), 2020 (pcg4d).
"""

from enum import IntEnum
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Site(IntEnum):
    """Where in a block values are dropped; each has masks of its own."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3


class Places(NamedTuple):
    """Which tokens of the global batch a device's activations are, and what to drop of them.

    sample_B: number of each sequence in the global batch. position_T: position of each token of the
    device's cp block in its sequence. seed: two words for this step, or None to drop nothing.
    segment_BCT: the document of each token of every part of the ring, or None where documents are
    joined.
    """

    sample_B: Array
    position_T: Array
    seed: Array | None
    segment_BCT: Array | None = None

    def at(self, layer: Array | int, site: Site) -> "Places":
        """The same places, with the seed of one site of one layer."""
        return self if self.seed is None else self._replace(seed=fold(self.seed, layer, site))


def _pcg4d(x: Array, y: Array, z: Array, w: Array) -> tuple[Array, Array, Array, Array]:
    """Four uint32 words -> four well mixed ones."""
    x, y, z, w = (v * jnp.uint32(1664525) + jnp.uint32(1013904223) for v in (x, y, z, w))
    x = x + y * w
    y = y + z * x
    z = z + x * y
    w = w + y * z
    x, y, z, w = (v ^ (v >> 16) for v in (x, y, z, w))
    x = x + y * w
    y = y + z * x
    z = z + x * y
    w = w + y * z
    return x, y, z, w


def _words(*numbers: Array | int) -> list[Array]:
    return [jnp.asarray(n).astype(jnp.uint32) for n in numbers]


def fold(seed: Array, first: Array | int, second: Array | int) -> Array:
    """The seed `[.., 2]` of two numbers within `seed[2]`; the numbers broadcast."""
    _, _, z, w = _pcg4d(*_words(first, second, seed[..., 0], seed[..., 1]))
    return jnp.stack([z, w], axis=-1)


def kept(seed: Array, first: Array, second: Array, rate: float) -> Array:
    """True where a value stays: for each pair of numbers with probability 1 - rate, to 2**-32.

    Args:
        seed: uint32 `[.., 2]`; its leading dims, and both numbers, broadcast.
        first: int32.
        second: int32.
        rate: share dropped.
    """
    *_, word = _pcg4d(*_words(first, second, seed[..., 0], seed[..., 1]))
    return word >= jnp.uint32(round(rate * 2**32))


def dropout(x_BTD: Array, places: Places, hidden_D: Array, rate: float) -> Array:
    """Zeroes a share `rate` of x and scales the rest by 1 / (1 - rate).

    Args:
        x_BTD: this device's block of the residual stream.
        places: its samples, positions (as many as x has) and the seed of this site.
        hidden_D: which hidden units its last dim holds.
        rate: share dropped, in [0, 1).
    """
    if places.seed is None or rate == 0:
        return x_BTD
    seed_B11 = fold(places.seed, places.sample_B, 0)[:, None, None]
    return _drop(x_BTD, seed_B11, places.position_T, hidden_D, rate)


@partial(jax.checkpoint, static_argnums=(4,))
def _drop(x_BTD: Array, seed_B11: Array, position_T: Array, hidden_D: Array, rate: float) -> Array:
    keep_BTD = kept(seed_B11, position_T[:, None], hidden_D, rate)
    return jnp.where(keep_BTD, x_BTD / (1 - rate), 0)
