"""T5: an encoder of a source, and a decoder that predicts targets from it.

Letters: B batch, S position in the source, T position in the targets, D model, V vocabulary.
Source: Raffel et al., arXiv 1910.10683; gates and a separate output layer: Shazeer, arXiv
2002.05202, and T5's release 1.1.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig, with_fields
from jaxptd.layers.attention import Cache, CrossAttention, Encoded, RelativeBias, Source
from jaxptd.layers.block import Block, drop_residual, make_blocks
from jaxptd.layers.dropout import DropoutSite, TokenInfo
from jaxptd.layers.loss import soft_cap
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.models.encoder_decoder import architecture
from jaxptd.models.gpt import sums_over_targets
from jaxptd.models.model import check_made, empty_cache, make_table
from jaxptd.parts.architecture import Stack


class X(NamedTuple):
    """The residual streams of source and targets; in generation the source comes only once."""

    source: Array | None
    target: Array


class Decoding(NamedTuple):
    """A decoder layer's state in generation: for the tokens so far, and for the source."""

    cache: Cache
    encoded: Encoded


class Common(nnx.Module):
    """Parameters that layers share: a bias table for each stack, and the encoder's last norm."""

    def __init__(
        self, config: ModelConfig, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        self.encoder_bias = RelativeBias(
            encoder_of(config), tensor_parallel=tensor_parallel, rngs=rngs
        )
        self.decoder_bias = RelativeBias(
            decoder_of(config), tensor_parallel=tensor_parallel, rngs=rngs
        )
        options = config.block
        self.source_norm = Norm(
            config.hidden_size, options=options, tensor_parallel=tensor_parallel, rngs=rngs
        )


class EncoderLayer(Block):
    """A layer that updates the source."""

    def __call__(  # type: ignore[override]
        self, x: X, token_info: TokenInfo, layer: Array, cache: Cache | None, common: Common
    ) -> tuple[X, Cache | None]:
        """x -> x; places: those of the targets and of the source."""
        if x.source is None:
            return x, cache
        assert token_info.source is not None
        source_BSD, cache = super().__call__(
            x.source, token_info.source, layer, cache, bias_NR=common.encoder_bias()
        )
        return x._replace(source=source_BSD), cache


class DecoderLayer(Block):
    """A layer that updates the targets; between attention and MLP it attends to the source."""

    def __init__(
        self,
        stack: Stack,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(stack, config, tensor_parallel=tensor_parallel, rngs=rngs)
        self.cross_norm = Norm(
            config.hidden_size, options=config.block, tensor_parallel=tensor_parallel, rngs=rngs
        )
        self.cross: CrossAttention = stack.parts[1].make_layer(
            config, tensor_parallel=tensor_parallel, rngs=rngs, init_out=self.init_out
        )

    def __call__(  # type: ignore[override]
        self, x: X, token_info: TokenInfo, layer: Array, cache: Decoding | None, common: Common
    ) -> tuple[X, Decoding | None]:
        """x -> x, with its source unchanged."""
        source = self._source(x, token_info, cache, common)
        target_BTD, seen = super().__call__(
            x.target,
            token_info,
            layer,
            cache and cache.cache,
            bias_NR=common.decoder_bias(),
            between=partial(self._cross, token_info=token_info, layer=layer, source=source),
        )
        if cache is not None:
            assert seen is not None and isinstance(source, Encoded)
            cache = Decoding(seen, source)
        return x._replace(target=target_BTD), cache

    def _cross(
        self, x_BTD: Array, *, token_info: TokenInfo, layer: Array, source: Source | Encoded
    ) -> Array:
        """Adds attention to the source to x."""
        x_BTD, n_BTD = self.cross_norm.beside(x_BTD)
        c_BTD = self.cross(n_BTD, token_info.at(layer, DropoutSite.CROSS_ATTENTION), source)
        site = DropoutSite.CROSS_ATTENTION_OUTPUT
        return self.add(x_BTD, c_BTD, token_info, layer=layer, site=site)

    def _source(
        self, x: X, token_info: TokenInfo, cache: Decoding | None, common: Common
    ) -> Source | Encoded:
        """The normalised source; in generation its keys and values, computed on the first call."""
        if x.source is None:
            assert cache is not None
            return cache.encoded
        assert token_info.source is not None
        source = Source(common.source_norm(x.source), token_info.source.segment_BCT)
        return source if cache is None else self.cross.encode(source)


class T5(nnx.Module):
    """An encoder-decoder; takes the arguments of `TextModel` and raises its errors."""

    enter: Callable[[str, Any], Any] | None = None  # both stacks change their own part of x

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        offload: bool = False,
    ) -> None:
        check_made(self, config, tensor_parallel)
        self.config, self.tensor_parallel, self.offload = config, tensor_parallel, offload
        self.tokens = make_table(config, tensor_parallel=tensor_parallel, rngs=rngs)
        encoder, decoder = architecture(config).stacks
        make: Any = partial(make_blocks, tensor_parallel=tensor_parallel, rngs=rngs)
        self.encoder = make(encoder, encoder_of(config), kind=EncoderLayer)
        self.decoder = make(decoder, decoder_of(config), kind=DecoderLayer)
        self.common = Common(config, tensor_parallel=tensor_parallel, rngs=rngs)
        self.norm = Norm(
            config.hidden_size, options=config.block, tensor_parallel=tensor_parallel, rngs=rngs
        )
        self.head = (
            None
            if config.tie_embeddings
            else make_table(config, tensor_parallel=tensor_parallel, rngs=rngs)
        )

    @property
    def stacks(self) -> Mapping[str, Any]:
        """The encoder, then the decoder."""
        return {"encoder": self.encoder, "decoder": self.decoder}

    @jax.named_scope("embedding")
    def embed(self, batch: Mapping[str, Array], token_info: TokenInfo) -> X:
        """A batch with the decoder's inputs[B, T], and with or without source[B, S] -> x."""
        target_BTD = self._embed(batch["inputs"], token_info, layer=self.config.num_layers)
        if token_info.source is None:
            return X(None, target_BTD)
        return X(self._embed(batch["source"], token_info.source, layer=0), target_BTD)

    def _embed(self, tokens: Array, token_info: TokenInfo, *, layer: int) -> Array:
        """Looks up rows of the table; layer: the first one after them, whose dropout they use."""
        x, config = self.tokens(tokens, jnp.dtype(self.config.dtype)), self.config
        x = x if config.block.embedding_scale == 1 else x * config.block.embedding_scale
        embedded = token_info.at(layer, DropoutSite.EMBEDDING)
        return drop_residual(x, embedded, tensor_parallel=self.tensor_parallel, rate=config.dropout)

    def output(self, x: X) -> Array:
        """x after all layers -> logits[B, T, V], V sharded."""
        target_BTD = self.norm(x.target) * self.config.block.output_scale
        logits_BTV = (self.head or self.tokens).logits(target_BTD)
        limit = self.config.logit_softcap
        return logits_BTV if limit is None else soft_cap(logits_BTV, limit)

    @jax.named_scope("loss")
    def losses(self, x: X, batch: Mapping[str, Array], token_info: TokenInfo) -> dict[str, Array]:
        """x after all layers -> `sums_over_targets`."""
        return sums_over_targets(
            self.output(x), batch["targets"], self.config, self.tensor_parallel.axes
        )

    evaluated = losses  # no scores

    def empty_state(self, batch: int) -> dict[str, Cache | Decoding]:
        """The state before a source of seq_length tokens, with padding, for this device's heads."""
        encoder, decoder = encoder_of(self.config), decoder_of(self.config)
        kv = empty_cache(self.decoder.cross, encoder, batch)
        segment_LBS = jnp.zeros(kv.k.shape[:3], jnp.int32)
        return {
            "encoder": empty_cache(self.encoder.attention, encoder, batch),
            "decoder": Decoding(
                empty_cache(self.decoder.attention, decoder, batch),
                Encoded(kv.k, kv.v, segment_LBS),
            ),
        }


def encoder_of(config: ModelConfig) -> ModelConfig:
    """The config of the encoder's layers, which attend to all tokens of a source."""
    return _stack_of(config, config.num_layers, causal=False)


def decoder_of(config: ModelConfig) -> ModelConfig:
    """The config of the decoder's layers, which attend to earlier tokens."""
    return _stack_of(config, config.decoder_layers, seq_length=config.target_length)


def _stack_of(config: ModelConfig, layers: int, **fields: Any) -> ModelConfig:
    """A config with the layers of one stack."""
    first = config.remat_layers
    return with_fields(
        config,
        {
            "num_layers": layers,
            "encoder_decoder.num_layers": None,
            "encoder_decoder.seq_length": None,
            "remat_layers": None if first is None else min(first, layers),
            **fields,
        },
    )
