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
from jaxptd.layers.block import Routed
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.loss import soft_cap, vocab_parallel_cross_entropy
from jaxptd.layers.tensor_parallel import ShardingAxes, block_along
from jaxptd.models.decoder import CROSS_ENTROPY, Z_LOSS, router_losses
from jaxptd.models.model import TextModel


class GPT(TextModel):
    """A decoder-only language model; takes the arguments of `TextModel` and raises its errors."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, **others: Any) -> None:
        super().__init__(config, rngs=rngs, **others)
        self.head = None if config.tie_embeddings else self.table(rngs)

    def output(self, x_BTD: Array) -> Array:
        """x after all blocks -> logits[B, T, V], V sharded."""
        x_BTD, divisor = self.last_norm(x_BTD), self.options.logit_divisor
        logits_BTV = (self.head or self.tokens).logits(x_BTD if divisor == 1 else x_BTD / divisor)
        limit = self.config.logit_softcap
        return logits_BTV if limit is None else soft_cap(logits_BTV, limit)

    @jax.named_scope("loss")
    def losses(
        self, x: Array | Routed, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> dict[str, Array]:
        """x after all blocks -> `sums_over_targets`, and those of routers' losses."""
        axes, targets_BT = self.tensor_parallel.axes, batch["targets"]
        if not isinstance(x, Routed):
            return sums_over_targets(self.output(x), targets_BT, self.config, axes)
        x_BTD, terms_BTQ, _ = x
        sums = sums_over_targets(self.output(x_BTD), targets_BT, self.config, axes)
        own_BT = block_along(targets_BT, axes.tokens, 1)
        sum_Q = jnp.where(own_BT[..., None] >= 0, terms_BTQ, 0).sum((0, 1))
        return sums | dict(
            zip(router_losses(self.config), axes.sum_over_tokens(sum_Q), strict=True)
        )

    evaluated = losses  # no scores


def sums_over_targets(
    logits_BTV: Array, targets_BT: Array, config: ModelConfig, axes: ShardingAxes
) -> dict[str, Array]:
    """Sums the targets' -log probabilities, in nats.

    With `z_loss` also sums the squares of log sum exp(logits). Float32 or wider, over this device's
    tokens, which are those of the logits. Ignores targets below 0.

    Args:
        logits_BTV: this device's shard of V.
        targets_BT: targets of its cp block.
        config: the model's.
        axes: how the logits are sharded.
    """
    targets_BT = block_along(targets_BT, axes.logit_tokens, 1)
    loss_BT, logsumexp_BT = vocab_parallel_cross_entropy(
        logits_BTV, targets_BT, axes, config.vocab_size or 0, config.kernels
    )
    terms = {CROSS_ENTROPY: loss_BT}
    if config.z_loss:
        terms[Z_LOSS] = jnp.square(logsumexp_BT)
    return {name: jnp.sum(jnp.where(targets_BT >= 0, x, 0)) for name, x in terms.items()}
