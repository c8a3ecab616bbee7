"""OLMo 2 and 3 in Hugging Face files."""

from typing import Any

import pytest

from jaxptd.config import ModelConfig, nested
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.errors import UserError
from jaxptd.hf.families import FAMILIES
from jaxptd.hf.sizes import config_json, read_sizes

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {"num_hidden_layers": 8, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 13}
SIZES |= {"num_key_value_heads": 4, "head_dim": 4}
YARN = {  # as in OLMo 3's releases
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
STRETCHED = {
    "rope.theta": 5e5,
    "rope.scaling": "yarn",
    "rope.factor": 8.0,
    "rope.original_length": 8192,
    "rope.range": (1.0, 32.0),
    "rope.attention_factor": 1.2079441541679836,
    "rope.window_theta": 5e5,
}
OLD = {"rope_theta": 5e5, "rope_scaling": YARN, "max_position_embeddings": 65536}


def read(config: dict[str, Any], kind: str = "olmo3") -> dict[str, Any]:
    return read_sizes(SIZES | {"model_type": kind} | config, tied=False, where="there")


def nested_rope(full: dict, sliding: dict) -> dict[str, Any]:
    return {"rope_parameters": {FULL: full, SLIDING: sliding}, "max_position_embeddings": 65536}


@pytest.mark.parametrize(
    "config",
    [
        OLD,
        {"rope_theta": 5e5, **nested_rope(YARN, {"rope_type": "default"})},
        nested_rope(YARN | {"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    ],
)
def test_only_full_layers_are_stretched(config: dict[str, Any]) -> None:
    fields = read(config)
    assert {name: fields[name] for name in STRETCHED} == STRETCHED
    assert (fields["window"], fields["window_layers"]) == (4096, (True, True, True, False))
    assert (fields["norm_order"], fields["qk_norm"]) == ("output", "whole")


def test_layers_are_those_of_the_file() -> None:
    fields = read({"sliding_window": 64, "layer_types": [FULL, SLIDING] * 4})
    assert (fields["window"], fields["window_layers"]) == (64, (False, True))
    assert fields["rope.window_theta"] is None  # all layers rotate alike
    without = read(OLD | {"layer_types": [FULL] * 8})
    assert (without["window"], without["rope.window_theta"]) == (None, None)
    assert without["rope.scaling"] == "yarn"


@pytest.mark.parametrize(
    "config",
    [OLD, {}, *(OLD | {"layer_types": kinds * 4} for kinds in ([FULL, FULL], [FULL, SLIDING]))],
)
def test_what_is_written_is_read(config: dict[str, Any]) -> None:
    fields = read(config)
    model = ModelConfig(**nested(fields))
    written = config_json(model, dtype="float32", tokenizer=ByteTokenizer())
    assert read_sizes(written, tied=False, where="there") == fields
    assert "rope_parameters" not in written


@pytest.mark.parametrize("near", [9.0, None])
def test_other_rotations_are_written_for_each_kind_of_layer(near: float | None) -> None:
    fields = read(OLD) | {"rope.window_theta": near}
    model = ModelConfig(**nested(fields))
    written = config_json(model, dtype="float32", tokenizer=ByteTokenizer())
    assert read_sizes(written, tied=False, where="there") == fields
    sliding = written["rope_parameters"][SLIDING]
    assert sliding["rope_type"] == ("yarn" if near is None else "default")


def test_windows_stretched_otherwise_are_refused() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UserError, match="rope_parameters stretches sliding_attention otherwise"):
        read(nested_rope(YARN, linear))
    with pytest.raises(UserError, match="rope_parameters has a separate object for full_attention"):
        read(nested_rope(YARN, linear), kind="olmo2")


def test_norms_are_of_outputs() -> None:
    for kind in ("olmo2", "olmo3"):
        names = {rule.ours: rule.name for rule in FAMILIES[kind].tensors.rules}
        assert names["blocks.attention_norm.w"].endswith("post_attention_layernorm.weight")
        assert names["blocks.mlp_norm.w"].endswith("post_feedforward_layernorm.weight")
        assert not any("input_layernorm" in name for name in names.values())


def test_nothing_is_remarked_on_rotations_that_are_read() -> None:
    assert FAMILIES["olmo3"].remarks(nested_rope(YARN, {"rope_type": "default"})) == []
