"""Llama and its descendants with other options, such as a sliding window in all layers.

Sources: `modeling_llama.py`, `modeling_qwen2.py`, `modeling_qwen3.py` and `modeling_mistral.py` of
transformers 5.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxptd.hf.dims import Rule
from jaxptd.hf.families import rope, windows
from jaxptd.hf.families.family import Family, Json, Keys, Tensors

_LAYER = "model.layers.{}"
_HEADS = f"{_LAYER}.self_attn"
_MLP = f"{_LAYER}.mlp"
TENSORS = Tensors(
    prefix="model.",
    rules=(
        Rule("tokens.table", "V D", "model.embed_tokens.weight", "V D"),
        Rule("blocks.attention_norm.w", "L D", f"{_LAYER}.input_layernorm.weight", "D"),
        # Hugging Face rotates feature i with i + H / 2, we rotate neighbours.
        Rule("blocks.attention.qkv.w", "L D [0] N (P 2)", f"{_HEADS}.q_proj.weight", "(N 2 P) D"),
        Rule("blocks.attention.qkv.w", "L D [1] N (P 2)", f"{_HEADS}.k_proj.weight", "(N 2 P) D"),
        Rule("blocks.attention.qkv.w", "L D [2] N H", f"{_HEADS}.v_proj.weight", "(N H) D"),
        Rule("blocks.attention.qkv.b", "L [0] N (P 2)", f"{_HEADS}.q_proj.bias", "(N 2 P)"),
        Rule("blocks.attention.qkv.b", "L [1] N (P 2)", f"{_HEADS}.k_proj.bias", "(N 2 P)"),
        Rule("blocks.attention.qkv.b", "L [2] N H", f"{_HEADS}.v_proj.bias", "(N H)"),
        Rule("blocks.attention.q.w", "L D N (P 2)", f"{_HEADS}.q_proj.weight", "(N 2 P) D"),
        Rule("blocks.attention.q.b", "L N (P 2)", f"{_HEADS}.q_proj.bias", "(N 2 P)"),
        Rule("blocks.attention.kv.w", "L D [0] K (P 2)", f"{_HEADS}.k_proj.weight", "(K 2 P) D"),
        Rule("blocks.attention.kv.w", "L D [1] K H", f"{_HEADS}.v_proj.weight", "(K H) D"),
        Rule("blocks.attention.kv.b", "L [0] K (P 2)", f"{_HEADS}.k_proj.bias", "(K 2 P)"),
        Rule("blocks.attention.kv.b", "L [1] K H", f"{_HEADS}.v_proj.bias", "(K H)"),
        Rule("blocks.attention.q_norm.w", "L (P 2)", f"{_HEADS}.q_norm.weight", "(2 P)"),
        Rule("blocks.attention.k_norm.w", "L (P 2)", f"{_HEADS}.k_norm.weight", "(2 P)"),
        Rule("blocks.attention.out.w", "L N H D", f"{_HEADS}.o_proj.weight", "D (N H)"),
        Rule("blocks.attention.out.b", "L D", f"{_HEADS}.o_proj.bias", "D"),
        Rule("blocks.mlp_norm.w", "L D", f"{_LAYER}.post_attention_layernorm.weight", "D"),
        Rule("blocks.mlp.up.w", "L D [0] F", f"{_MLP}.gate_proj.weight", "F D"),
        Rule("blocks.mlp.up.w", "L D [1] F", f"{_MLP}.up_proj.weight", "F D"),
        Rule("blocks.mlp.up.b", "L [0] F", f"{_MLP}.gate_proj.bias", "F"),
        Rule("blocks.mlp.up.b", "L [1] F", f"{_MLP}.up_proj.bias", "F"),
        Rule("blocks.mlp.down.w", "L F D", f"{_MLP}.down_proj.weight", "D F"),
        Rule("blocks.mlp.down.b", "L D", f"{_MLP}.down_proj.bias", "D"),
        Rule("norm.w", "D", "model.norm.weight", "D"),
        Rule("head.table", "V D", "lm_head.weight", "V D"),
    ),
    ignored=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|(cos|sin)_cached)",),
    aliases=((r"lm_head\.weight", "model.embed_tokens.weight"),),
)

_KEYS: Json = {
    "num_layers": ("num_hidden_layers", 32),
    "hidden_size": ("hidden_size", 4096),
    "num_heads": ("num_attention_heads", 32),
    "num_kv_heads": ("num_key_value_heads", None),
    "head_size": ("head_dim", None),
    "ffn_hidden_size": ("intermediate_size", 11008),
    "vocab_size": ("vocab_size", 32000),
    "max_positions": ("max_position_embeddings", 2048),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "activation": ("hidden_act", "silu"),
}
_OPTIONS = {
    "norm": "rmsnorm",
    "norm_order": "pre",
    "gated": True,
    "linear_bias": "none",
    "positions": "rope",
    "qk_norm": False,
    "rope.window_theta": None,
    "rope.layers": None,
}


def descendant(
    name: str,
    architecture: str,
    keys: Mapping[str, tuple[str, Any] | None],
    *,
    parts: Sequence[Keys] = (windows.NEVER,),
    theta: float = rope.THETA,
    rotary: Keys | None = None,
    **fields: Any,
) -> Family:
    """A family whose models are llamas with other options.

    Args:
        name: our name.
        architecture: the class in transformers.
        keys: those of `Family` that differ from a llama's; None for an option without a key.
        parts: options besides rotary positions that take more than one key.
        theta: of rotary positions, if the key is missing.
        rotary: their options and keys, if not a llama's.
        fields: further fields of `Family`; `options` and `unwritten` are added to a llama's.
    """
    usual_rotary = Keys(lambda config: rope.read({rope.BASE: theta} | config), rope.write)
    every = (rotary or usual_rotary, *parts)
    fields["keys"] = {our: key for our, key in {**_KEYS, **keys}.items() if key}
    fields["options"] = _OPTIONS | fields.get("options", {})
    fields["unwritten"] = {"is_causal": True} | fields.get("unwritten", {})
    usual: Json = {"tensors": TENSORS, "tied": False, "remarks": rope.remarks}
    return Family(
        name,
        architecture,
        others=lambda config: _merged(each.read(config) for each in every),
        write_others=lambda model: _merged(each.write(model) for each in every),
        **(usual | fields),
    )


def _merged(parts: Iterable[Json]) -> Json:
    return {key: value for part in parts for key, value in part.items()}


NO_BIAS = {"attention_bias": False}
LLAMA = descendant(
    "llama",
    "LlamaForCausalLM",
    {},
    options={"window": None},
    fixed=NO_BIAS | {"mlp_bias": False},
)
MISTRAL = descendant(
    "mistral",
    "MistralForCausalLM",
    {
        "ffn_hidden_size": ("intermediate_size", 14336),
        "num_kv_heads": ("num_key_value_heads", 8),
        "max_positions": ("max_position_embeddings", 131072),
    },
    parts=[windows.ALWAYS],
)
QWEN2 = descendant(
    "qwen2",
    "Qwen2ForCausalLM",
    {
        "vocab_size": ("vocab_size", 151936),
        "num_kv_heads": ("num_key_value_heads", 32),
        "ffn_hidden_size": ("intermediate_size", 22016),
        "max_positions": ("max_position_embeddings", 32768),
    },
    options={"linear_bias": "qkv"},
    parts=[windows.BY_LAYER],
)
QWEN3 = descendant(
    "qwen3",
    "Qwen3ForCausalLM",
    {
        "vocab_size": ("vocab_size", 151936),
        "num_kv_heads": ("num_key_value_heads", 32),
        "head_size": ("head_dim", 128),
        "ffn_hidden_size": ("intermediate_size", 22016),
        "max_positions": ("max_position_embeddings", 32768),
    },
    options={"qk_norm": True},
    parts=[windows.BY_LAYER],
    fixed=NO_BIAS,
)
