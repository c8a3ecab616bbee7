"""Every key of a `config.json` with values of every type: transformers' meaning, or one line.

The values that transformers accepts were determined with release 5.24. We refuse what it refuses,
except where only one meaning is possible (a `head_dim` of null in Qwen 2).
"""

import json
from typing import Any

import pytest

from jaxptd.config import ModelConfig, nested, option
from jaxptd.errors import UserError
from jaxptd.hf.families.family import read_activation
from jaxptd.hf.sizes import read_sizes

HUGE = 10**18
VALUES = (None, "x", "2", -1, 0, 1, 2, 1.5, [], {}, [2], True, False, HUGE)

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "use_cache": True}
ROPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "is_causal": True,
}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention"] * 2,
}
MLPS = {
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
LOSS = {"router_aux_loss_coef": 0.01, "output_router_logits": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**ROPE, "attention_bias": False, "mlp_bias": False},
    "mistral": {**ROPE, "sliding_window": 16},
    "qwen2": ROPE | WINDOWS,
    "qwen3": {**ROPE, **WINDOWS, "attention_bias": False},
    "mixtral": {
        **ROPE,
        **LOSS,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0,
    },
    "qwen2_moe": {
        **ROPE,
        **LOSS,
        **MLPS,
        "shared_expert_intermediate_size": 40,
        "qkv_bias": True,
        **WINDOWS,
    },
    "qwen3_moe": {
        **ROPE,
        **LOSS,
        **MLPS,
        "attention_bias": False,
        "use_sliding_window": True,
        "sliding_window": 16,
    },
    "olmoe": {
        **ROPE,
        **LOSS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "attention_bias": False,
        "clip_qkv": None,
    },
    "granitemoe": {
        **ROPE,
        **LOSS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": False,
        "attention_multiplier": 0.5,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
    },
    "dots1": {
        **ROPE,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 2,
        "attention_bias": False,
        "sliding_window": 16,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * 2,
    },
    "gpt2": {
        "n_layer": 2,
        "n_embd": 12,
        "n_head": 2,
        "n_inner": 48,
        "n_positions": 16,
        "n_ctx": 16,
        "vocab_size": 13,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.1,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "is_causal": True,
        "summary_type": "cls_index",
    },
    "bert": {
        "vocab_size": 30,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "chunk_size_feed_forward": 0,
    },
    "t5": {
        "vocab_size": 30,
        "d_model": 12,
        "d_kv": 6,
        "d_ff": 24,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "relu",
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "n_positions": 16,
    },
    "swin": {
        "image_size": 32,
        "patch_size": 4,
        "num_channels": 3,
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "mlp_ratio": 2.0,
        "qkv_bias": True,
        "hidden_act": "gelu",
        "use_absolute_embeddings": False,
        "layer_norm_eps": 1e-5,
        "id2label": {"0": "a", "1": "b"},
        "num_labels": 2,
    },
}
# Keys that affect neither results nor sizes: any value means the same as leaving them out.
UNREAD = {
    *TOKENS,
    *("attention_dropout", "initializer_range", "pretraining_tp", "n_ctx"),
    *("attn_pdrop", "reorder_and_upcast_attn", "summary_type", "hidden_dropout_prob"),
    *("chunk_size_feed_forward", "dropout_rate"),
    *("router_aux_loss_coef", "output_router_logits"),
}
# Key -> our option, where an accepted value becomes the option's value.
SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope.theta",
    "sliding_window": "window",
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "n_inner": "ffn_hidden_size",
    "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_eps",
    "layer_norm_eps": "norm_eps",
    "d_model": "hidden_size",
    "d_kv": "head_size",
    "d_ff": "ffn_hidden_size",
    "num_layers": "num_layers",
    "num_decoder_layers": "encoder_decoder.num_layers",
    "num_heads": "num_heads",
    "relative_attention_num_buckets": "encoder_decoder.relative_buckets",
    "relative_attention_max_distance": "encoder_decoder.relative_distance",
    "image_size": "images.size",
    "patch_size": "images.patch",
    "num_channels": "images.channels",
    "embed_dim": "hidden_size",
    "window_size": "images.window",
    "num_labels": "images.classes",
    "moe_intermediate_size": "moe.ffn_hidden_size",
    "shared_expert_intermediate_size": "moe.shared_ffn_hidden_size",
    "num_experts": "moe.num_experts",
    "num_local_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
    "decoder_sparse_step": "moe.every",
    "n_routed_experts": "moe.num_experts",
    "routed_scaling_factor": "moe.scale",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
    "n_group": "moe.num_groups",
    "topk_group": "moe.top_groups",
}
# Families in which the size of an MLP is that of each expert.
SIZES_OF_EXPERTS = {
    (kind, "intermediate_size"): "moe.ffn_hidden_size"
    for kind in ("mixtral", "granitemoe", "olmoe")
}
# What null means where transformers accepts it; elsewhere it is refused.
NULLS: dict[str, dict[str, Any]] = {
    "num_key_value_heads": {"num_kv_heads": 4},
    "head_dim": {"head_size": 8},
    "n_inner": {"ffn_hidden_size": 48},
    "num_decoder_layers": {"encoder_decoder.num_layers": 2},
    "sliding_window": {"window": None},
    "layer_types": {"window": 16},
    "rope_scaling": {"rope.scaling": None},
    "rope_parameters": {"rope.scaling": None},
    "id2label": {"images.classes": 2},
}
NO_NULLS = {("qwen3", "head_dim"), ("qwen2", "sliding_window"), ("qwen3", "sliding_window")}
NO_NULLS |= {("qwen2_moe", "sliding_window"), ("qwen2_moe", "layer_types")}
NO_NULLS |= {("dots1", "sliding_window")}


