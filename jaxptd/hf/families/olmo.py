"""OLMo 2 and 3: norms of what attention and the MLP return, and of all heads' queries and keys.

OLMo 3 has a window in three of four layers, in which `rope_scaling` does not stretch wavelengths.

Sources: `configuration_olmo2.py`, `modular_olmo2.py`, `configuration_olmo3.py` and
`modular_olmo3.py` of transformers 5; OLMo Team, arXiv 2501.00656.
"""

import dataclasses
from typing import Any

from jaxptd.config import ModelConfig, option
from jaxptd.hf.dims import Rule
from jaxptd.hf.families import llama, rope, windows
from jaxptd.hf.families.family import Json, Tensors
from jaxptd.hf.families.rope import FULL, SLIDING

_LAYER = "model.layers.{}"
_HEADS = f"{_LAYER}.self_attn"
_NORMS = {
    "blocks.attention_norm.w": ("L D", f"{_LAYER}.post_attention_layernorm.weight", "D"),
    "blocks.mlp_norm.w": ("L D", f"{_LAYER}.post_feedforward_layernorm.weight", "D"),
    "blocks.attention.q_norm.w": ("L N (P 2)", f"{_HEADS}.q_norm.weight", "(N 2 P)"),
    "blocks.attention.k_norm.w": ("L K (P 2)", f"{_HEADS}.k_norm.weight", "(K 2 P)"),
}
TENSORS: Tensors = dataclasses.replace(
    llama.TENSORS,
    rules=tuple(
        Rule(each.ours, *_NORMS[each.ours]) if each.ours in _NORMS else each
        for each in llama.TENSORS.rules
    ),
)
THETA = 5e5
_OPTIONS = {"norm_order": "output", "qk_norm": "whole"}


def _of_kind(config: Json, kind: str) -> Json:
    """A `config.json` with the rotation of one kind of layer, if it has a separate one."""
    usual, given = {rope.BASE: THETA} | config, config.get(rope.PARAMETERS)
    if not isinstance(given, dict) or not {FULL, SLIDING} & given.keys():
        plain: Json = dict.fromkeys((rope.SCALING, rope.PARAMETERS))
        return usual if kind == FULL else usual | plain
    return usual | {rope.PARAMETERS: {rope.BASE: usual[rope.BASE]} | (given.get(kind) or {})}


def _read(config: Json) -> Json:
    """Windows and rotations; without windows all layers are full ones."""
    rotations = rope.read_both(*(_of_kind(config, kind) for kind in (FULL, SLIDING)))
    options = rotations | windows.THREE_OF_FOUR.read(config)
    return options if options["window"] else options | {"rope.window_theta": None}


def _write(model: ModelConfig) -> Json:
    """Both, with a rotation for each kind of layer unless full layers alone are stretched."""
    keys: dict[str, Any] = rope.write(model) | windows.THREE_OF_FOUR.write(model)
    near, theta = option(model, "rope.window_theta"), option(model, "rope.theta")
    simple = near == theta if keys[rope.SCALING] and model.window else near in (None, theta)
    return keys if simple else keys | rope.write_both(model)


OLMO2 = llama.descendant(
    "olmo2",
    "Olmo2ForCausalLM",
    {"vocab_size": ("vocab_size", 50304), "norm_eps": ("rms_norm_eps", 1e-5)},
    options=_OPTIONS | {"window": None},
    tensors=TENSORS,
    fixed=llama.NO_BIAS,
)
OLMO3 = dataclasses.replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    options={
        name: value
        for name, value in OLMO2.options.items()
        if name not in ("window", "rope.window_theta")
    },
    others=_read,
    write_others=_write,
    remarks=lambda config: rope.remarks(_of_kind(config, FULL)),
)
