"""GPT-2: learned positions, pre-norm blocks, GELU, tied output; names no axis and no collective.

Letters: B batch, T position, S maximum length, D model, L layers, N heads, H head size,
V vocabulary.
Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig
from jaxptd.fields import check_argument
from jaxptd.layers.attention import Cache
from jaxptd.layers.block import Block, drop_residual, make_blocks
from jaxptd.layers.dropout import Places, Site
from jaxptd.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.loss import soft_cap, vocab_parallel_cross_entropy
from jaxptd.layers.norm import Norm

CROSS_ENTROPY, Z_LOSS = "cross_entropy", "z_loss"  # terms of the loss


class GPT(nnx.Module):
    """A decoder-only language model.

    Args:
        config: sizes and choices; vocab_size must be set.
        form: how matrices are sharded.
        rngs: random keys of the initial parameters.
        offload: whether what `remat: dots` saves for backward is in host memory.

    Raises:
        ValueError: vocab_size is not set.
    """

    common: nnx.Module | None = None  # layers share no parameters

    def __init__(
        self, config: ModelConfig, *, form: TensorParallel, rngs: nnx.Rngs, offload: bool = False
    ) -> None:
        check_argument("jaxptd.GPT", "config", config, ModelConfig)
        check_argument("jaxptd.GPT", "form", form, TensorParallel)
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is not set; take it from the tokenizer")
        make_table = partial(
            VocabParallelEmbedding,
            *(config.vocab_size, config.hidden_size),
            form=form,
            rngs=rngs,
            rows=config.padded_vocab(form.padded),
        )
        self.tokens = make_table()
        self.positions = (
            PositionEmbedding(config.num_positions, config.hidden_size, form=form, rngs=rngs)
            if config.block.positions == "learned"
            else None
        )
        self.blocks = make_blocks(config, form=form, rngs=rngs)
        self.norm = Norm(config.hidden_size, options=config.block, form=form, rngs=rngs)
        self.head = None if config.tie_embeddings else make_table()
        self.config, self.form, self.offload = config, form, offload

    @property
    def stacks(self) -> Mapping[str, Block]:
        """The only stack."""
        return {"blocks": self.blocks}

    @jax.named_scope("embedding")
    def embed(self, batch: Mapping[str, Array], places: Places) -> Array:
        """A batch with tokens[B, T] -> x as the residual stream has it."""
        dtype = jnp.dtype(self.config.dtype)
        x_BTD = self.tokens(batch["tokens"], dtype)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(places.position_T, dtype)
        if self.config.block.norm_order == "post":
            x_BTD = self.norm(x_BTD)
        embedded = places.at(0, Site.EMBEDDING)
        return drop_residual(x_BTD, embedded, form=self.form, rate=self.config.dropout)

    def output(self, x_BTD: Array) -> Array:
        """x after all blocks -> logits[B, T, V], V sharded."""
        x_BTD = self.norm(x_BTD) if self.config.block.norm_order == "pre" else x_BTD
        logits_BTV = (self.head or self.tokens).logits(x_BTD)
        limit = self.config.logit_softcap
        return logits_BTV if limit is None else soft_cap(logits_BTV, limit)

    @jax.named_scope("loss")
    def losses(self, x_BTD: Array, batch: Mapping[str, Array]) -> dict[str, Array]:
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

    def empty_state(self, batch: int) -> dict[str, Cache]:
        """Empty caches for up to seq_length tokens and this device's heads."""
        config, attention = self.config, self.blocks.attention
        layers, heads = attention.out.w.shape[0], attention.local_kv_heads
        shape = (layers, batch, config.seq_length, heads, config.block.head_size)
        k_LBSNH = jnp.zeros(shape, config.dtype)
        return {"blocks": Cache(k_LBSNH, k_LBSNH, jnp.zeros(layers, jnp.int32))}
