"""Gemma 2 and 3 in Hugging Face files: logits by transformers' formulas, and there and back."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hugging import check_there_and_back, gemma, write_directory
from turns import slow

import jaxptd
from jaxptd import Layout
from jaxptd.config import ModelConfig, nested
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.errors import UserError
from jaxptd.hf.families import FAMILIES
from jaxptd.hf.sizes import config_json, read_sizes

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}
KINDS = list(gemma.CONFIGS)
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 13}


def read(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 8, **SIZES, "model_type": kind}
    return read_sizes(sizes | config, tied=True, where="there")


def written(fields: dict[str, Any]) -> dict[str, Any]:
    model = ModelConfig(**nested(fields))
    return config_json(model, dtype="float32", tokenizer=ByteTokenizer())


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, Layout()) for kind in KINDS),
        ("gemma3_text", Layout(cp=2, tp=2, sequence_parallel=True)),
        slow("gemma2", Layout(dp=2, tp=4)),
    ],
    ids=str,
)
def test_logits_are_those_of_the_formulas(tmp_path: Path, kind: str, layout: Layout) -> None:
    tensors = gemma.gemma_tensors(kind)
    there = write_directory(tmp_path / kind, tensors, base=gemma.CONFIGS[kind])
    token_BT = np.random.default_rng(1).integers(0, gemma.VOCAB, (2, 12))
    with jax.enable_x64(True):
        run = jaxptd.from_hf(there, layout=layout, dtype="float64", platform="cpu", seq_length=12)
        found = run.logits({"tokens": token_BT, "targets": token_BT})
    for ours, token_T in zip(found, token_BT, strict=True):
        expected = gemma.logits(kind, tensors, token_T)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_are_the_same_bits(tmp_path: Path, kind: str) -> None:
    tensors = gemma.gemma_tensors(kind)
    there = write_directory(tmp_path / "there", tensors, base=gemma.CONFIGS[kind])
    check_there_and_back(there, tensors, tmp_path)


def test_norms_are_of_inputs_and_of_outputs() -> None:
    rules = {rule.ours: rule for rule in FAMILIES["gemma2"].tensors.rules}
    ends = {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
    for ours, theirs in ends.items():
        assert rules[f"blocks.{ours}.w"].name.endswith(f".{theirs}.weight")
    assert {rule.plus for name, rule in rules.items() if name.endswith("norm.w")} == {1.0}
    assert {rule.plus for name, rule in rules.items() if not name.endswith("norm.w")} == {0.0}


def test_values_and_gradients_of_norms_differ_in_files() -> None:
    program = tiny.program(Layout(), family="gemma2")
    x = {"norm.w": np.full(program.infos["norm.w"].shape, 3.0)}
    (value,) = jaxptd.hf.names(program, x, gradients=False).values()
    (gradient,) = jaxptd.hf.names(program, x, gradients=True).values()
    assert (value == 2).all()
    assert (gradient == 3).all()
    with pytest.raises(UserError, match=r"norm.w is 1 more than the tensor in a file.*gradients="):
        jaxptd.hf.names(program, x)
    embedding = {"tokens.table": np.ones(program.infos["tokens.table"].shape)}
    assert len(jaxptd.hf.names(program, embedding)) == 1  # the same in both


def test_embeddings_are_scaled_in_the_precision_of_activations() -> None:
    """sqrt(3072) = 55.43 becomes 55.5 in bfloat16, as in transformers."""
    x = (
        jnp.ones(2, jnp.bfloat16)
        * ModelConfig(family="gemma2", hidden_size=3072).block.embedding_scale
    )
    assert x.dtype == jnp.bfloat16
    assert float(x[0]) == 55.5


# ---- config.json ---------------------------------------------------------------------------------


def test_gemma_2_has_windows_in_every_other_layer_and_caps() -> None:
    fields = read("gemma2", {"query_pre_attn_scalar": 144})
    assert (fields["window"], fields["window_layers"]) == (4096, (True, False))
    assert (fields["attention_softcap"], fields["logit_softcap"]) == (50.0, 30.0)
    assert fields["attention_scale"] == 1 / 12
    assert (fields["norm_order"], fields["activation"]) == ("both", "gelu-tanh")
    without = read("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (without["attention_softcap"], without["logit_softcap"]) == (None, None)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": LINEAR},  # as in the releases
        {"rope_scaling": LINEAR, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {
            "rope_parameters": {
                FULL: LINEAR | {"rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default"}}},
    ],
)
def test_gemma_3_stretches_layers_without_a_window(config: dict[str, Any]) -> None:
    fields = read("gemma3_text", config)
    assert (fields["rope.theta"], fields["rope.scaling"], fields["rope.factor"]) == (
        1e6,
        "linear",
        8.0,
    )
    assert fields["rope.window_theta"] == 1e4
    assert (fields["window"], fields["window_layers"]) == (4096, (True,) * 5 + (False,))
    assert (fields["qk_norm"], fields["attention_softcap"]) == (True, None)


def test_the_pattern_is_that_of_the_file() -> None:
    assert read("gemma3_text", {"sliding_window_pattern": 2})["window_layers"] == (True, False)
    assert read("gemma3_text", {"layer_types": [FULL, SLIDING] * 4})["window_layers"] == (
        False,
        True,
    )
    fields = read("gemma3_text", {"layer_types": [FULL] * 8})
    assert (fields["window"], fields["rope.window_theta"]) == (None, None)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gemma2", {}),
        ("gemma2", {"query_pre_attn_scalar": 144, "attn_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 11.1, "layer_types": [FULL] * 8}),
        ("gemma3_text", {}),
        ("gemma3_text", {"rope_scaling": LINEAR, "query_pre_attn_scalar": 168}),
        ("gemma3_text", {"rope_scaling": LINEAR, "layer_types": [FULL] * 8}),
        ("gemma3_text", {"final_logit_softcapping": 30.0, "rope_local_base_freq": 1e6}),
        ("gemma3_text", {"rope_parameters": {FULL: LINEAR, SLIDING: LINEAR | {"rope_theta": 1e6}}}),
    ],
)
def test_what_is_written_is_read(kind: str, config: dict[str, Any]) -> None:
    fields = read(kind, config)
    again = written(fields)
    assert read_sizes(again, tied=True, where="there") == fields
    assert again["hidden_activation"] == "gelu_pytorch_tanh"
    given = config.get("query_pre_attn_scalar", 256)
    assert again["query_pre_attn_scalar"] == pytest.approx(given, rel=1e-15)


@pytest.mark.parametrize(
    ("kind", "config", "line"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0; use a"),
        ("gemma3_text", {"rope_parameters": LINEAR}, "it must have an object for full_attention"),
        ("gemma2", {"attention_bias": True}, "attention_bias=True; use a model with"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0; it must be a number"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0; it must be a"),
    ],
)
def test_what_we_lack_is_refused(kind: str, config: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        read(kind, config)


def test_other_embedding_scales_are_not_exported() -> None:
    with pytest.raises(UserError, match=r"model.embedding_scale=3.0: Hugging Face's gemma2 has 4"):
        written(read("gemma2", {}) | {"embedding_scale": 3.0})
