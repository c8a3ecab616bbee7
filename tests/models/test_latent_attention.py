"""Latent attention in the tables of a model: parameters, FLOPs, and what a device holds."""

import math
from typing import Any

import pytest
import tiny

from jaxptd.config import ModelConfig, nested
from jaxptd.layout import Axis
from jaxptd.mesh import Layout
from jaxptd.models.families import architecture_of
from jaxptd.parts.latent_attention import LatentAttentionShape
from jaxptd.parts.sizes import elements_on_device

V3: dict[str, Any] = {
    "family": "deepseek_v3",
    "num_layers": 61,
    "hidden_size": 7168,
    "num_heads": 128,
    "ffn_hidden_size": 18432,
    "vocab_size": 129280,
    "seq_length": 4096,
    "tie_embeddings": False,
}
V2_LITE: dict[str, Any] = {
    "family": "deepseek_v2",
    "num_layers": 27,
    "hidden_size": 2048,
    "num_heads": 16,
    "ffn_hidden_size": 10944,
    "vocab_size": 102400,
    "seq_length": 4096,
    "tie_embeddings": False,
    "latent.q_rank": 0,
    "moe.num_experts": 64,
    "moe.ffn_hidden_size": 1408,
    "moe.shared_ffn_hidden_size": 2816,
    "moe.num_groups": 1,
    "moe.top_groups": 1,
    "moe.scale": 1.0,
}


@pytest.mark.parametrize(
    ("sizes", "billions", "active"),
    [(V3, 671.0, 37.6), (V2_LITE, 15.7, 2.7)],
    ids=["V3", "V2 Lite"],
)
def test_published_numbers_of_parameters(sizes: dict, billions: float, active: float) -> None:
    """DeepSeek-V3: 671B, 37B of them for a token without one of the tables (2412.19437, 4.2)."""
    parts = architecture_of(ModelConfig(**nested(sizes)))
    ends = sum(end.weights for end in parts.ends)
    found = sum(each.layers * each.weights for each in parts.stacks) + ends
    assert round(found / 1e9, 1) == billions
    used = sum(s.layers * p.multiplications(1) for s in parts.stacks for p in s.parts) + ends
    assert round(used / 1e9, 1) == active


def test_flops_of_scores_leave_out_the_padding_of_values() -> None:
    shape = LatentAttentionShape.of(ModelConfig(**nested(V3)))
    assert shape.score_flops == 2 * 128 * (192 + 128) * 4096
    assert shape.weights == 187_105_280  # 187M in each of 61 layers
    assert shape.cuts_output


@pytest.mark.parametrize("queries", [0, 10])
def test_a_device_holds_matrices_of_latent_vectors_whole(queries: int) -> None:
    program = tiny.program(Layout(tp=4), **tiny.LATENT | {"latent.q_rank": queries})
    (stack,) = architecture_of(program.config.model).stacks
    attention = {n: i for n, i in program.infos.items() if ".attention." in n and "norm" not in n}
    found = sum(elements_on_device(info, program.config.layout) for info in attention.values())
    assert found == stack.layers * stack.parts[0].held(4, 4)
    whole = [n for n, i in attention.items() if Axis.TP not in i.axes]
    names = ["kv_latent", *(["q_latent"] if queries else [])]
    assert sorted(whole) == [f"blocks.attention.{name}.w" for name in names]
    assert (
        sum(math.prod(i.shape) for i in attention.values()) == stack.layers * stack.parts[0].weights
    )
