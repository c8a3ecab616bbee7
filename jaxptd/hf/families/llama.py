"""Llama and its descendants with other options, such as a sliding window in all layers.

In transformers, as here, a query sees itself and the `sliding_window - 1` tokens before it.

Sources: `modeling_llama.py`, `modeling_qwen2.py`, `modeling_qwen3.py`, `modeling_mistral.py` and
`masking_utils.sliding_window_overlay` of transformers 5.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.dims import Rule
from jaxptd.hf.families import rope
from jaxptd.hf.families.family import Family, Json, Tensors, count, flag

# ---- sliding windows -----------------------------------------------------------------------------

DEFAULT = 4096  # default of a key that transformers then leaves out
_KINDS = ("sliding_attention", "full_attention")
FULL_LAYERS = (
    28  # Qwen's default for `max_window_layers`, the number of layers before those with a window
)


class Windows(NamedTuple):
    """Reads and writes the sliding windows of a family.

    read: a `config.json` -> our option. write: our options -> its keys.
    """

    read: Callable[[Json], Json]
    write: Callable[[ModelConfig], Json]


def _read_never(config: Json) -> Json:
    """No option. Raises UserError if the file names windows that the model cannot have."""
    if _KINDS[0] in (_layer_types(config) or ()):
        raise UserError(
            f"layer_types has {_KINDS[0]}, but this model has no window; use another model"
        )
    return {}


def _read_always(config: Json) -> Json:
    """The window of all layers; with `layer_types` transformers reads a Mistral as a Ministral."""
    window, kinds = _checked(config.get("sliding_window", DEFAULT)), _layer_types(config)
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    default = 0 if window is None else layers
    return _of_layers(window, default if kinds is None else kinds.count(_KINDS[0]), layers)


def _read_layers(config: Json) -> Json:
    """Our window if all layers have it, None if no layer does."""
    used = flag("use_sliding_window", config.get("use_sliding_window", False))
    window = _checked(config.get("sliding_window", DEFAULT)) if used else None
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    return _of_layers(window, _windowed(config, window, layers), layers)


def _of_layers(window: int | None, windowed: int, layers: int) -> Json:
    """Our window, given how many layers have it. Raises UserError if only some do."""
    if not windowed:
        return {"window": None}
    if window is None:
        raise UserError("layer_types has sliding_attention without a window; use another model")
    if windowed < layers:
        raise UserError(f"sliding_window={window} in some layers only; use another model")
    return {"window": window}


def _windowed(config: Json, window: int | None, layers: int) -> int:
    """The number of layers that have a window."""
    kinds, first = _layer_types(config), config.get("max_window_layers", FULL_LAYERS)
    if type(first) is not int:
        raise UserError(f"max_window_layers={quoted(first)}; it must be a whole number")
    if kinds is None:
        return 0 if window is None else max(layers - max(first, 0), 0)
    return kinds.count(_KINDS[0])


def _layer_types(config: Json) -> list[str] | None:
    """The kind of attention of each layer, if the file lists it."""
    kinds = config.get("layer_types")
    layers = count("num_hidden_layers", config["num_hidden_layers"])
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(x not in _KINDS for x in kinds):
        raise UserError(
            f"layer_types={quoted(kinds)}; it must be a list with one of {', '.join(_KINDS)} for "
            f"each of {layers} layers"
        )
    return kinds


def _write_layers(model: ModelConfig) -> Json:
    window = option(model, "window")
    full = 0 if window else model.num_layers
    return {"use_sliding_window": bool(window), "sliding_window": window, "max_window_layers": full}


def _checked(window: Any) -> int | None:
    return None if window is None else count("sliding_window", window)


NEVER = Windows(_read_never, lambda model: {})
ALWAYS = Windows(_read_always, lambda model: {"sliding_window": option(model, "window")})  # Mistral
BY_LAYER = Windows(_read_layers, _write_layers)  # Qwen


# ---- tensors and keys ----------------------------------------------------------------------------

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

_KEYS = {
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
_OPTIONS = {"norm": "rmsnorm", "norm_order": "pre", "gated": True, "positions": "rope"}


def _llama(
    name: str, architecture: str, keys: Json, *, windows: Windows = NEVER, **others: Any
) -> Family:
    """A family whose models are llamas with other options."""
    options = _OPTIONS | {"linear_bias": "none", "qk_norm": False} | others.pop("options", {})
    return Family(
        name,
        architecture,
        TENSORS,
        keys=_KEYS | keys,
        options=options,
        unwritten={"is_causal": True},
        tied=False,
        remarks=rope.remarks,
        others=lambda config: rope.read(config) | windows.read(config),
        write_others=lambda model: rope.write(model) | windows.write(model),
        **others,
    )


_NO_BIAS = {"attention_bias": False}
LLAMA = _llama(
    "llama",
    "LlamaForCausalLM",
    {},
    options={"window": None},
    fixed=_NO_BIAS | {"mlp_bias": False},
)
MISTRAL = _llama(
    "mistral",
    "MistralForCausalLM",
    {
        "ffn_hidden_size": ("intermediate_size", 14336),
        "num_kv_heads": ("num_key_value_heads", 8),
        "max_positions": ("max_position_embeddings", 131072),
    },
    windows=ALWAYS,
)
QWEN2 = _llama(
    "qwen2",
    "Qwen2ForCausalLM",
    {
        "vocab_size": ("vocab_size", 151936),
        "num_kv_heads": ("num_key_value_heads", 32),
        "ffn_hidden_size": ("intermediate_size", 22016),
        "max_positions": ("max_position_embeddings", 32768),
    },
    options={"linear_bias": "qkv"},
    windows=BY_LAYER,
)
QWEN3 = _llama(
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
    windows=BY_LAYER,
    fixed=_NO_BIAS,
)