def read(config: dict[str, Any]) -> ModelConfig | None:
    """The model of a config, or None if it is refused, which must take one line."""
    try:
        return ModelConfig(**nested(read_sizes(config, tied=True, where="DIR")))
    except UserError as error:
        line = str(error)
        assert line.startswith("DIR: ")
        assert "\n" not in line
        assert len(line) < 400
        return None


def check(key: str, value: Any, model: ModelConfig | None, usual: ModelConfig) -> None:
    """Asserts that a key's value gives the right model."""
    text = f"{key}={json.dumps(value)}"
    if key in UNREAD or text == f"{key}={json.dumps(CONFIG_VALUE[usual.family, key])}":
        assert model == usual, text
    elif value is None and key in NULLS and (usual.family, key) not in NO_NULLS:
        assert model is not None, text
        assert all(option(model, name) == x for name, x in NULLS[key].items()), text
    elif model is not None and key in SIZES:
        if key == "n_positions" and usual.family == "t5":
            assert model.seq_length == value, text
        else:
            assert type(value) in (int, float), text
            assert value > 0, text
            name = SIZES_OF_EXPERTS.get((usual.family, key), SIZES[key])
            assert option(model, name) == value, text
    elif model is not None:
        assert (key, json.dumps(value)) in OTHERS, text


