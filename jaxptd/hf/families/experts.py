"""Descendants of Llama with a mixture of experts in some or all layers.

transformers 5 has the experts of a layer in two tensors and writes them apart, as files on the Hub
have them. Both forms are read.

Letters besides those of `Tensors`: 2 the gate and what it multiplies.
Sources: `modeling_*.py`, `configuration_*.py` and `conversion_mapping.py` of transformers 5.24.
"""

import dataclasses
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.dims import Rule
from jaxptd.hf.families import llama, rope, windows
from jaxptd.hf.families.family import Json, Keys, Tensors, count

# ---- tensors -------------------------------------------------------------------------------------

_LAYER = "model.layers.{}"
_MLP, _SPARSE = f"{_LAYER}.mlp", f"{_LAYER}.block_sparse_moe"
_BIAS = "blocks.mlp.router.load_bias"


def tensors(*rules: Rule, **fields: Any) -> Tensors:
    """A llama's tensors, and those of experts; fields: of `Tensors` that differ."""
    usual = llama.TENSORS
    fields = {"zeros": (_BIAS,)} | fields
    fields["aliases"] = usual.aliases + fields.get("aliases", ())
    return dataclasses.replace(usual, rules=usual.rules + rules, **fields)


def _router(name: str, *, exact: bool = False) -> Rule:
    return Rule("blocks.mlp.router.w", "L D E", f"{name}.weight", "E D", exact=exact)


