"""A model's interface, the path of a batch through its layers, and models of one text.

A model names no axis and no collective. `x` is any tree of arrays, each sharded like the residual
stream. Models of one text consist of tables of tokens and positions and of blocks.
Letters: B batch, T position, S maximum length, D model, L layers, N heads, H head size, V
vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig
from jaxptd.fields import check_argument
from jaxptd.layers.attention import Cache
from jaxptd.layers.attention.heads import Heads
from jaxptd.layers.block import (
    Block,
    Period,
    Routed,
    Seen,
    drop_residual,
    make_blocks,
    noise_residual,
)
from jaxptd.layers.dropout import DropoutSite, TokenInfo
from jaxptd.layers.linear import INIT, PositionEmbedding, TypeEmbedding, VocabParallelEmbedding
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.models.decoder import IN_DOCUMENT, architecture, router_losses
from jaxptd.params import Initialiser
from jaxptd.pipeline.pools import X
from jaxptd.zero.loop import run_blocks

SEEN = "seen"  # of a batch: where routers record what they choose, if there is such a field
COMMON = "common"  # prefix of the names of `Model.common`'s parameters
# For each stack: keys and values of the tokens so far; in training, the parameters that ZeRO holds.
GenerationState = dict[str, Any]


class Model(Protocol):
    """A flax module as steps, pipelines and generation use it."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and choices."""

    @property
    def offload(self) -> bool:
        """True if what `remat: dots` saves for backward goes to host memory."""

    @property
    def stacks(self) -> Mapping[str, Any]:
        """The stacks of layers in the order in which x passes them, by attribute name.

        A stack has the parameters of L layers, `[L, ...]`, and `remats`, that of `ModelConfig`
        for L. A layer of it is called with (x, places, number of the layer in the model, its state,
        `common`) and returns x and its state. One with `recomputes_inside` is also given `wrap`,
        for the parts that it runs in turn.
        """

    @property
    def common(self) -> Any:
        """A module with parameters that every layer may read, or None."""

    def embed(self, batch: Mapping[str, Array], token_info: TokenInfo) -> X:
        """A batch, with or without targets -> x before the first layer."""

    @property
    def enter(self) -> Callable[[str, X], X] | None:
        """(name of a stack, x after the stack before, or `embed`) -> x as its first layer takes it.

        None if every stack takes x as it is.
        """

    def losses(self, x: X, batch: Mapping[str, Array], token_info: TokenInfo) -> dict[str, Array]:
        """x after all layers -> sums over this device's targets, by the family's names of losses.

        In float32 or wider.
        """

    def evaluated(
        self, x: X, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> dict[str, Array]:
        """`losses`, and the sums of scores that only evaluation computes."""

    def output(self, x: X) -> Array:
        """x after all layers -> logits[B, T, V], V sharded."""

    def empty_state(self, batch: int) -> GenerationState:
        """The state of all stacks before the first token, for this device's heads."""


def check_arguments(model: Any, config: ModelConfig, tensor_parallel: TensorParallel) -> None:
    """Raises UserError if an argument of a model's constructor has the wrong type."""
    name = f"jaxptd.{type(model).__name__}"
    check_argument(name, "config", config, ModelConfig)
    check_argument(name, "tensor_parallel", tensor_parallel, TensorParallel)


def run_layers(
    model: Model,
    batch: Mapping[str, Array],
    token_info: TokenInfo,
    state: GenerationState | None = None,
    *,
    traced: bool = True,  # else x has only the shape and type of x after all layers
) -> tuple[X, GenerationState]:
    """A batch -> x after all layers, and the state: with these tokens, if one was given."""
    scanned = model.config.scan_layers
    run: Any = partial(run_blocks, scanned=scanned, offload=model.offload, common=model.common)
    run = run if traced else lambda _, x, *__, **___: (x, None)
    x, new, first = model.embed(batch, token_info), {}, 0
    for name, stack in model.stacks.items():
        cache = state[name] if state else None
        x = model.enter(name, x) if model.enter else x
        x, new[name] = run(stack, x, token_info, cache=cache, first=first)
        first += sum(count for _, count in stack.remats)
    return x, new


# ---- models of one text --------------------------------------------------------------------------


class TextModel(nnx.Module):
    """The embedding and the blocks; subclasses add heads and losses.

    Args:
        config: sizes and choices; vocab_size must be set.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial parameters.
        offload: whether what `remat: dots` saves for backward goes to host memory.

    Raises:
        ValueError: vocab_size is not set.
    """

    common: nnx.Module | None = None  # layers share no parameters
    enter: Callable[[str, Array], Array] | None = None  # every stack takes x as it is
    block: type[Block] = Block
    architecture = staticmethod(architecture)

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        offload: bool = False,
    ) -> None:
        check_made(self, config, tensor_parallel)
        size, options = config.hidden_size, config.block
        self.config, self.tensor_parallel, self.offload = config, tensor_parallel, offload
        self.options, self.norms_last = options, options.norm_order != "post"
        self.terms_of_loss = len(router_losses(config))
        self.tokens = self.table(rngs)
        learned = options.positions == "learned"
        self.positions = (
            PositionEmbedding(
                config.num_positions, size, tensor_parallel=tensor_parallel, rngs=rngs
            )
            if learned
            else None
        )
        types = options.token_types
        self.types = (
            TypeEmbedding(types, size, tensor_parallel=tensor_parallel, rngs=rngs)
            if types
            else None
        )
        made = self.architecture(config).stacks
        self.stack_names = tuple(stack.name for stack in made)
        for stack in made:
            blocks = make_blocks(
                stack, config, tensor_parallel=tensor_parallel, rngs=rngs, kind=self.block
            )
            setattr(self, stack.name, blocks)
        self.norm = Norm(size, options=options, tensor_parallel=tensor_parallel, rngs=rngs)

    def table(self, rngs: nnx.Rngs) -> VocabParallelEmbedding:
        """Makes a table of the vocabulary."""
        return make_table(self.config, tensor_parallel=self.tensor_parallel, rngs=rngs)

    @property
    def stacks(self) -> Mapping[str, Block | Period]:
        """The stacks; one if all layers are of the same kind."""
        return {name: getattr(self, name) for name in self.stack_names}

    @jax.named_scope("embedding")
    def embed(self, batch: Mapping[str, Array], token_info: TokenInfo) -> X:
        """A batch with tokens[B, T] -> x, the residual stream, with room for routers' losses."""
        x_BTD, seen = self.embedded(batch, token_info), cast(Seen | None, batch.get(SEEN))
        if seen is None and (not self.terms_of_loss or "targets" not in batch):
            return x_BTD
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        return Routed(x_BTD, jnp.zeros_like(x_BTD[..., : self.terms_of_loss], dtype=wide), seen)

    def embedded(self, batch: Mapping[str, Array], token_info: TokenInfo) -> Array:
        """A batch with tokens[B, T] -> the residual stream."""
        dtype = jnp.dtype(self.config.dtype)
        x_BTD = self.tokens(batch["tokens"], dtype)
        if alpha := self.config.neftune:
            read = token_info.at(0, DropoutSite.EMBEDDING_NOISE)
            most = alpha / math.sqrt(self.config.seq_length * self.config.hidden_size)
            x_BTD = noise_residual(x_BTD, read, tensor_parallel=self.tensor_parallel, most=most)
        if self.positions is not None:
            position_T = batch.get(IN_DOCUMENT, token_info.position_T)
            x_BTD = x_BTD + self.positions(position_T, dtype)
        if self.types is not None:
            x_BTD = x_BTD + self.types(batch["token_types"], dtype)
        scale = self.options.embedding_scale
        x_BTD = x_BTD if scale == 1 else x_BTD * scale
        if not self.norms_last:
            x_BTD = self.norm(x_BTD)
        if not self.config.dropout:
            return x_BTD
        embedded = token_info.at(0, DropoutSite.EMBEDDING)
        return drop_residual(
            x_BTD, embedded, tensor_parallel=self.tensor_parallel, rate=self.config.dropout
        )

    @jax.named_scope("embedding")
    def looked_up(self, tokens_BT: Array, token_info: TokenInfo, *, layer: int) -> Array:
        """Embeddings of tokens without their positions; layer: whose dropout they use."""
        x_BTD = self.tokens(tokens_BT, jnp.dtype(self.config.dtype))
        scale = self.options.embedding_scale
        x_BTD = x_BTD if scale == 1 else x_BTD * scale
        embedded, rate = token_info.at(layer, DropoutSite.EMBEDDING), self.config.dropout
        return drop_residual(x_BTD, embedded, tensor_parallel=self.tensor_parallel, rate=rate)

    def seen(self, x: Routed, batch: Mapping[str, Array], token_info: TokenInfo) -> Seen | None:
        """x after all blocks -> what all routers chose."""
        return x.seen

    def last_norm(self, x_BTD: Array) -> Array:
        """x after all blocks -> x for a head, normalised if the blocks do not do it."""
        return self.norm(x_BTD) if self.norms_last else x_BTD

    def empty_state(self, batch: int) -> GenerationState:
        """Empty caches for up to seq_length tokens and this device's heads."""
        return {
            name: {
                of: empty_cache(x.attention, self.config, batch) for of, x in each.blocks.items()
            }
            if isinstance(each, Period)
            else empty_cache(each.attention, self.config, batch)
            for name, each in self.stacks.items()
        }


