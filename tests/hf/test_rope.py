"""Rotary positions of `config.json`, as transformers 4 and 5 write them."""

import math
from typing import Any

import pytest

from jaxptd.errors import UserError
from jaxptd.hf import rope

NAMES = ("scaling", "factor", "original_length", "range", "attention_factor")
NONE = {f"rope_{name}": None for name in NAMES}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PLAIN = {"rope_theta": 1e4, **NONE}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def ours(scaling: str | None, *values: Any) -> dict[str, Any]:
    return NONE | dict(zip(NONE, (scaling, *values), strict=False))


STRETCHED = {"rope_theta": 5e5, **ours("llama3", 8.0, 8192, (1.0, 4.0))}
LONG = {"rope_theta": 1e4, **ours("yarn", 4.0, 32768, (1.0, 32.0))}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {"rope_theta": 1e4, **NONE}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5, **NONE}),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            {"rope_theta": 1e6, **NONE},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_theta": 5e5, **ours("llama3", 8.0, 8192, (1.0, 4.0))},
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_theta": 500000}},
            {"rope_theta": 5e5, **ours("llama3", 8.0, 8192, (1.0, 4.0))},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_theta": 1e4, **ours("linear", 2.0, None, None)},
        ),
        (
            {"rope_scaling": YARN | {"beta_fast": 16, "attention_factor": None}},
            {"rope_theta": 1e4, **ours("yarn", 4.0, 32768, (1.0, 16.0))},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
            {"rope_theta": 1e4, **ours("yarn", 4.0, 64, (1.0, 32.0))},
        ),
        # As transformers has them: `rope_scaling` goes before `rope_parameters`, its theta too.
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": YARN},
            {"rope_theta": 1e4, **ours("yarn", 4.0, 32768, (1.0, 32.0))},
        ),
        (
            {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_theta": 5e5, "rope_scaling": {}},
            {"rope_theta": 1e6, **ours("yarn", 4.0, 32768, (1.0, 32.0))},
        ),
        ({"rope_scaling": LLAMA3 | {"type": "yarn"}, "rope_theta": 5e5}, STRETCHED),
        # The length before is that beside the rotation, if there is one.
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            {"rope_theta": 1e4, **ours("yarn", 4.0, 64, (1.0, 32.0))},
        ),
        # Keys that change nothing.
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, PLAIN),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}, PLAIN),
        ({"rope_scaling": YARN | {"finetuned": True, "attn_factor": 0.9, "truncate": True}}, LONG),
        ({"rope_scaling": YARN | {"attention_factor": 0.1 * math.log(4) + 1}}, LONG),
        ({"rope_scaling": YARN | {"mscale": 0.7, "beta_fast": None, "beta_slow": 0}}, LONG),
        ({"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": 131072}, LONG),
        # Factors of turned vectors.
        ({"rope_scaling": YARN | {"attention_factor": 1}}, LONG | {"rope_attention_factor": 1.0}),
        (
            {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}},
            LONG | {"rope_attention_factor": (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)},
        ),
    ],
)
def test_rotary_positions(config: dict, options: dict) -> None:
    assert rope.read(config) == options


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type=dynamic; use a model with"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate=False; use a model with truncate"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5; use a mode"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; use a model that rotates"),
        ({"rope_scaling": YARN | {"attention_factor": "1"}}, "attention_factor=1; it must be a n"),
        (
            {"rope_parameters": {"full_attention": YARN}, "layer_types": ["full_attention"]},
            "rope_parameters differs by layer .full_attention.; use a model with one rotation",
        ),
        ({"rope_scaling": [2.0]}, "rope_scaling=.2.0.; it must be an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling=yarn; it must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None; it must be a number above 0"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type="),
        ({"rope_scaling": LLAMA3 | {"factor": -1}}, "factor=-1; it must be a number above 0"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": "1"}}, "low_freq_factor=1; it must be a nu"),
        ({"rope_theta": float("inf")}, "rope_theta=inf; it must be a number above 0"),
        ({"rope_theta": True}, "rope_theta=True; it must be a number above 0"),
    ],
)
def test_positions_that_there_are_not(config: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        rope.read(config)
