"""DeepSeek-V2 and V3: multi-head latent attention, and experts in groups.

Files of V3 may have layers behind the last, which predict further tokens. `model.mtp` reads them;
transformers does not.

Letters besides those of `Tensors`: R a latent vector's elements, S those with what is beside it.
Sources: `modeling_deepseek_v2.py`, `modeling_deepseek_v3.py` and their configurations, transformers
5; `modeling_deepseek.py` as published with the weights of DeepSeek-V2 (the factor of scores).
"""

import dataclasses
import math
import re
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.dims import Rule
from jaxptd.hf.families import experts, llama, rope
from jaxptd.hf.families.family import Json, Keys, Tensors, count, number

# ---- tensors -------------------------------------------------------------------------------------

_HEADS = "model.layers.{}.self_attn"
_OURS = "blocks.attention"
_ROUTER, _BIAS = "blocks.mlp.router.w", "blocks.mlp.router.load_bias"
_PLAIN = re.compile(r"blocks\.attention\.(qkv|q|kv|q_norm|k_norm)\.")  # what these models lack
# Files rotate neighbours, as we do, so that no element of a head moves.
_LATENT = (
    Rule(f"{_OURS}.q_latent.w", "L D R", f"{_HEADS}.q_a_proj.weight", "R D"),
    Rule(f"{_OURS}.q_latent.norm.w", "L R", f"{_HEADS}.q_a_layernorm.weight", "R"),
    Rule(f"{_OURS}.q_up.w", "L R N H", f"{_HEADS}.q_b_proj.weight", "(N H) R"),
    Rule(f"{_OURS}.q.w", "L D N H", f"{_HEADS}.q_proj.weight", "(N H) D"),
    Rule(f"{_OURS}.kv_latent.w", "L D S", f"{_HEADS}.kv_a_proj_with_mqa.weight", "S D"),
    Rule(f"{_OURS}.kv_latent.norm.w", "L R", f"{_HEADS}.kv_a_layernorm.weight", "R"),
    Rule(f"{_OURS}.kv_up.w", "L R N H", f"{_HEADS}.kv_b_proj.weight", "(N H) R"),
)
_USUAL = tuple(each for each in experts.DOTS1_TENSORS.rules if not _PLAIN.match(each.ours))


def _tensors(rules: tuple[Rule, ...], **fields: Any) -> Tensors:
    """The tensors of dots1 with other attention; fields: of `Tensors` that differ."""
    further = ("eh_proj.weight",)
    return dataclasses.replace(
        experts.DOTS1_TENSORS, rules=rules + _LATENT, further=further, **fields
    )


_MODULE = "model.layers.{}"  # behind the last layer
_OF_MODULES = (
    Rule("mtp.embedding_norm.w", "D", f"{_MODULE}.enorm.weight", "D"),
    Rule("mtp.stream_norm.w", "D", f"{_MODULE}.hnorm.weight", "D"),
    Rule("mtp.join.w", "2 D E", f"{_MODULE}.eh_proj.weight", "E (2 D)"),
    Rule("mtp.norm.w", "D", f"{_MODULE}.shared_head.norm.weight", "D"),
)
V3_TENSORS = _tensors(
    tuple(dataclasses.replace(each, exact=each.ours == _BIAS) for each in _USUAL) + _OF_MODULES,
    of_modules=(
        (f"{_MODULE}.embed_tokens.weight", "tokens.table"),
        (f"{_MODULE}.shared_head.head.weight", "head.table"),
    ),
)
V2_TENSORS = _tensors(
    tuple(dataclasses.replace(each, exact=False) for each in _USUAL if each.ours != _BIAS),
    zeros=(_BIAS,),
)

# ---- config.json ---------------------------------------------------------------------------------

FURTHER, SCALE = "num_nextn_predict_layers", "mscale_all_dim"
_DIGITS = 12  # of a factor that is computed back from the scale of scores


def _remarks(config: Json) -> list[str]:
    """Remarks on rotary positions, and on layers that are not read."""
    lines = rope.remarks(config)
    if layers := config.get(FURTHER):
        lines.append(
            f"{FURTHER}={quoted(layers)}: layers behind the last, which predict further tokens, "
            "are read only with model.mtp.layers"
        )
    return lines


def _read_queries(config: Json) -> Json:
    """The rank of queries; null computes them from x."""
    rank = config.get("q_lora_rank", 1536)
    return {"latent.q_rank": 0 if rank is None else count("q_lora_rank", rank)}


def _write_queries(model: ModelConfig) -> Json:
    return {"q_lora_rank": option(model, "latent.q_rank") or None}


def _read_scale(config: Json) -> Json:
    """The scale of scores, which yarn's `mscale_all_dim` raises."""
    values = config.get(rope.SCALING) or config.get(rope.PARAMETERS) or {}
    given = values.get(SCALE) if isinstance(values, dict) else None
    kind = values.get("rope_type", values.get("type", "default"))
    if not given or kind == "default":
        return {"attention_scale": None}
    if kind != "yarn":
        raise UserError(
            f"{SCALE}={quoted(given)} with rope_type={quoted(kind)}; use a model with yarn"
        )
    factor, share = number("factor", values.get("factor")), number(SCALE, given)
    return {"attention_scale": _scale(config, 0.1 * share * math.log(max(factor, 1.0)) + 1)}


