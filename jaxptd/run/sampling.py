"""Draws of the next token from the logits of a model.

Letters: B batch, V vocabulary, K most likely tokens.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.errors import UserError

GREEDY = 1e-6  # below this, take the most likely token: float32 could not divide by the temperature


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for sampling the next token, with the meaning and the order of transformers.

    Args:
        temperature: of the softmax. 0 always takes the most likely token.
        top_k: sample only from the k most likely tokens. 0 samples from all.
        seed: of the random numbers.
        top_p: sample only from the most likely tokens that together have this probability.
        min_p: sample only from tokens with this share of the most likely one's probability.
        repetition_penalty: divides the positive logits of tokens that the text has already, and
            multiplies the negative ones. Above 1 they become less likely.
    """

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature} must be a number, 0 or more")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} must be 0 or more, and below 2**32")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0, and 1 (all tokens) at most")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p={self.min_p} must be from 0 (all tokens) to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(
                f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is none"
            )

    @property
    def reads_text(self) -> bool:
        """True if a draw depends on which tokens the text has."""
        return self.repetition_penalty != 1

    def draw(self, logits_BV: Array, key: Array, in_text_BV: Array | None = None) -> Array:
        """Draws a token for each text, `[B]`.

        Args:
            logits_BV: of the next token.
            key: of the random numbers.
            in_text_BV: which tokens a text has, if `reads_text`.
        """
        logits_BV = logits_BV.astype(jnp.float32)
        if in_text_BV is not None:
            logits_BV = jnp.where(in_text_BV, self._less_likely(logits_BV), logits_BV)
        if self.temperature < GREEDY:
            return jnp.argmax(logits_BV, -1).astype(jnp.int32)
        scores_BK, ids_BK = self.candidates(logits_BV)
        drawn_B1 = jax.random.categorical(key, scores_BK)[:, None]
        return jnp.take_along_axis(ids_BK, drawn_B1, axis=1)[:, 0].astype(jnp.int32)

    def candidates(self, logits_BV: Array) -> tuple[Array, Array]:
        """The most likely tokens: scores, whose softmax they are drawn from, and ids, `[B, K]`.

        Those that `top_p` or `min_p` leaves out have the score -inf.
        """
        vocab_size = logits_BV.shape[1]
        logits_BK, ids_BK = lax.top_k(logits_BV, min(self.top_k or vocab_size, vocab_size))
        logits_BK -= logits_BK[:, :1]  # so that the division below cannot overflow
        scores_BK = logits_BK / self.temperature
        if self.top_p == 1 and self.min_p == 0:
            return scores_BK, ids_BK
        share_BK = jax.nn.softmax(scores_BK)
        before_BK = jnp.cumsum(share_BK, 1) - share_BK
        keeps_BK = (before_BK < self.top_p) & (share_BK >= self.min_p * share_BK[:, :1])
        return jnp.where(keeps_BK, scores_BK, -jnp.inf), ids_BK

    def _less_likely(self, logits_BV: Array) -> Array:
        by = jnp.float32(self.repetition_penalty)
        return jnp.where(logits_BV < 0, logits_BV * by, logits_BV / by)
