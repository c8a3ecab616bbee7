"""Self-attention, with a cache in generation.

Letters: B batch, T query position, S key position, D model, N heads, K heads of keys and values,
H head size.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.attention.attend import UNCHANGED, AttentionInputs, Expansion
from jaxptd.attention.kernel import ScoreCoordinates
from jaxptd.config.block import rotations
from jaxptd.layers.attention.heads import Heads
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.linear import multiply
from jaxptd.layers.norm import HeadNorm, WholeNorm
from jaxptd.layers.tensor_parallel import block_along


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    k, v: `[B, S, K, H]`, S the maximum length. used: the number of tokens stored.
    """

    k: Array
    v: Array
    used: Array

    def append(self, k_BTKH: Array, v_BTKH: Array) -> "Cache":
        put = partial(lax.dynamic_update_slice_in_dim, start_index=self.used, axis=1)
        return Cache(put(self.k, k_BTKH), put(self.v, v_BTKH), self.used + k_BTKH.shape[1])


class SelfAttention(Heads):
    """Multi-head attention, causal or not; Q, K and V come from one x, gathered once.

    Their weight is `[D, 3, N, H]`; where groups of heads share keys and values, it is `[D, N, H]`
    and `[D, 2, K, H]`. Sharding over N and K leaves whole heads on each device, so scores, softmax,
    dropout and context need no collective over tp or col. A sequence sharded over cp or row sends
    keys and values around a ring. Sharding over H (`tensor_parallel.axes.head_dim`) is in
    `grid_attention.py`. Where K does not split, keys and values are sharded over H and gathered.

    Source: Shoeybi et al., arXiv 1909.08053, section 3; Ainslie et al., arXiv 2305.13245 (groups).
    """

    @jax.named_scope("attention")
    def __call__(
        self,
        x_BTD: Array,
        token_info: TokenInfo,
        cache: Cache | None,
        *,
        bias_NR: Array | None = None,
    ) -> tuple[Array, Cache | None]:
        """Maps the residual stream to attention's output, and extends the cache by x's tokens.

        Args:
            x_BTD: the residual stream, sharded as it is there; so is the output.
            token_info: its tokens, and the seed for dropout of this layer's probabilities.
            cache: keys and values of the tokens before these, or None.
            bias_NR: added to the scores of this device's heads, by distance: entry R // 2 + key -
                query; or None.
        """
        linears = [each for each in (self.qkv, self.q, self.kv) if each is not None]
        q_BTNH, k_BTKH, v_BTKH = multiply(x_BTD, *linears)
        if isinstance(self.q_norm, WholeNorm):  # of all heads, before keys are gathered
            q_BTNH = self.q_norm(q_BTNH)
        if isinstance(self.k_norm, WholeNorm):
            k_BTKH = self.k_norm(k_BTKH)
        if self.gathers_kv:
            k_BTKH, v_BTKH = self.own_keys_values(k_BTKH, v_BTKH)
        q_BTNH = self._placed(q_BTNH, self.q_norm, token_info)
        k_BTKH = self._placed(k_BTKH, self.k_norm, token_info)
        every = self.windowed
        windowed = None if every is None else of_layer(np.array(every), token_info)
        if cache is None:
            qkv = q_BTNH, k_BTKH, v_BTKH
            o_BTNH = self._attend(*qkv, token_info, bias_NR, windowed)
        else:
            q_BTNH, k_BTKH, v_BTKH = (self.whole(x) for x in (q_BTNH, k_BTKH, v_BTKH))
            cache = cache.append(k_BTKH, v_BTKH)
            o_BTNH = self._attend_cache(q_BTNH, cache, token_info, bias_NR, windowed)
        return self.out(o_BTNH), cache

    def _attend(
        self,
        q_BTNH: Array,
        k_BTKH: Array,
        v_BTKH: Array,
        token_info: TokenInfo,
        bias_NR: Array | None,
        windowed: Array | None,
        expansion: Expansion = UNCHANGED,
    ) -> Array:
        """Attends from the tokens of a sequence to those on all devices that share it."""
        segment = token_info.segment_BCT
        seed = None if token_info.seed is None else self.seed(token_info, q_BTNH.shape[2])
        sink_N = None if self.sinks is None else self.sinks[...]
        places = token_info.position_BCT
        every = self.capped
        capped = None if every is None else of_layer(np.array(every), token_info)
        inputs = AttentionInputs(
            segment, segment, seed, bias_NR, windowed, capped, sink_N, expansion, places
        )
        return self.tensor_parallel.attend(
            q_BTNH, k_BTKH, v_BTKH, inputs, kernel=self.kernel, scores=self.scores
        )

    def _placed(
        self, x_BTNH: Array, norm: HeadNorm | WholeNorm | None, token_info: TokenInfo
    ) -> Array:
        """Queries or keys, normalised and rotated by position where the model does so."""
        options, axes = self.options, self.tensor_parallel.axes
        x_BTNH = norm(x_BTNH) if isinstance(norm, HeadNorm) else x_BTNH
        if options.rope is None:
            return x_BTNH
        position_T = block_along(token_info.position_T, axes.logit_tokens, -1)
        number_H = axes.local_head_numbers(x_BTNH.shape[-1])
        turns, length = (of_layer(each, token_info) for each in rotations(self.config))
        return rotate(x_BTNH, position_T, number_H, turns=turns, length=length)

    def _attend_cache(
        self,
        q_BTNH: Array,
        cache: Cache,
        token_info: TokenInfo,
        bias_NR: Array | None,
        windowed: Array | None,
    ) -> Array:
        """Attends from a text's last tokens to all cached keys, but not to padding."""
        key_S = jnp.arange(cache.k.shape[1], dtype=jnp.int32)
        segment = token_info.segment_BCT
        every = None if segment is None else segment.reshape(segment.shape[0], -1)
        coordinates = ScoreCoordinates(token_info.position_T, key_S)
        coordinates = coordinates._replace(bias_NR=bias_NR, key_segment_BS=every, windowed=windowed)
        if self.capped is not None:
            capped = of_layer(np.array(self.capped), token_info)
            coordinates = coordinates._replace(capped=capped)
        return self.attend_whole(
            q_BTNH, cache.k, cache.v, coordinates=coordinates, scores=self.scores
        )


