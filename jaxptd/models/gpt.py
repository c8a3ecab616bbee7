"""GPT-2: learned positions, pre-norm blocks, GELU, tied output; names no axis and no collective.

Letters: B batch, T position, S maximum length, D model, L layers, N heads, H head size,
V vocabulary.
Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig
from jaxptd.fields import check_argument
from jaxptd.layers.attention import Cache
from jaxptd.layers.block import drop_residual, make_blocks, run_blocks
from jaxptd.layers.dropout import Places, Site
from jaxptd.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.loss import vocab_parallel_cross_entropy
from jaxptd.layers.norm import Norm


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
            PositionEmbedding(config.seq_length, config.hidden_size, form=form, rngs=rngs)
            if config.block.positions == "learned"
            else None
        )
        self.blocks = make_blocks(config, form=form, rngs=rngs)
        self.norm = Norm(config.hidden_size, options=config.block, form=form, rngs=rngs)
        self.head = None if config.tie_embeddings else make_table()
        self.config, self.form, self.offload = config, form, offload

    def logits(
        self, tokens_BT: Array, places: Places, cache: Cache | None = None
    ) -> tuple[Array, Cache | None]:
        """tokens[B, T] -> logits[B, T, V], V sharded, and the cache with these tokens."""
        x_BTD = self.embed(tokens_BT, places)
        run = partial(run_blocks, config=self.config, offload=self.offload)
        x_BTD, cache = run(self.blocks, x_BTD, places, cache=cache)
        return self.output(x_BTD), cache

    @jax.named_scope("embedding")
    def embed(self, tokens_BT: Array, places: Places) -> Array:
        """tokens[B, T] -> x as the residual stream has it."""
        dtype = jnp.dtype(self.config.dtype)
        x_BTD = self.tokens(tokens_BT, dtype)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(places.position_T, dtype)
        embedded = places.at(0, Site.EMBEDDING)
        return drop_residual(x_BTD, embedded, form=self.form, rate=self.config.dropout)

    def output(self, x_BTD: Array) -> Array:
        """x after all blocks -> logits[B, T, V], V sharded."""
        return (self.head or self.tokens).logits(self.norm(x_BTD))

    def loss(self, tokens_BT: Array, targets_BT: Array, places: Places) -> Array:
        """-log probability of each target in nats, `[B, T]`, float32 at least; 0 for targets < 0.

        T is sharded as in the logits.
        """
        x_BTD = self.embed(tokens_BT, places)
        run = partial(run_blocks, config=self.config, offload=self.offload)
        x_BTD, _ = run(self.blocks, x_BTD, places, cache=None)
        return self.output_loss(x_BTD, targets_BT)

    @jax.named_scope("loss")
    def output_loss(self, x_BTD: Array, targets_BT: Array) -> Array:
        """x after all blocks -> the loss of each token, as `loss` gives it."""
        logits_BTV = self.output(x_BTD)
        targets_BT = self.form.axes.local_logit_tokens(targets_BT)
        loss_BT = vocab_parallel_cross_entropy(
            logits_BTV, targets_BT, self.form.axes, self.config.vocab_size
        )
        return jnp.where(targets_BT >= 0, loss_BT, 0)

    def empty_cache(self, batch: int) -> Cache:
        """An empty cache for up to seq_length tokens and this device's heads."""
        config, attention = self.config, self.blocks.attention
        layers, heads = attention.out.w.shape[0], attention.local_kv_heads
        shape = (layers, batch, config.seq_length, heads, config.block.head_size)
        k_LBSNH = jnp.zeros(shape, config.dtype)
        return Cache(k_LBSNH, k_LBSNH, jnp.zeros(layers, jnp.int32))
