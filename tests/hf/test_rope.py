"""Rotary positions of `config.json`, compared numerically with transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxptd.config import ModelConfig, nested
from jaxptd.config.block import frequencies
from jaxptd.errors import UserError
from jaxptd.hf.families import rope

CASES = json.loads((Path(__file__).parents[1] / "golden/rope.json").read_text())
SIZES = {"hidden_size": 32, "num_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def rotation(keys: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Angles of a head's pairs, and the factor for rotated vectors, from keys of config.json."""
    options = rope.read({"max_position_embeddings": 128, **keys})
    found = ModelConfig(family="llama", **SIZES, **nested(options)).block.rope
    assert found is not None
    return frequencies(found, 8)


def test_each_case_is_that_of_transformers() -> None:
    """Covers which key takes precedence, which are ignored, and what transformers refuses.

    A partly rotated head has fewer angles, which its attention cannot use.
    """
    for keys, theirs in CASES:
        if theirs is None or len(theirs[0]) != 4:
            with pytest.raises(UserError):
                rotation(keys)
                pytest.fail(json.dumps(keys))
            continue
        turns, length = rotation(keys)
        np.testing.assert_allclose(turns, theirs[0], rtol=1e-6, err_msg=json.dumps(keys))
        assert length == pytest.approx(theirs[1], rel=1e-12), json.dumps(keys)


def test_what_is_written_has_the_same_rotation() -> None:
    for keys, theirs in CASES:
        if theirs is not None and len(theirs[0]) == 4:
            options = rope.read({"max_position_embeddings": 128, **keys})
            written = rope.write(ModelConfig(family="llama", **SIZES, **nested(options)))
            assert rope.read({"max_position_embeddings": 128, **written}) == options


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ({"rope_scaling": YARN | {"truncate": True, "type": "yarn", "attention_factor": 2.0}}, []),
        ({"rope_scaling": None, "partial_rotary_factor": 1.0}, []),
        (
            {"rope_scaling": YARN | {"attn_factor": 0.9, "finetuned": True}},
            ["attn_factor=0.9, finetuned=True: no effect with rope_type=yarn, as in transformers"],
        ),
        (
            {"rope_scaling": {"factor": 1.0}, "partial_rotary_factor": 0.5},
            ["partial_rotary_factor=0.5, factor=1.0: no effect with rope_type=default, as in tra"],
        ),
        (
            {"rope_scaling": YARN | {"type": "linear"}, "rope_parameters": {"rope_theta": 1e6}},
            [
                "rope_parameters has no effect next to rope_scaling, as in transformers",
                "type=linear: no effect with rope_type=yarn, as in transformers",
            ],
        ),
    ],
    ids=str,
)
def test_what_has_no_effect_is_said(config: dict, lines: list[str]) -> None:
    found = rope.remarks(config)
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True))


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_type=longrope; use a model w"),
        ({"rope_scaling": [2.0]}, "rope_scaling=.2.0.; it must be an object"),
        ({"rope_parameters": "yarn"}, "rope_parameters=yarn; it must be an object"),
        (
            {"rope_parameters": {"full_attention": YARN}},
            "rope_parameters has a separate object for full_attention; use a model whose layers",
        ),
        (
            {"rope_scaling": YARN, "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 with rope_type=yarn; use a model that rotates whole heads",
        ),
        ({"rope_scaling": YARN, rope.LENGTH: None}, "original_max_position_embeddings=None; it mu"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None; it must be a number above 0"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type="),
        ({"rope_scaling": LLAMA3 | {"factor": -1}}, "factor=-1; it must be a number above 0"),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": "1"}},
            'low_freq_factor="1"; it must be a nu',
        ),
        ({"rope_theta": float("inf")}, "rope_theta=inf; it must be a number above 0"),
        ({"rope_theta": True}, "rope_theta=True; it must be a number above 0"),
    ],
)
def test_positions_that_there_are_not(config: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        rope.read(config)


def test_a_dynamic_rotation_has_no_effect_up_to_the_last_position() -> None:
    keys = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    np.testing.assert_array_equal(rotation(keys)[0], rotation({})[0])
    (line,) = rope.remarks({"max_position_embeddings": 128, **keys})
    assert line.startswith("rope_type=dynamic has no effect up to max_position_embeddings=128; ")
    with pytest.raises(UserError, match="factor=None; it must be a number above 0"):
        rotation({"rope_scaling": {"type": "dynamic"}})
