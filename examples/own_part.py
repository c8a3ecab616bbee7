"""Adds an MLP, `relu(x w_up)**2 * scale`, with a learned scale for each hidden unit.

`python examples/own_part.py COMMAND ...` does what `python -m jaxptd COMMAND ...` does, with one
more kind of MLP: `train --config configs/quickstart.yaml --model.mlp squared-relu`.
docs/howto/own_model.md walks through this file. Source: So et al., Primer, arXiv 2109.08668
(squared ReLU).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxptd
from jaxptd.__main__ import run
from jaxptd.collectives import alike
from jaxptd.layers.linear import declare
from jaxptd.layers.mlp import MLP
from jaxptd.params import ones
from jaxptd.parts.mlp import MLPShape
from jaxptd.parts.parameters import Named, Sharding, vector


class SquaredReLU(MLP):
    """The layer: both matmuls are the dense MLP's; only what happens between them differs."""

    def __init__(self, shape: "SquaredReLUShape", config: Any, *, rngs: Any, **others: Any) -> None:
        super().__init__(shape, config, rngs=rngs, **others)
        declare(self, shape.own_parameters(self.up.tensor_parallel), rngs, scale=ones)

    def activated(self, x_BTD: Array) -> Array:
        """x -> h[B, T, F], the input of the second matmul; backward recomputes it."""
        between = jax.checkpoint(squared_relu, prevent_cse=not self.looped)
        return between(self.up.kept(x_BTD), self.scale[...])


def squared_relu(h_BTF: Array, scale_F: Array) -> Array:
    """Computes in float32, since the gradient of the scale sums over tokens."""
    h, scale = alike(h_BTF.astype(jnp.promote_types(h_BTF.dtype, jnp.float32)), scale_F)
    return (jax.nn.relu(h) ** 2 * scale).astype(h_BTF.dtype)


@dataclasses.dataclass(frozen=True)
class SquaredReLUShape(MLPShape):
    """The description: what it adds to the dense MLP's costs. All formulas follow from it."""

    layer = SquaredReLU

    def own_parameters(self, sharding: Sharding) -> Named:
        """A scale for each hidden unit, sharded like the hidden units."""
        spec, padded = sharding.axes.inner_spec(1, 0), (sharding.padded(self.size),)
        yield "scale", vector((self.size,), spec, padded)

    def parameters(self, sharding: Sharding) -> Iterator:
        """The parameters of both matmuls, and the scale."""
        yield from super().parameters(sharding)
        yield from self.own_parameters(sharding)


def squared_relu_of(model: jaxptd.ModelConfig) -> SquaredReLUShape:
    """The description for a model: without a gate, even if its family uses one."""
    return dataclasses.replace(SquaredReLUShape.of(model), gated=False)


jaxptd.register_mlp("squared-relu", squared_relu_of)

if __name__ == "__main__":
    run()