def _apart(name: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules of experts with tensors of their own."""
    return (
        Rule("blocks.mlp.up.w", "L E D [0] F", f"{name}.{{}}.{gate}.weight", "F D"),
        Rule("blocks.mlp.up.w", "L E D [1] F", f"{name}.{{}}.{up}.weight", "F D"),
        Rule("blocks.mlp.down.w", "L E F D", f"{name}.{{}}.{down}.weight", "D F"),
    )


def _fused(gate_up: str, down: str) -> tuple[Rule, ...]:
    """Rules of the experts of a layer in two tensors."""
    return (
        Rule("blocks.mlp.up.w", "L E D 2 F", gate_up, "E (2 F) D"),
        Rule("blocks.mlp.down.w", "L E F D", down, "E D F"),
    )


def _shared(name: str) -> tuple[Rule, ...]:
    """Rules of an MLP that all tokens pass."""
    return (
        Rule("blocks.mlp.shared.up.w", "L D [0] F", f"{name}.gate_proj.weight", "F D"),
        Rule("blocks.mlp.shared.up.w", "L D [1] F", f"{name}.up_proj.weight", "F D"),
        Rule("blocks.mlp.shared.down.w", "L F D", f"{name}.down_proj.weight", "D F"),
    )


_QWEN_EXPERTS = _apart(f"{_MLP}.experts", "gate_proj", "up_proj", "down_proj")
_QWEN = (_router(f"{_MLP}.gate"), *_QWEN_EXPERTS)
_QWEN_FUSED = _fused(f"{_MLP}.experts.gate_up_proj", f"{_MLP}.experts.down_proj")
_GATE = Rule("blocks.mlp.shared_gate.w", "L D 1", f"{_MLP}.shared_expert_gate.weight", "1 D")

MIXTRAL_TENSORS = tensors(
    _router(f"{_SPARSE}.gate"),
    *_apart(f"{_SPARSE}.experts", "w1", "w3", "w2"),
    alternatives=_fused(f"{_SPARSE}.experts.gate_up_proj", f"{_SPARSE}.experts.down_proj"),
    aliases=((r"(model\.layers\.\d+)\.mlp\.(.+)", r"\1.block_sparse_moe.\2"),),
)
QWEN2_TENSORS = tensors(*_QWEN, *_shared(f"{_MLP}.shared_expert"), _GATE, alternatives=_QWEN_FUSED)
QWEN3_TENSORS = tensors(*_QWEN, alternatives=_QWEN_FUSED)
DOTS1_TENSORS = tensors(
    _router(f"{_MLP}.gate", exact=True),  # as transformers has it, in float32 always
    *_QWEN_EXPERTS,
    *_shared(f"{_MLP}.shared_experts"),
    Rule(_BIAS, "L E", f"{_MLP}.gate.e_score_correction_bias", "E", exact=True),
    alternatives=_QWEN_FUSED,
    zeros=(),
)
_HEADS = f"{_LAYER}.self_attn"
OLMOE_TENSORS = tensors(
    *_QWEN,
    Rule("blocks.attention.q_norm.w", "L N (P 2)", f"{_HEADS}.q_norm.weight", "(N 2 P)"),
    Rule("blocks.attention.k_norm.w", "L K (P 2)", f"{_HEADS}.k_norm.weight", "(K 2 P)"),
    alternatives=_QWEN_FUSED,
)
GRANITE_TENSORS = tensors(
    _router(f"{_SPARSE}.router.layer"),
    *_fused(f"{_SPARSE}.input_linear.weight", f"{_SPARSE}.output_linear.weight"),
    aliases=(  # the names that transformers 5 has in memory
        (r"(.+)\.experts\.gate_up_proj", r"\1.input_linear.weight"),
        (r"(.+)\.experts\.down_proj", r"\1.output_linear.weight"),
        (r"(.+)\.router\.weight", r"\1.router.layer.weight"),
    ),
)


# ---- config.json ---------------------------------------------------------------------------------

COEFFICIENT, LOGITS = "router_aux_loss_coef", "output_router_logits"


def remarks(config: Json) -> list[str]:
    """Remarks on rotary positions, and on a loss that is not ours."""
    weight, used = config.get(COEFFICIENT), config.get(LOGITS)
    if not (weight and used):
        return rope.remarks(config)
    line = (
        f"{COEFFICIENT}={quoted(weight)} has no effect: its loss is of a micro-batch, and ours of "
        "each sequence; set model.moe.balance_loss for that"
    )
    return [*rope.remarks(config), line]


def _read_dense(config: Json) -> Json:
    """The layers without experts that are listed; transformers ignores numbers of no layer."""
    listed = config.get("mlp_only_layers")
    if listed is not None and not (
        isinstance(listed, list) and all(type(x) is int for x in listed)
    ):
        raise UserError(f"mlp_only_layers={quoted(listed)}; it must be a list of whole numbers")
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    dense = tuple(sorted({x for x in listed or () if 0 <= x < layers}))
    return {"moe.first_dense": 0, "moe.dense_layers": dense}


def _write_dense(model: ModelConfig) -> Json:
    """Every dense layer that `decoder_sparse_step` does not make dense."""
    assert model.moe is not None
    moe, layers = model.moe, range(model.num_layers)
    dense = [i for i in layers if (i + 1) % moe.every == 0 and not moe.is_sparse(i)]
    return {"mlp_only_layers": dense}


def _read_dots1(config: Json) -> Json:
    """Numbers of experts, which have no defaults; shared ones are a single MLP of their widths."""
    width = count("moe_intermediate_size", config["moe_intermediate_size"])
    shared = count("n_shared_experts", config.get("n_shared_experts"))
    return {
        "moe.num_experts": count("n_routed_experts", config.get("n_routed_experts")),
        "moe.top_k": count("num_experts_per_tok", config.get("num_experts_per_tok")),
        "moe.shared_ffn_hidden_size": shared * width,
    }


def _write_dots1(model: ModelConfig) -> Json:
    """The keys of `_read_dots1`. Raises UserError if no number of shared experts is as wide."""
    assert model.moe is not None
    moe, width = model.moe, option(model, "moe.ffn_hidden_size")
    shared, rest = divmod(moe.shared_ffn_hidden_size, width)
    if rest or not shared:
        raise UserError(
            f"model.moe.shared_ffn_hidden_size={moe.shared_ffn_hidden_size}: Hugging Face's dots1 "
            f"has shared experts that are as wide as others, model.moe.ffn_hidden_size={width}; "
            "export a model with a multiple of it"
        )
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": shared,
    }


_DENSE = Keys(_read_dense, _write_dense)
# Options of every router here that has scores of a softmax.
SOFTMAX: Json = {
    "moe.score": "softmax",
    "moe.scale": 1.0,
    "moe.num_groups": 1,
    "moe.top_groups": 1,
    "moe.router_bias": False,
}
NO_SHARED: Json = {"moe.shared_ffn_hidden_size": 0, "moe.shared_gate": False}
ALL_SPARSE: Json = {"moe.first_dense": 0, "moe.every": 1, "moe.dense_layers": ()}
_NORMALIZE = ("norm_topk_prob", False)


MIXTRAL = llama.descendant(
    "mixtral",
    "MixtralForCausalLM",
    {
        "ffn_hidden_size": None,
        "num_kv_heads": ("num_key_value_heads", 8),
        "max_positions": ("max_position_embeddings", 131072),
        "norm_eps": ("rms_norm_eps", 1e-5),
        "moe.ffn_hidden_size": ("intermediate_size", 14336),
        "moe.num_experts": ("num_local_experts", 8),
        "moe.top_k": ("num_experts_per_tok", 2),
    },
    theta=1e6,
    tensors=MIXTRAL_TENSORS,
    synonyms={"num_experts": "num_local_experts"},
    options=SOFTMAX | NO_SHARED | ALL_SPARSE | {"moe.normalize": True, **windows.OF_ALL},
    unwritten={"router_jitter_noise": 0.0},
    parts=[windows.EVERY],
    remarks=remarks,
)
QWEN2_MOE = llama.descendant(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {
        "vocab_size": ("vocab_size", 151936),
        "num_layers": ("num_hidden_layers", 24),
        "hidden_size": ("hidden_size", 2048),
        "num_heads": ("num_attention_heads", 16),
        "num_kv_heads": ("num_key_value_heads", 16),
        "ffn_hidden_size": ("intermediate_size", 5632),
        "max_positions": ("max_position_embeddings", 32768),
        "moe.ffn_hidden_size": ("moe_intermediate_size", 1408),
        "moe.shared_ffn_hidden_size": ("shared_expert_intermediate_size", 5632),
        "moe.num_experts": ("num_experts", 60),
        "moe.top_k": ("num_experts_per_tok", 4),
        "moe.normalize": _NORMALIZE,
        "moe.every": ("decoder_sparse_step", 1),
    },
    tensors=QWEN2_TENSORS,
    options=SOFTMAX | {"linear_bias": "qkv", "moe.shared_gate": True},
    fixed={"qkv_bias": True},
    parts=[windows.ALTERNATING, _DENSE],
    remarks=remarks,
)
QWEN3_MOE = llama.descendant(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {
        "vocab_size": ("vocab_size", 151936),
        "num_layers": ("num_hidden_layers", 24),
        "hidden_size": ("hidden_size", 2048),
        "num_kv_heads": ("num_key_value_heads", 4),
        "ffn_hidden_size": ("intermediate_size", 6144),
        "max_positions": ("max_position_embeddings", 32768),
        "moe.ffn_hidden_size": ("moe_intermediate_size", 768),
        "moe.num_experts": ("num_experts", 128),
        "moe.top_k": ("num_experts_per_tok", 8),
        "moe.normalize": _NORMALIZE,
        "moe.every": ("decoder_sparse_step", 1),
    },
    tensors=QWEN3_TENSORS,
    synonyms={"num_local_experts": "num_experts"},
    options=SOFTMAX | NO_SHARED | {"qk_norm": True, **windows.OF_ALL},
    fixed=llama.NO_BIAS,
    parts=[windows.EVERY_IF_USED, _DENSE],
    remarks=remarks,
)
DOTS1 = llama.descendant(
    "dots1",
    "Dots1ForCausalLM",
    {
        "vocab_size": ("vocab_size", 152064),
        "num_layers": ("num_hidden_layers", 62),
        "hidden_size": ("hidden_size", 4608),
        "num_kv_heads": ("num_key_value_heads", 32),
        "ffn_hidden_size": ("intermediate_size", 10944),
        "moe.ffn_hidden_size": ("moe_intermediate_size", 1408),
        "moe.normalize": _NORMALIZE,
        "moe.scale": ("routed_scaling_factor", 1.0),
        "moe.num_groups": ("n_group", 1),
        "moe.top_groups": ("topk_group", 1),
        "moe.first_dense": ("first_k_dense_replace", 0),
    },
    tensors=DOTS1_TENSORS,
    synonyms={"num_local_experts": "n_routed_experts"},
    options={
        "qk_norm": True,
        "moe.score": "sigmoid",
        "moe.group_score": "best_two",
        "moe.router_bias": False,
        "moe.shared_gate": False,
        "moe.every": 1,
        "moe.dense_layers": (),
    },
    fixed=llama.NO_BIAS,
    parts=[windows.BY_TYPE, Keys(_read_dots1, _write_dots1)],
)
GRANITEMOE = llama.descendant(
    "granitemoe",
    "GraniteMoeForCausalLM",
    {
        "ffn_hidden_size": None,
        "attention_scale": ("attention_multiplier", 1.0),
        "embedding_scale": ("embedding_multiplier", 1.0),
        "residual_scale": ("residual_multiplier", 1.0),
        "logit_divisor": ("logits_scaling", 1.0),
        "moe.ffn_hidden_size": ("intermediate_size", 11008),
        "moe.num_experts": ("num_local_experts", 8),
        "moe.top_k": ("num_experts_per_tok", 2),
    },
    tensors=GRANITE_TENSORS,
    # Its softmax over the chosen logits is that over all, normalised.
    options=SOFTMAX | NO_SHARED | ALL_SPARSE | {"moe.normalize": True, "window": None},
    fixed=llama.NO_BIAS,
    remarks=remarks,
)
OLMOE = llama.descendant(
    "olmoe",
    "OlmoeForCausalLM",
    {
        "ffn_hidden_size": None,
        "vocab_size": ("vocab_size", 50304),
        "num_layers": ("num_hidden_layers", 16),
        "hidden_size": ("hidden_size", 2048),
        "num_heads": ("num_attention_heads", 16),
        "norm_eps": ("rms_norm_eps", 1e-5),
        "max_positions": ("max_position_embeddings", 4096),
        "moe.ffn_hidden_size": ("intermediate_size", 2048),
        "moe.num_experts": ("num_experts", 64),
        "moe.top_k": ("num_experts_per_tok", 8),
        "moe.normalize": _NORMALIZE,
    },
    tensors=OLMOE_TENSORS,
    synonyms={"num_local_experts": "num_experts"},
    options=SOFTMAX | NO_SHARED | ALL_SPARSE | {"qk_norm": "whole", "window": None},
    fixed=llama.NO_BIAS,
    unwritten={"clip_qkv": None, "sliding_window": None},
    remarks=remarks,
)