def _scale(config: Json, length: float) -> float:
    """The factor on scores of heads whose queries and keys are as much longer."""
    size = sum(count(key, config[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    return size**-0.5 * length * length


def _write_scale(model: ModelConfig) -> Json:
    """The rotation, with the `mscale_all_dim` that gives the scale of scores.

    Raises:
        UserError: none gives it.
    """
    written, scale = rope.write(model), model.block.attention_scale
    length = (scale * model.block.head_size**0.5) ** 0.5
    if model.attention_scale is None or length == 1:
        return written
    scaling = written[rope.SCALING]
    if not scaling or scaling["rope_type"] != "yarn" or scaling["factor"] <= 1 or length < 1:
        raise UserError(
            f"model.attention_scale={scale}: Hugging Face's {model.family} has head_size ** -0.5, "
            "and more only with yarn; export a model without it"
        )
    share = round((length - 1) / (0.1 * math.log(scaling["factor"])), _DIGITS)
    own = scaling.get("attention_factor") or 0.1 * math.log(scaling["factor"]) + 1
    return written | {rope.SCALING: scaling | {SCALE: share, "attention_factor": own}}


def _shared(usual: int) -> Keys:
    """An MLP of all tokens as a number of experts; usual: if the key is missing."""
    key = "n_shared_experts"

    def read(config: Json) -> Json:
        width = count("moe_intermediate_size", config["moe_intermediate_size"])
        return {"moe.shared_ffn_hidden_size": count(key, config.get(key, usual)) * width}

    def write(model: ModelConfig) -> Json:
        size, width = (
            option(model, f"moe.{name}") for name in ("shared_ffn_hidden_size", "ffn_hidden_size")
        )
        if size % width or not size:
            raise UserError(
                f"model.moe.shared_ffn_hidden_size={size}: Hugging Face's {model.family} has "
                f"shared experts that are as wide as others, model.moe.ffn_hidden_size={width}; "
                "export a model with a multiple of it"
            )
        return {key: size // width}

    return Keys(read, write)


def _read_groups(config: Json) -> Json:
    """Groups of experts, where `topk_method` says that a token chooses among them."""
    method, keys = config.get("topk_method", "greedy"), ("n_group", "topk_group")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"topk_method={quoted(method)}; use a model with greedy or group_limited_greedy"
        )
    groups = [1 if method == "greedy" else count(key, config.get(key)) for key in keys]
    return {"moe.num_groups": groups[0], "moe.top_groups": groups[1]}


def _write_groups(model: ModelConfig) -> Json:
    groups, chosen = (option(model, f"moe.{name}_groups") for name in ("num", "top"))
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return {"topk_method": method, "n_group": groups, "topk_group": chosen}


_FURTHER = Keys(lambda config: {}, lambda model: {FURTHER: model.ahead})
_SIZES: dict[str, Any] = {
    "head_size": None,
    "num_kv_heads": ("num_key_value_heads", None),
    "latent.kv_rank": ("kv_lora_rank", 512),
    "latent.nope_size": ("qk_nope_head_dim", 128),
    "latent.rope_size": ("qk_rope_head_dim", 64),
    "latent.value_size": ("v_head_dim", 128),
}
_OPTIONS: Json = {
    "window": None,
    "moe.router_bias": False,
    "moe.shared_gate": False,
    "moe.every": 1,
    "moe.dense_layers": (),
}
_FIELDS: dict[str, Any] = {
    "rotary": Keys(lambda config: rope.read(config) | _read_scale(config), _write_scale),
    "decides": ("attention_scale",),
    "remarks": _remarks,
}

DEEPSEEK_V2 = llama.descendant(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _SIZES
    | {
        "vocab_size": ("vocab_size", 102400),
        "moe.num_experts": ("n_routed_experts", 64),
        "moe.top_k": ("num_experts_per_tok", 6),
        "moe.ffn_hidden_size": ("moe_intermediate_size", 1407),
        "moe.scale": ("routed_scaling_factor", 1.0),
        "moe.first_dense": ("first_k_dense_replace", 0),
    },
    tensors=V2_TENSORS,
    synonyms={"num_experts": "n_routed_experts"},
    options=_OPTIONS | {"moe.score": "softmax", "moe.group_score": "best", "moe.normalize": False},
    fixed=llama.NO_BIAS | {"mlp_bias": False, "norm_topk_prob": False},
    unwritten={"scoring_func": "softmax", "moe_layer_freq": 1},
    parts=[Keys(_read_queries, _write_queries), _shared(2), Keys(_read_groups, _write_groups)],
    **_FIELDS,
)
DEEPSEEK_V3 = llama.descendant(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _SIZES
    | {
        "vocab_size": ("vocab_size", 129280),
        "num_layers": ("num_hidden_layers", 61),
        "hidden_size": ("hidden_size", 7168),
        "num_heads": ("num_attention_heads", 128),
        "num_kv_heads": ("num_key_value_heads", 128),
        "ffn_hidden_size": ("intermediate_size", 18432),
        "max_positions": ("max_position_embeddings", 4096),
        "moe.num_experts": ("n_routed_experts", 256),
        "moe.top_k": ("num_experts_per_tok", 8),
        "moe.ffn_hidden_size": ("moe_intermediate_size", 2048),
        "moe.normalize": ("norm_topk_prob", True),
        "moe.scale": ("routed_scaling_factor", 2.5),
        "moe.num_groups": ("n_group", 8),
        "moe.top_groups": ("topk_group", 4),
        "moe.first_dense": ("first_k_dense_replace", 3),
    },
    tensors=V3_TENSORS,
    synonyms={"num_local_experts": "n_routed_experts"},
    options=_OPTIONS | {"moe.score": "sigmoid", "moe.group_score": "best_two"},
    fixed=llama.NO_BIAS | {"rope_interleave": True},
    unwritten={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    parts=[Keys(_read_queries, _write_queries), _shared(1), _FURTHER],
    **_FIELDS,
)
