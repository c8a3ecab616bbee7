"""GPT-2 and its descendants: a text model that predicts the next token.

Letters: B batch, T position, D model, V vocabulary.
Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig
from jaxptd.layers.dropout import Places
from jaxptd.layers.loss import soft_cap, vocab_parallel_cross_entropy
from jaxptd.models.text import TextModel

CROSS_ENTROPY, Z_LOSS = "cross_entropy", "z_loss"  # terms of the loss


class GPT(TextModel):
    """A decoder-only language model; arguments and errors are those of `TextModel`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, **others: Any) -> None:
        super().__init__(config, rngs=rngs, **others)
        self.head = None if config.tie_embeddings else self.table(rngs)

    def output(self, x_BTD: Array) -> Array:
        """x after all blocks -> logits[B, T, V], V sharded."""
        logits_BTV = (self.head or self.tokens).logits(self.last_norm(x_BTD))
        limit = self.config.logit_softcap
        return logits_BTV if limit is None else soft_cap(logits_BTV, limit)

    @jax.named_scope("loss")
    def losses(self, x_BTD: Array, batch: Mapping[str, Array], places: Places) -> dict[str, Array]:
        """x after all blocks -> the sum of -log probability of each target, in nats.

        With `z_loss` also that of the squares of log sum exp(logits). Float32 at least; of this
        device's tokens, which are those of the logits. Targets below 0 do not count.
        """
        logits_BTV = self.output(x_BTD)
        targets_BT = self.form.axes.local_logit_tokens(batch["targets"])
        loss_BT, logsumexp_BT = vocab_parallel_cross_entropy(
            logits_BTV, targets_BT, self.form.axes, self.config.vocab_size
        )
        terms = {CROSS_ENTROPY: loss_BT}
        if self.config.z_loss:
            terms[Z_LOSS] = jnp.square(logsumexp_BT)
        return {name: jnp.sum(jnp.where(targets_BT >= 0, x, 0)) for name, x in terms.items()}