def check_made(model: nnx.Module, config: ModelConfig, tensor_parallel: TensorParallel) -> None:
    """Checks the arguments of a model's class."""
    check_arguments(model, config, tensor_parallel)
    if config.vocab_size is None:
        raise ValueError("model.vocab_size is not set; take it from the tokenizer")


def make_table(
    config: ModelConfig,
    *,
    tensor_parallel: TensorParallel,
    rngs: nnx.Rngs,
    init: Initialiser = INIT,
) -> VocabParallelEmbedding:
    """Makes a table of the vocabulary."""
    return VocabParallelEmbedding(
        *(config.vocab_size or 0, config.hidden_size),
        tensor_parallel=tensor_parallel,
        rngs=rngs,
        rows=config.padded_vocab(tensor_parallel.padded),
        init=init,
    )


def empty_cache(attention: Heads, config: ModelConfig, batch: int) -> Cache:
    """The caches of a stack of layers, for up to seq_length tokens and this device's heads.

    attention: the layers', with parameters `[L, ...]`.
    """
    layers = attention.out.w.shape[0]
    one = empty_layer_cache(attention, config, batch)
    return Cache(*(jnp.zeros((layers, *x.shape), x.dtype) for x in one))


def empty_layer_cache(attention: Heads, config: ModelConfig, batch: int) -> Cache:
    """The cache of one layer; arguments as of `empty_cache`."""
    shapes = [(batch, config.seq_length, *each) for each in attention.cached]
    k_BSNH, v_BSNH = (jnp.zeros(shape, config.dtype) for shape in shapes)
    return Cache(k_BSNH, v_BSNH, jnp.zeros((), jnp.int32))
