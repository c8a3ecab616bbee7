"""Rotary positions of `config.json`, as transformers 4 and 5 write them."""

from typing import Any

import pytest

from jaxptd.errors import UserError
from jaxptd.hf import rope

NONE = {"rope_scaling": None, "rope_factor": None, "rope_original_length": None, "rope_range": None}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def ours(scaling: str | None, *values: Any) -> dict[str, Any]:
    return dict(zip(NONE, (scaling, *values), strict=True))


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
    ],
)
def test_rotary_positions(config: dict, options: dict) -> None:
    assert rope.read(config) == options


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type=dynamic; use a model with"),
        ({"rope_scaling": LLAMA3 | {"type": "yarn"}}, "rope_type="),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "rope_parameters has mscale; use a model witho"),
        ({"rope_scaling": [2.0]}, "rope_parameters=.2.0.; it must be an object"),
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
