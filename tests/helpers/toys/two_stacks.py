"""A model with an encoder, a decoder and a norm that the layers of both read."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig
from jaxptd.layers.attention import Cache
from jaxptd.layers.block import Block, make_blocks
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.models.decoder import DECODER, architecture
from jaxptd.models.gpt import GPT
from jaxptd.parts.architecture import Architecture

X = tuple[Array, Array]  # source and target are both the batch's tokens


class Common(nnx.Module):
    """The parameters that all layers read."""

    def __init__(
        self, config: ModelConfig, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        self.norm = Norm(
            config.hidden_size, options=config.block, tensor_parallel=tensor_parallel, rngs=rngs
        )


class Encoder(Block):
    """A layer that changes the source."""

    def __call__(  # type: ignore[override]
        self, x: X, token_info: TokenInfo, layer: Array, cache: Any, common: Common
    ) -> tuple[X, Any]:
        source, target = x
        source, cache = super().__call__(common.norm(source), token_info, layer, cache)
        return (source, target), cache


class Decoder(Block):
    """A layer that reads the source and changes the target."""

    def __call__(  # type: ignore[override]
        self, x: X, token_info: TokenInfo, layer: Array, cache: Any, common: Common
    ) -> tuple[X, Any]:
        source, target = x
        seen = common.norm(source)
        target, cache = super().__call__(target + seen, token_info, layer, cache)
        return (source, target), cache


class TwoStacks(GPT):
    """GPT, with L encoders and L - 1 decoders in place of its layers."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        offload: bool = False,
    ) -> None:
        super().__init__(config, tensor_parallel=tensor_parallel, rngs=rngs, offload=offload)
        del self.blocks

        encoder, decoder = parts(config).stacks
        make: Any = partial(make_blocks, tensor_parallel=tensor_parallel, rngs=rngs)
        self.encoder = make(encoder, config, kind=Encoder)
        self.decoder = make(decoder, config, kind=Decoder)
        self.common = Common(config, tensor_parallel=tensor_parallel, rngs=rngs)

    @property
    def stacks(self) -> Mapping[str, Any]:
        return {"encoder": self.encoder, "decoder": self.decoder}

    def embed(self, batch: Mapping[str, Array], token_info: TokenInfo) -> X:  # type: ignore[override]
        x_BTD = super().embed(batch, token_info)
        return x_BTD, x_BTD / 2

    def output(self, x: X) -> Array:  # type: ignore[override]
        return super().output(x[1])

    def empty_state(self, batch: int) -> dict[str, Cache]:
        return {name: self._caches(stack, batch) for name, stack in self.stacks.items()}

    def _caches(self, stack: Any, batch: int) -> Cache:
        config, attention = self.config, stack.attention
        layers, heads = attention.out.w.shape[0], attention.local_kv_heads
        shape = (layers, batch, config.seq_length, heads, config.block.head_size)
        k_LBSNH = jnp.zeros(shape, config.dtype)
        return Cache(k_LBSNH, k_LBSNH, jnp.zeros(layers, jnp.int32))


def parts(model: ModelConfig) -> Architecture:
    """The parts of the model, except the norm that all layers read."""
    found = architecture(model)
    (stack,) = found.stacks
    encoder = dataclasses.replace(stack, name="encoder", updates=None)  # separate arrays
    decoder = dataclasses.replace(stack, name="decoder", layers=stack.layers - 1, updates=None)
    return dataclasses.replace(found, stacks=(encoder, decoder))


TWO_STACKS = dataclasses.replace(DECODER, make=TwoStacks, architecture=parts)
