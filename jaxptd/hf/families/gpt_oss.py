"""gpt-oss: experts with biases and a clamped gate, sinks, and windows in every other layer.

The columns of gate and up alternate in one tensor. Files of releases have experts in MXFP4, which
`mxfp4.py` reads; exports are not quantized.

Sources: `modular_gpt_oss.py` and `configuration_gpt_oss.py` of transformers 5; OpenAI, arXiv
2508.10925.
"""

from typing import Any

from jaxptd.config import ModelConfig
from jaxptd.hf.dims import Rule
from jaxptd.hf.families import experts, llama, rope, windows
from jaxptd.hf.families.family import Json, Keys

_MLP = "model.layers.{}.mlp"
TENSORS = experts.tensors(
    Rule("blocks.attention.sinks", "L N", "model.layers.{}.self_attn.sinks", "N"),
    Rule("blocks.mlp.router.w", "L D E", f"{_MLP}.router.weight", "E D"),
    Rule("blocks.mlp.router.b", "L E", f"{_MLP}.router.bias", "E"),
    Rule("blocks.mlp.up.w", "L E D 2 F", f"{_MLP}.experts.gate_up_proj", "E D (F 2)"),
    Rule("blocks.mlp.up.b", "L E 2 F", f"{_MLP}.experts.gate_up_proj_bias", "E (F 2)"),
    Rule("blocks.mlp.down.w", "L E F D", f"{_MLP}.experts.down_proj", "E F D"),
    Rule("blocks.mlp.down.b", "L E D", f"{_MLP}.experts.down_proj_bias", "E D"),
)
THETA, WINDOW = 1.5e5, 128
# The rotation if a file names none.
YARN: Json = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    rope.LENGTH: 4096,
}


def _with_yarn(config: Json) -> Json:
    """A `config.json` with the rotation that transformers has where it is missing."""
    given = config.get(rope.SCALING) or config.get(rope.PARAMETERS)
    usual = {rope.BASE: THETA} | config
    return usual if given else usual | {rope.PARAMETERS: YARN}


def _read(config: Json) -> Json:
    windowed = windows.EVERY_SECOND.read({windows.WINDOW: WINDOW} | config)
    return rope.read(_with_yarn(config)) | windowed


def _write(model: ModelConfig) -> Json:
    """Both; a rotation without scaling is spelled out, as a missing one is yarn's."""
    keys: dict[str, Any] = rope.write(model) | windows.EVERY_SECOND.write(model)
    if keys[rope.SCALING] is None:
        keys[rope.SCALING] = {"rope_type": "default"}
    return keys


GPT_OSS = llama.descendant(
    "gpt_oss",
    "GptOssForCausalLM",
    {
        "activation": None,
        "ffn_hidden_size": None,
        "vocab_size": ("vocab_size", 201088),
        "num_layers": ("num_hidden_layers", 36),
        "hidden_size": ("hidden_size", 2880),
        "num_heads": ("num_attention_heads", 64),
        "num_kv_heads": ("num_key_value_heads", 8),
        "head_size": ("head_dim", 64),
        "norm_eps": ("rms_norm_eps", 1e-5),
        "max_positions": ("max_position_embeddings", 131072),
        "moe.ffn_hidden_size": ("intermediate_size", 2880),
        "moe.num_experts": ("num_local_experts", 128),
        "moe.top_k": ("num_experts_per_tok", 4),
    },
    tensors=TENSORS,
    synonyms={"num_experts": "num_local_experts"},
    # Its softmax over the chosen logits is that over all, normalised.
    options=experts.SOFTMAX
    | experts.NO_SHARED
    | experts.ALL_SPARSE
    | {
        "activation": "clamped-swiglu",
        "linear_bias": "all",
        "attention_sinks": True,
        "moe.normalize": True,
        "moe.router_bias": True,
    },
    fixed={"attention_bias": True, "hidden_act": "silu"},
    unwritten={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    quantized=("mxfp4",),
    parts=[Keys(_read, _write)],
    remarks=lambda config: experts.remarks(_with_yarn(config)),
)
