"""Cases of experts, whose layouts have an additional axis, see `cases.py`."""

import dataclasses

import jax.numpy as jnp
from contract import Case, residual_spec
from jax.sharding import PartitionSpec as P
from moves import B, D, T, ends, experts

from jaxptd.config import ModelConfig
from jaxptd.config.moe import MoE as Experts
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.moe import MoE
from jaxptd.mesh import SAMPLE_AXES, Axis
from jaxptd.params import normal
from jaxptd.parts.moe import MoEShape
from tests.layers.inputs import POSITIONS, QWEN, SAMPLES, array

COUNTED = T - 3  # length of the sequence; the rest is padding
SOFTMAX = Experts(4, 2, 12, router_bias=True, balance_loss=1.0, z_loss=1.0, chunk=0.5)
SIGMOID = Experts(
    num_experts=8,
    top_k=3,
    ffn_hidden_size=12,
    shared_ffn_hidden_size=20,
    shared_gate=True,
    score="sigmoid",
    scale=2.5,
    num_groups=4,
    top_groups=2,
    balance_loss=1.0,
    chunk=2.0,
)


def with_experts(moe: Experts, **fields: object) -> ModelConfig:
    """A model like Qwen 3 with experts."""
    return dataclasses.replace(QWEN, family="qwen3_moe", moe=moe, **fields)


def run_experts(layer, x, samples, positions):
    """The output, and the terms that each token adds to the loss."""
    counted = positions < COUNTED
    y, said = layer(x, TokenInfo(samples, positions, None, counted_T=counted), 0)
    return jnp.concatenate([y, said.terms_BTQ.astype(y.dtype)], -1)


def case(name: str, model: ModelConfig, moves) -> Case:
    return Case(
        name,
        lambda tensor_parallel, rngs: MoE(
            MoEShape.of(model),
            model,
            tensor_parallel=tensor_parallel,
            rngs=rngs,
            init_out=normal(0.02),
        ),
        (array(B, T, D), SAMPLES, POSITIONS),
        lambda tensor_parallel: (
            residual_spec(tensor_parallel),
            P(SAMPLE_AXES),
            P(Axis.CP),
        ),
        residual_spec,
        moves,
        run_experts,
    )


EXPERTS = [
    case("experts", with_experts(SOFTMAX), experts(4, 2)),
    case("experts with biases", with_experts(SOFTMAX, linear_bias="all"), experts(4, 2)),
    case(
        "experts, an MLP of all tokens",
        with_experts(SIGMOID, gated=False),
        experts(8, 3, ends(2, rounds=5)),
    ),
]