def of_layer(x_L: np.ndarray, token_info: TokenInfo) -> Any:
    """The row of the layer that reads the tokens; NumPy's if there is only one.

    Layers behind the last, as those of MTP modules, have the last one's.
    """
    if len(x_L) == 1:
        return x_L[0]
    assert token_info.layer is not None
    return jnp.asarray(x_L)[jnp.minimum(token_info.layer, len(x_L) - 1)]


# ---- rotary positions ----------------------------------------------------------------------------
# Each pair of a head's elements is rotated by an angle that grows with position, so scores depend
# on distances only. Pairs are neighbours, (0, 1), (2, 3) ..., so that a device with a slice of
# every head holds whole pairs.
#
# Letters: P pairs of H.
# Source: Su et al., arXiv 2104.09864.


def rotate(
    x_BTNH: Array,
    position_T: Array,
    number_H: Array,
    *,
    turns: np.ndarray | Array,
    length: np.ndarray | Array,
) -> Array:
    """Rotates queries or keys by their positions; computes in float32 or wider.

    Args:
        x_BTNH: queries or keys.
        position_T: positions of their tokens, `[B, T]` if samples differ.
        number_H: indices of the head's elements that they hold; padding is at the end.
        turns: the angle of each pair of a head at position 1, `[P]`, in radians.
        length: scales the rotated vectors.
    """
    wide = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    append = np.append if isinstance(turns, np.ndarray) else jnp.append
    padded = jnp.asarray(append(turns, 0.0), wide)  # padding is not rotated
    turn_P = padded[jnp.minimum(number_H[::2] // 2, len(turns))]
    angle_T1P = position_T[..., None, None].astype(wide) * turn_P
    length = jnp.asarray(length, wide)
    cos, sin = length * jnp.cos(angle_T1P), length * jnp.sin(angle_T1P)
    even, odd = x_BTNH[..., ::2].astype(wide), x_BTNH[..., 1::2].astype(wide)
    pair = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return pair.reshape(x_BTNH.shape).astype(x_BTNH.dtype)
