"""Cross-attention: from the tokens of one sequence to those of another.

Letters: B batch, T query position, S key position, D model, N heads, K heads of keys and values,
H head size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.attention.attend import AttentionInputs
from jaxptd.attention.kernel import ScoreCoordinates, Scores
from jaxptd.layers.attention.heads import Heads
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.linear import multiply
from jaxptd.layers.norm import HeadNorm, WholeNorm


class Source(NamedTuple):
    """Another sequence, to whose tokens a decoder attends.

    x_BSD: its residual stream, sharded as usual. segment_BCS: the document of each token on each
    device of the ring, negative for padding; or None.
    """

    x_BSD: Array
    segment_BCS: Array | None = None


class Encoded(NamedTuple):
    """Keys and values of a source, computed once for all tokens of a text.

    k, v: `[B, S, K, H]`, whole heads, all tokens. segment_BS: the document of each token, negative
    for padding; or None.
    """

    k: Array
    v: Array
    segment_BS: Array | None = None


class CrossAttention(Heads):
    """Multi-head attention to all tokens of another sequence except padding.

    Queries come from x, keys and values from the source: weights `[D, N, H]` and `[D, 2, K, H]`,
    sharded as in `SelfAttention`. Both sequences are sharded over the same devices, in blocks that
    may differ in length. Neither is rotated by position.

    Source: Vaswani et al., arXiv 1706.03762, section 3.2.3.
    """

    @jax.named_scope("cross_attention")
    def __call__(self, x_BTD: Array, token_info: TokenInfo, source: Source | Encoded) -> Array:
        """Maps the residual stream to attention's output, sharded alike.

        Args:
            x_BTD: the residual stream.
            token_info: its tokens, and the seed for dropout of this layer's probabilities.
            source: the other sequence; in generation, its keys and values.
        """
        assert self.q is not None
        q_BTNH = self.q(x_BTD)
        q_BTNH = q_BTNH if self.q_norm is None else self.q_norm(q_BTNH)
        scores = self.scores._replace(causal=False, window=None)
        if isinstance(source, Encoded):
            return self.out(self._attend_encoded(q_BTNH, source, token_info, scores))
        k_BSKH, v_BSKH = self._keys(source.x_BSD)
        seed = None if token_info.seed is None else self.seed(token_info, q_BTNH.shape[2])
        inputs = AttentionInputs(key_segment_BCS=source.segment_BCS, seed_BN2=seed)
        o_BTNH = self.tensor_parallel.attend(
            q_BTNH, k_BSKH, v_BSKH, inputs, kernel=self.kernel, scores=scores
        )
        return self.out(o_BTNH)

    def encode(self, source: Source) -> Encoded:
        """Keys and values of a source that is not sharded, for generation."""
        segment = source.segment_BCS
        every = None if segment is None else segment.reshape(segment.shape[0], -1)
        k_BSKH, v_BSKH = (self.whole(x) for x in self._keys(source.x_BSD))
        return Encoded(k_BSKH, v_BSKH, every)

    def _keys(self, x_BSD: Array) -> tuple[Array, Array]:
        """Keys and values of a source."""
        assert self.kv is not None
        k_BSKH, v_BSKH = multiply(x_BSD, self.kv)
        if isinstance(self.k_norm, WholeNorm):
            k_BSKH = self.k_norm(k_BSKH)
        if self.gathers_kv:
            k_BSKH, v_BSKH = self.own_keys_values(k_BSKH, v_BSKH)
        k_BSKH = self.k_norm(k_BSKH) if isinstance(self.k_norm, HeadNorm) else k_BSKH
        return k_BSKH, v_BSKH

    def _attend_encoded(
        self, q_BTNH: Array, source: Encoded, token_info: TokenInfo, scores: Scores
    ) -> Array:
        key_S = jnp.arange(source.k.shape[1], dtype=jnp.int32)
        coordinates = ScoreCoordinates(
            token_info.position_T, key_S, key_segment_BS=source.segment_BS
        )
        return self.attend_whole(
            self.whole(q_BTNH), source.k, source.v, coordinates=coordinates, scores=scores
        )
