"""A module that predicts one token further than the model, or than the module before it.

    h' = W_e norm_e(embedding of the token k ahead) + W_h norm_h(h)     h: the stream before it
    h  = block(h')                                                      goes on to the next module
    logits of the token behind that one = the model's head(norm(h))

The first module takes the model's stream after its last norm, as vLLM runs the released weights of
DeepSeek-V3 (`deepseek_mtp.py`: its model returns hidden states after `norm`); later ones take what
the block before them returns, before `norm`. Positions are those of the model's own tokens.

Letters: B batch, T position, D model.
Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from functools import partial
from typing import NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.config import ModelConfig
from jaxptd.layers.attention import Cache
from jaxptd.layers.block import Block, Routed
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.linear import INIT, declare
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import TensorParallel, separated
from jaxptd.parts.architecture import Stack
from jaxptd.parts.parameters import joined
from jaxptd.remat import SAVED_MATMUL_OUT


class Ahead(NamedTuple):
    """The inputs of a module.

    x: the residual stream before it, with what routers so far say where that is recorded.
    token_BTD: embeddings of the tokens k ahead, shaped like the stream.
    """

    x: Array | Routed
    token_BTD: Array


class Join(nnx.Module):
    """Two arrays shaped like the residual stream -> the sum of their products, `w[2, D, D]`.

    In 1D every device has the whole weight, and no collective is needed.

    Args:
        size: D.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial weight.
    """

    w: nnx.Param

    def __init__(self, size: int, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs) -> None:
        declare(self, joined(tensor_parallel, size), rngs, w=INIT)
        self.tensor_parallel = tensor_parallel

    def __call__(self, *both: Array) -> Array:
        first, second = map(self.tensor_parallel.square, both, separated(self.w[...], 0))
        return checkpoint_name(first + second, SAVED_MATMUL_OUT)


class MTPModule(Block):
    """A block with norms and a matmul before it, and a norm for the head behind it.

    Args:
        stack: describes the block.
        config: of the model.
        number: how many tokens further it predicts.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial parameters.
    """

    def __init__(
        self,
        stack: Stack,
        config: ModelConfig,
        *,
        number: int,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(stack, config, tensor_parallel=tensor_parallel, rngs=rngs)
        size = config.hidden_size
        norm = partial(Norm, size, options=config.block, tensor_parallel=tensor_parallel, rngs=rngs)
        self.stream_norm, self.embedding_norm, self.norm = norm(), norm(), norm()
        self.join = Join(size, tensor_parallel=tensor_parallel, rngs=rngs)
        self.number = number
        ((self.remat, _),) = config.remats(1)

    @jax.named_scope("mtp")
    def ahead(
        self, ahead: Ahead, token_info: TokenInfo, layer: Array, cache: Cache | None
    ) -> tuple[Array | Routed, Cache | None]:
        """x behind the block, and the cache."""
        x = ahead.x
        stream_BTD = x.x_BTD if isinstance(x, Routed) else x
        joined_BTD = self.join(self.embedding_norm(ahead.token_BTD), self.stream_norm(stream_BTD))
        x = x._replace(x_BTD=joined_BTD) if isinstance(x, Routed) else joined_BTD
        return self(x, token_info, layer, cache)
