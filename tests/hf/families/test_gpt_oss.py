"""gpt-oss in Hugging Face files: logits by transformers' formulas, MXFP4, and there and back."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hugging import check_there_and_back, gpt_oss, write_directory
from hugging.gpt_oss import CONFIG
from turns import slow

import jaxptd
from jaxptd import Layout
from jaxptd.config import ModelConfig, nested
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.errors import UserError
from jaxptd.hf.directory import Directory
from jaxptd.hf.sizes import config_json, read_sizes
from jaxptd.hf.verdict import check

FULL, SLIDING = "full_attention", "sliding_attention"
QUANTIZED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}


def read(config: dict[str, Any], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    kept = {key: value for key, value in CONFIG.items() if key not in without}
    return read_sizes(kept | config, tied=False, where="there")


def hold(there: Path, tensors: gpt_oss.Tensors, layout: Layout) -> None:
    """Asserts that logits are those of the formulas, and that these clamp some hidden units."""
    token_BT = np.random.default_rng(1).integers(0, gpt_oss.VOCAB, (2, 12))
    with jax.enable_x64(True):
        run = jaxptd.from_hf(there, layout=layout, dtype="float64", platform="cpu", seq_length=12)
        found = run.logits({"tokens": token_BT, "targets": token_BT})
    for ours, token_T in zip(found, token_BT, strict=True):
        expected, beyond = gpt_oss.logits(tensors, token_T)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
        assert beyond > 0.05


@pytest.mark.parametrize(
    "layout",
    [
        Layout(ep=2, tp=2, sequence_parallel=True),
        slow(Layout()),
        slow(Layout(cp=2, tp=4)),
        slow(Layout(ep=2, cp=2, zero=3)),
    ],
    ids=str,
)
def test_logits_are_those_of_the_formulas(tmp_path: Path, layout: Layout) -> None:
    tensors = gpt_oss.gpt_oss_tensors()
    hold(write_directory(tmp_path / "there", tensors, base=CONFIG), tensors, layout)


def test_there_and_back_are_the_same_bits(tmp_path: Path) -> None:
    tensors = gpt_oss.gpt_oss_tensors()
    there = write_directory(tmp_path / "there", tensors, base=CONFIG)
    check_there_and_back(there, tensors, tmp_path)


# ---- MXFP4 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(), slow(Layout(ep=2, tp=2))], ids=str)
def test_experts_in_mxfp4_are_read(tmp_path: Path, layout: Layout) -> None:
    stored, tensors = gpt_oss.packed(gpt_oss.gpt_oss_tensors())
    there = write_directory(tmp_path / "there", stored, base=CONFIG | QUANTIZED)
    hold(there, tensors, layout)
    facts = check(there)
    assert facts["verdict"].startswith("can be trained")
    assert facts["precisions"] == ["F32", "MXFP4"]


def test_any_slice_of_mxfp4_is_read_alone(tmp_path: Path) -> None:
    stored, tensors = gpt_oss.packed(gpt_oss.gpt_oss_tensors())
    directory = Directory(write_directory(tmp_path / "there", stored, base=CONFIG | QUANTIZED))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert directory.shapes[name] == list(tensors[name].shape)
    assert set(directory.shapes) == set(tensors)
    rng = np.random.default_rng(0)
    for _ in range(50):
        ends = (sorted(rng.choice(n + 1, 2, replace=False)) for n in tensors[name].shape)
        index = tuple(slice(int(begin), int(end)) for begin, end in ends)
        found = directory.tensor(name)[index]
        np.testing.assert_array_equal(found, tensors[name][index])


def test_blocks_without_their_scales_are_refused(tmp_path: Path) -> None:
    stored, _ = gpt_oss.packed(gpt_oss.gpt_oss_tensors())
    name = "model.layers.1.mlp.experts.down_proj"
    for wrong in ({}, {f"{name}_scales": np.zeros((1, 2), np.uint8)}):
        kept = {key: x for key, x in stored.items() if key != f"{name}_scales"} | wrong
        there = write_directory(tmp_path / str(len(wrong)), kept, base=CONFIG | QUANTIZED)
        with pytest.raises(UserError, match=rf"{name}_blocks.*unknown to the model"):
            jaxptd.from_hf(there, platform="cpu", seq_length=12)


def test_an_export_of_mxfp4_is_not_quantized(tmp_path: Path) -> None:
    stored, tensors = gpt_oss.packed(gpt_oss.gpt_oss_tensors())
    there = write_directory(tmp_path / "there", stored, base=CONFIG | QUANTIZED)
    out = check_there_and_back(there, tensors, tmp_path)
    assert "quantization_config" not in Directory(out).config


# ---- config.json ---------------------------------------------------------------------------------


def test_options_are_those_of_the_file() -> None:
    fields = read({})
    assert (fields["window"], fields["window_layers"]) == (3, (True, False))
    assert (fields["rope.scaling"], fields["rope.range"]) == ("yarn", (0.4, 3.0))
    assert fields["rope.truncate"] is False
    assert (fields["activation"], fields["linear_bias"]) == ("clamped-swiglu", "all")
    assert (fields["attention_sinks"], fields["moe.router_bias"]) == (True, True)
    assert (fields["moe.num_experts"], fields["moe.top_k"]) == (6, 2)


def test_a_missing_rotation_is_that_of_releases() -> None:
    fields = read({}, without=("rope_scaling", "rope_theta", "sliding_window"))
    assert (fields["rope.theta"], fields["rope.scaling"], fields["rope.factor"]) == (
        1.5e5,
        "yarn",
        32.0,
    )
    assert (fields["rope.original_length"], fields["rope.truncate"]) == (4096, False)
    assert fields["window"] == 128


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_scaling": {"rope_type": "default"}},
        {"layer_types": [FULL, SLIDING, SLIDING]},
        {"layer_types": [FULL] * 3},
    ],
)
def test_what_is_written_is_read(config: dict[str, Any]) -> None:
    fields = read(config)
    model = ModelConfig(**nested(fields))
    written = config_json(model, dtype="float32", tokenizer=ByteTokenizer())
    assert read_sizes(written, tied=False, where="there") == fields


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"swiglu_limit": 9.0}, "swiglu_limit=9.0; use a model with swiglu_limit=7.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0; use a model with swiglu_alpha=1.702"),
        ({"attention_bias": False}, "attention_bias=False; use a model with attention_bias=true"),
        ({"quantization_config": {"quant_method": "awq"}}, "the weights are quantized; use those"),
    ],
)
def test_what_we_lack_is_refused(config: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        read(config)
    with pytest.raises(UserError, match="the weights are quantized"):
        read_sizes(
            {"model_type": "llama", "num_hidden_layers": 2} | QUANTIZED, tied=True, where="there"
        )
