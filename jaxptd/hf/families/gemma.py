"""Gemma 2 and 3: norms before and after attention and the MLP, windows in some layers.

Their norms multiply by 1 + w in float32. We read 1 + w, which is the same float32 number, and write
it less 1, so that the model has one form of norm. Both forms train alike: norms have no weight
decay, and begin at a factor of 1. A tensor in 16 bits that is read and written again has the same
bits, except for numbers below 2 ** -16, of which a float32 factor near 1 holds fewer digits.

Gemma 2 caps scores and logits. Gemma 3 normalises queries and keys, and layers with a window rotate
by a base of their own. Embeddings are multiplied by sqrt(hidden_size), rounded to the precision of
activations.

Sources: `modular_gemma2.py` and `modular_gemma3.py` of transformers 5; Gemma Team, arXiv 2408.00118
and 2503.19786.
"""

import dataclasses
import math
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.dims import Rule
from jaxptd.hf.families import llama, rope, windows
from jaxptd.hf.families.family import Json, Keys, Tensors, number

_LAYER = "model.layers.{}"
_BEFORE_MLP = Rule("blocks.mlp_norm.w", "L D", f"{_LAYER}.pre_feedforward_layernorm.weight", "D")
_OF_OUTPUTS = (
    Rule(
        "blocks.attention_output_norm.w",
        "L D",
        f"{_LAYER}.post_attention_layernorm.weight",
        "D",
    ),
    Rule("blocks.mlp_output_norm.w", "L D", f"{_LAYER}.post_feedforward_layernorm.weight", "D"),
)
TENSORS: Tensors = dataclasses.replace(
    llama.TENSORS,
    rules=tuple(
        dataclasses.replace(rule, plus=1.0) if rule.ours.endswith("norm.w") else rule
        for rule in (
            *(_BEFORE_MLP if r.ours == _BEFORE_MLP.ours else r for r in llama.TENSORS.rules),
            *_OF_OUTPUTS,
        )
    ),
)
SCALAR, LOCAL = "query_pre_attn_scalar", "rope_local_base_freq"
THETA, LOCAL_THETA = 1e6, 1e4  # of Gemma 3
_OPTIONS = {"norm_order": "both"}
_KEYS: dict[str, tuple[str, Any]] = {
    "num_layers": ("num_hidden_layers", 26),
    "hidden_size": ("hidden_size", 2304),
    "num_heads": ("num_attention_heads", 8),
    "num_kv_heads": ("num_key_value_heads", 4),
    "head_size": ("head_dim", 256),
    "ffn_hidden_size": ("intermediate_size", 9216),
    "activation": ("hidden_activation", "gelu_pytorch_tanh"),
    "attention_scale": (SCALAR, 256),
}


def _read_scale(config: Json) -> Json:
    """The factor of scores. Raises UserError for models whose tokens attend to later ones."""
    if config.get("use_bidirectional_attention"):
        raise UserError(
            f"use_bidirectional_attention={quoted(config['use_bidirectional_attention'])}; use a "
            "model whose tokens attend to those before them"
        )
    return {"attention_scale": number(SCALAR, config[SCALAR]) ** -0.5}


def _write_scale(model: ModelConfig) -> Json:
    """The number whose power -1/2 is the factor, and the activation's name as other readers ask."""
    scale = option(model, "attention_scale")
    scalar = scale**-2
    near = (round(scalar), scalar, math.nextafter(scalar, 0), math.nextafter(scalar, math.inf))
    found: Json = {SCALAR: next((x for x in near if x > 0 and x**-0.5 == scale), scalar)}
    if option(model, "activation") == "gelu-tanh":
        found["hidden_activation"] = "gelu_pytorch_tanh"
    return found


_SCALE = Keys(_read_scale, _write_scale)


# ---- Gemma 3's rotations -------------------------------------------------------------------------


def _of_kind(config: Json, kind: str) -> Json:
    """A `config.json` with the rotation of one kind of layer: `rope_scaling` is of full ones."""
    given, theta = config.get(rope.PARAMETERS), config.get(rope.BASE, THETA)
    if given is not None and not (
        isinstance(given, dict) and {rope.FULL, rope.SLIDING} <= {*given}
    ):
        raise UserError(
            f"{rope.PARAMETERS}={quoted(given)}; it must have an object for {rope.FULL} and one "
            f"for {rope.SLIDING}"
        )
    scaling = config.get(rope.SCALING) if kind == rope.FULL else None
    base = theta if kind == rope.FULL else config.get(LOCAL, LOCAL_THETA)
    values = {rope.BASE: base} | ((given or {}).get(kind) or {}) | (scaling or {})
    return config | {rope.SCALING: None, rope.PARAMETERS: values}


def _read_rotations(config: Json) -> Json:
    """Windows and rotations; without windows all layers are full ones."""
    rotations = rope.read_both(*(_of_kind(config, kind) for kind in (rope.FULL, rope.SLIDING)))
    options = rotations | windows.BY_PATTERN.read(config)
    return options if options["window"] else options | {"rope.window_theta": None}


def _write_rotations(model: ModelConfig) -> Json:
    """Both, in one object for each kind of layer if those with a window are stretched as others."""
    keys = rope.write(model) | windows.BY_PATTERN.write(model)
    near = option(model, "rope.window_theta")
    if near is None and keys[rope.SCALING] and model.window:
        return keys | rope.write_both(model)
    return keys | {LOCAL: near or keys[rope.BASE]}


def _read_gemma3(config: Json) -> Json:
    return _read_scale(config) | _read_rotations(config)


def _write_gemma3(model: ModelConfig) -> Json:
    return _write_scale(model) | _write_rotations(model)


GEMMA2 = llama.descendant(
    "gemma2",
    "Gemma2ForCausalLM",
    _KEYS
    | {
        "vocab_size": ("vocab_size", 256000),
        "max_positions": ("max_position_embeddings", 8192),
        "attention_softcap": ("attn_logit_softcapping", 50.0),
        "logit_softcap": ("final_logit_softcapping", 30.0),
    },
    options=_OPTIONS,
    tensors=TENSORS,
    tied=True,
    fixed=llama.NO_BIAS,
    parts=[windows.EVERY_SECOND, _SCALE],
)
_GEMMA3 = llama.descendant(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _KEYS
    | {
        "vocab_size": ("vocab_size", 262208),
        "max_positions": ("max_position_embeddings", 131072),
        "logit_softcap": ("final_logit_softcapping", None),
    },
    options=_OPTIONS | {"qk_norm": True},
    tensors=TENSORS,
    tied=True,
    fixed=llama.NO_BIAS,
    unwritten={"attn_logit_softcapping": None},
)
GEMMA3_TEXT = dataclasses.replace(
    _GEMMA3,
    options={name: x for name, x in _GEMMA3.options.items() if name != "rope.window_theta"},
    others=_read_gemma3,
    write_others=_write_gemma3,
    remarks=lambda config: rope.remarks(_of_kind(config, rope.FULL)),
)
