"""BERT: a text model that predicts masked tokens and whether two sentences belong together.

Letters: B batch, T position, D model, V vocabulary.
Source: Devlin et al., BERT, arXiv 1810.04805.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.linear import SquareLinear, VocabParallelEmbedding, VocabularyBias
from jaxptd.layers.loss import vocab_parallel_cross_entropy
from jaxptd.layers.mlp import ACTIVATIONS
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import block_along
from jaxptd.models.encoder import CLASSES, MLM, NSP
from jaxptd.models.model import TextModel


class BERT(TextModel):
    """An encoder with both heads; takes the arguments of `TextModel` and raises its errors.

    A pair's class is computed on every token and counted only at the first, so that however the
    sequence is cut no device needs another's first token. This costs a matmul `[D, D]`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, **others: Any) -> None:
        super().__init__(config, rngs=rngs, **others)
        size, tensor_parallel = config.hidden_size, self.tensor_parallel
        self.transform = SquareLinear(size, size, tensor_parallel=tensor_parallel, rngs=rngs)
        self.transform_norm = Norm(
            size, options=config.block, tensor_parallel=tensor_parallel, rngs=rngs
        )
        self.bias = VocabularyBias(
            config.vocab_size or 0, tensor_parallel=tensor_parallel, rows=self.tokens.rows
        )
        self.pooler = SquareLinear(size, size, tensor_parallel=tensor_parallel, rngs=rngs)
        self.pairs = VocabParallelEmbedding(
            CLASSES, size, tensor_parallel=tensor_parallel, rngs=rngs
        )
        self.pairs_bias = VocabularyBias(
            CLASSES, tensor_parallel=tensor_parallel, rows=self.pairs.rows
        )

    def output(self, x_BTD: Array) -> Array:
        """x after all blocks -> logits[B, T, V] of masked tokens, V sharded."""
        act = ACTIVATIONS[self.options.activation]
        h_BTD = self.transform_norm(act(self.transform(self.last_norm(x_BTD))))
        return self.bias(self.tokens.logits(h_BTD))

    def pair_logits(self, x_BTD: Array) -> Array:
        """x after all blocks -> logits[B, T, 2] of the pair, for each token, sharded as V is."""
        pooled_BTD = jnp.tanh(self.pooler(self.last_norm(x_BTD)))
        return self.pairs_bias(self.pairs.logits(pooled_BTD))

    @jax.named_scope("loss")
    def losses(
        self, x_BTD: Array, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> dict[str, Array]:
        """x after all blocks -> sums of -log probability: of masked tokens, and of pairs."""
        pairs_BT = jnp.where(token_info.position_T == 0, batch["next_sentence"][:, None], -1)
        return {
            MLM: self._sum(self.output(x_BTD), batch["targets"], self.config.vocab_size or 0),
            NSP: self._sum(self.pair_logits(x_BTD), pairs_BT, CLASSES),
        }

    evaluated = losses  # no scores

    def _sum(self, logits_BTV: Array, targets_BT: Array, size: int) -> Array:
        axes = self.tensor_parallel.axes
        targets_BT = block_along(targets_BT, axes.logit_tokens, 1)
        loss_BT, _ = vocab_parallel_cross_entropy(
            logits_BTV, targets_BT, axes, size, self.config.kernels
        )
        return jnp.sum(jnp.where(targets_BT >= 0, loss_BT, 0))
