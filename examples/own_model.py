"""Adds a model whose attention and MLP run in parallel from one norm, as in GPT-J and PaLM.

`python examples/own_model.py COMMAND ...` does what `python -m jaxptd COMMAND ...` does, with one
more family: `train --config configs/quickstart.yaml --model.family parallel-gpt`.
docs/howto/own_model.md walks through this file. Source: Chowdhery et al., PaLM, arXiv 2204.02311,
section 2 (parallel layers).
"""

import dataclasses
from functools import partial
from typing import Any

from flax import nnx
from jax import Array

import jaxptd
from jaxptd import UserError
from jaxptd.__main__ import run
from jaxptd.layers.block import Block
from jaxptd.layers.dropout import DropoutSite, TokenInfo
from jaxptd.layers.norm import Norm
from jaxptd.models import decoder
from jaxptd.params import normal
from jaxptd.parts.architecture import Architecture, Stack


def architecture(model: jaxptd.ModelConfig) -> Architecture:
    """A decoder's parts, run in parallel within each layer; predictions just sum over them."""
    parts = decoder.architecture(model)
    (stack,) = parts.stacks
    return dataclasses.replace(parts, stacks=(dataclasses.replace(stack, parallel=True),))


class ParallelBlock(Block):
    """`x + attention(norm(x)) + mlp(norm(x))`."""

    def __init__(self, stack: Stack, config: Any, *, tensor_parallel: Any, rngs: nnx.Rngs) -> None:
        own: Any = {"tensor_parallel": tensor_parallel, "rngs": rngs}
        init_out = normal(0.02 / (len(stack.parts) * stack.layers) ** 0.5)
        attention, mlp = stack.parts
        self.norm = Norm(stack.hidden, options=config.block, **own)
        self.attention = attention.make_layer(config, init_out=init_out, **own)
        self.mlp = mlp.make_layer(config, init_out=init_out, **own)
        self.rate, self.scale = config.dropout, config.block.residual_scale
        self.tensor_parallel = tensor_parallel

    def __call__(
        self, x_BTD: Array, token_info: TokenInfo, layer: Array, cache: Any, *_: Any, **__: Any
    ) -> tuple[Array, Any]:
        """The residual stream before the layer -> after it, and the cache, extended by this x."""
        add = partial(self.add, token_info=token_info, layer=layer)
        x_BTD, n_BTD = self.norm.beside(x_BTD)
        own = token_info.at(layer, DropoutSite.ATTENTION)
        a_BTD, cache = self.attention(n_BTD, own, cache)
        x_BTD = add(x_BTD, a_BTD, site=DropoutSite.ATTENTION_OUTPUT)
        return add(x_BTD, self.mlp(n_BTD), site=DropoutSite.MLP_OUTPUT), cache


class ParallelGPT(jaxptd.GPT):
    """GPT made of parallel blocks."""

    block = ParallelBlock
    architecture = staticmethod(architecture)


def check(config: jaxptd.Config) -> None:
    """Raises UserError unless `norm_order` is pre: a layer's only norm is that of its input."""
    decoder.check(config)
    if (order := config.model.block.norm_order) != "pre":
        raise UserError(f"model.norm_order={order}: parallel layers need pre; leave the field out")


jaxptd.register_family(
    "parallel-gpt", like="gpt", make=ParallelGPT, architecture=architecture, check=check
)

if __name__ == "__main__":
    run()
