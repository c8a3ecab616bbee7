"""Dropout whose mask depends on (seed, layer, site, global position), never on the device.

The mask is a hash of global indices, so every layout drops the same values. Backward hashes again
instead of saving the mask.

Letters: B batch, T query position, D model.
Source of the hash: Jarzynski and Olano, Hash Functions for GPU Rendering, JCGT 9(3), 2020 (pcg4d).
"""

from enum import IntEnum
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class DropoutSite(IntEnum):
    """A place in a block where values are dropped, with its own masks."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3
    CROSS_ATTENTION = 4
    CROSS_ATTENTION_OUTPUT = 5
    ATTENTION_PATH = 6
    MLP_PATH = 7
    EMBEDDING_NOISE = 8


class TokenInfo(NamedTuple):
    """The global indices of a device's tokens, and the dropout seed.

    sample_B: index of each sequence in the global batch. position_T: position in its sequence of
    each token of the device's cp block, `[B, T]` if samples differ. seed: two words for this step,
    or None for no dropout.
    segment_BCT: the document of each token on each device of the ring, or None where attention
    ignores documents. source: the same for the sequence from which this one is predicted, if any.
    counted_T: whether each token is one of the sequence and does not only pad it, or None if all
    are; routers count these. choice_BTLK: for each layer the experts of each token, below 0 where
    its router chooses; None if all do. layer: the number of the layer that reads them, set by `at`.
    position_BCT: the position of each token on each device of the ring, or None where samples do
    not differ.
    """

    sample_B: Array
    position_T: Array
    seed: Array | None
    segment_BCT: Array | None = None
    source: "TokenInfo | None" = None
    counted_T: Array | None = None
    choice_BTLK: Array | None = None
    layer: Array | int | None = None
    position_BCT: Array | None = None

    def at_rows(self, unit: int) -> "TokenInfo":
        """The same places, in rows of patches `unit` pixels high instead of rows of pixels."""
        return self._replace(position_T=self.position_T[::unit] // unit)

    def at(self, layer: Array | int, site: DropoutSite) -> "TokenInfo":
        """The same tokens as one site of one layer reads them, with its seed."""
        seed = None if self.seed is None else fold(self.seed, layer, site)
        return self._replace(seed=seed, layer=layer)


def _pcg4d(x: Array, y: Array, z: Array, w: Array) -> tuple[Array, Array, Array, Array]:
    """Hashes four uint32 words into four well mixed ones."""
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
    """Derives a seed `[.., 2]` from `seed[2]` and two integers, which broadcast."""
    _, _, z, w = _pcg4d(*_words(first, second, seed[..., 0], seed[..., 1]))
    return jnp.stack([z, w], axis=-1)


def keep_mask(seed: Array, first: Array, second: Array, rate: float) -> Array:
    """True with probability 1 - rate, to within 2**-32, for each pair of integers.

    Args:
        seed: uint32 `[.., 2]`; its leading dims and both integers broadcast.
        first: int32.
        second: int32.
        rate: fraction of values dropped.
    """
    *_, word = _pcg4d(*_words(first, second, seed[..., 0], seed[..., 1]))
    return word >= jnp.uint32(round(rate * 2**32))


def dropout(x_BTD: Array, token_info: TokenInfo, hidden_D: Array, rate: float) -> Array:
    """Zeroes a fraction `rate` of x and scales the rest by 1 / (1 - rate).

    Args:
        x_BTD: this device's block of the residual stream.
        token_info: samples and positions of x's tokens, and the seed of this site.
        hidden_D: global indices of x's hidden units.
        rate: fraction of values dropped, in [0, 1).
    """
    if token_info.seed is None or rate == 0:
        return x_BTD
    seed_B11 = fold(token_info.seed, token_info.sample_B, 0)[:, None, None]
    return _drop(x_BTD, seed_B11, token_info.position_T, hidden_D, rate)


@partial(jax.checkpoint, static_argnums=(4,))
def _drop(x_BTD: Array, seed_B11: Array, position_T: Array, hidden_D: Array, rate: float) -> Array:
    keep_BTD = keep_mask(seed_B11, position_T[..., None], hidden_D, rate)
    return jnp.where(keep_BTD, x_BTD / (1 - rate), 0)


def noise(token_info: TokenInfo, hidden_D: Array, most: float) -> Array:
    """Numbers between -most and most, all equally likely, float32 `[B, T, D]`; without a seed 0.

    Args:
        token_info: samples and positions of this device's tokens, and the seed of this site.
        hidden_D: global indices of hidden units.
        most: their largest size.

    Source: Jain et al., NEFTune, arXiv 2310.05914.
    """
    if token_info.seed is None:
        return jnp.float32(0)
    seed_B11 = fold(token_info.seed, token_info.sample_B, 0)[:, None, None]
    word_BTD = _pcg4d(
        *_words(token_info.position_T[..., None], hidden_D, seed_B11[..., 0], seed_B11[..., 1])
    )[-1]
    return ((word_BTD >> 8).astype(jnp.float32) * 2.0**-23 - 1) * most


def drop_path(y: Array, token_info: TokenInfo, rate: Array | float) -> Array:
    """Zeroes whole samples, a fraction `rate` of them, and scales the rest by 1 / (1 - rate).

    Args:
        y: `[B, ..]`, to be added to the residual stream.
        token_info: samples of y, and the seed of this site.
        rate: fraction of samples dropped, in [0, 1); it may depend on the layer.

    Source: Huang et al., arXiv 1603.09382 (stochastic depth).
    """
    if token_info.seed is None:
        return y
    *_, word_B = _pcg4d(*_words(token_info.sample_B, 0, token_info.seed[0], token_info.seed[1]))
    rate = jnp.asarray(rate, jnp.float32)
    dropped_B = word_B >> 8 < (rate * 2.0**24).astype(jnp.uint32)
    factor_B = jnp.where(dropped_B, 0, 1 / (1 - rate.astype(y.dtype)))
    return y * factor_B.reshape(-1, *[1] * (y.ndim - 1)).astype(y.dtype)