CONFIG_VALUE = {
    ("gpt" if kind == "gpt2" else kind, key): value
    for kind, config in CONFIGS.items()
    for key, value in {**TOKENS, **config}.items()
}
# Accepted values of other keys: other spellings of what the model already has.
OTHERS = {
    *((key, "{}") for key in ("rope_scaling", "rope_parameters")),
    *((key, "1") for key in ("is_causal", "scale_attn_weights", "is_encoder_decoder", "qkv_bias")),
    *((key, "0") for key in ("attention_bias", "mlp_bias", "add_cross_attention", "is_decoder")),
    *((key, "0") for key in ("scale_attn_by_inverse_layer_idx", "use_absolute_embeddings")),
    *(("max_window_layers", text) for text in ("-1", "1", "2", str(HUGE))),
    *(("mlp_ratio", text) for text in ("1", "1.5", "2")),
    ("tie_word_embeddings", "1"),
    ("layer_types", "null"),  # Qwen 2 MoE: then no layer has a window
    ("use_sliding_window", "false"),  # Qwen 3 MoE, which ignores `layer_types`
    ("first_k_dense_replace", "0"),
    *(("n_shared_experts", text) for text in ("1", "2")),
    ("router_jitter_noise", "0"),
    ("router_jitter_noise", "false"),
    ("norm_topk_prob", "false"),
    *(("mlp_only_layers", text) for text in ("null", "[]", "[2]")),
    ("id2label", "{}"),
    ("pad_token_id", "false"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_value_of_every_key(kind: str) -> None:
    config = {"model_type": kind, **TOKENS, **CONFIGS[kind]}
    usual = read(config)
    assert usual is not None
    for key in config.keys() - {"model_type"}:
        for value in VALUES:
            check(key, value, read(config | {key: value}), usual)


@pytest.mark.parametrize(
    ("kind", "keys", "line"),
    [
        ("llama", {"num_hidden_layers": "2"}, 'num_hidden_layers="2"; it must be a whole number'),
        ("llama", {"hidden_size": HUGE}, "hidden_size=1000000000000000000; it must be 2147483647 "),
        ("llama", {"is_causal": False}, "is_causal=False; use a model with is_causal=true"),
        ("llama", {"global_head_dim": 512}, "global_head_dim=512; use a model with global_h"),
        ("llama", {"model_type": "gemma4_text"}, "model_type=gemma4_text; use a model of gpt2, "),
        ("llama", {"per_layer_config": [{}]}, "per_layer_config=[{}]; use a model with per_layer_"),
        ("llama", {"hidden_act": None}, "hidden_act=None; use a model with one of gelu_new, "),
        ("qwen3", {"head_dim": None}, "head_dim=None; it must be a whole number above 0"),
        ("qwen2", {"layer_types": ["full"] * 2}, "layer_types=['full', 'full']; it must be a list"),
        ("qwen2", {"layer_types": 2}, "layer_types=2; it must be a list with one of sliding_atten"),
        (
            "qwen2",
            {"layer_types": None, "max_window_layers": "1"},
            "max_window_layers=1; it must be a whole number",
        ),
        (
            "qwen2",
            {"use_sliding_window": "no"},
            'use_sliding_window="no"; it must be true or false',
        ),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings=False; use a model with tie"),
        ("t5", {"feed_forward_proj": None}, "feed_forward_proj=None; it must be a text such as g"),
        ("swin", {"mlp_ratio": "2"}, 'mlp_ratio="2"; it must be a number above 0'),
        ("swin", {"depths": [2, "2"]}, 'depths="2"; it must be a whole number above 0'),
        ("swin", {"embed_dim": 1}, "model.hidden_size=1 does not split over model.num_heads=2"),
        ("swin", {"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06; use a model with layer_norm_eps"),
    ],
    ids=str,
)
def test_the_line_names_the_key(kind: str, keys: dict, line: str) -> None:
    with pytest.raises(UserError) as error:
        read_sizes({"model_type": kind, **CONFIGS[kind], **keys}, tied=True, where="DIR")
    assert str(error.value).startswith(f"DIR: {line}")


def test_classes_are_those_of_the_number_before_those_of_the_names() -> None:
    config = {"model_type": "swin", **CONFIGS["swin"]}
    for keys, classes in (({}, 2), ({"num_labels": 5}, 5)):
        assert read_sizes(config | keys, tied=True, where="DIR")["images.classes"] == classes
    del config["num_labels"]
    assert read_sizes(config, tied=True, where="DIR")["images.classes"] == 2


def test_keys_that_are_missing_have_the_values_of_transformers() -> None:
    """Defaults that transformers' config classes set and ours do not."""
    mistral = read_sizes({"model_type": "mistral"}, tied=False, where="DIR")
    assert (mistral["num_kv_heads"], mistral["window"], mistral["max_positions"]) == (
        8,
        4096,
        2**17,
    )
    assert (
        read_sizes({"model_type": "t5"}, tied=True, where="DIR")["encoder_decoder.output_scale"]
        == 512**-0.5
    )
    yarn = {"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4}}
    assert read_sizes(yarn, tied=True, where="DIR")["rope.original_length"] == 32768


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("gelu-tanh", ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast")),
        ("gelu", ("gelu", "gelu_python")),
        ("relu", ("relu",)),
        ("silu", ("silu", "swish")),
    ],
)
def test_activations_by_all_names_that_transformers_has(ours: str, theirs: tuple) -> None:
    """transformers' functions of these names agree to 1e-9 in float64."""
    assert {read_activation("hidden_act", name) for name in theirs} == {ours}


def test_sizes_of_gpt2_by_the_names_of_other_families() -> None:
    """transformers accepts these names through its `attribute_map`."""
    names = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = {"model_type": "gpt2", "max_position_embeddings": 16, **names}
    found = read_sizes(config, tied=True, where="there")
    assert [found[name] for name in ("hidden_size", "num_layers", "num_heads")] == [12, 3, 2]
    assert found["max_positions"] == 16
