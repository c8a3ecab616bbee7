"""The tensors of each family in Hugging Face's files, as data. `dims.py` explains the notation.

Letters: L layers, D model, V vocabulary, T positions, F hidden, N heads, K heads of keys and
values, H head size, P pairs of H that a rotation turns, C queries, keys and values.

A family has rules for every option; those count whose parameter the model has.
Sources: `modeling_gpt2.py`, `modeling_llama.py`, `modeling_qwen2.py`, `modeling_qwen3.py`,
`modeling_mistral.py` of transformers 5.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxptd.hf.dims import Rule


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a family.

    Args:
        prefix: of names, which a file may leave out.
        rules: for its tensors.
        ignored: regular expressions of names, without the prefix, that hold no parameter.
    """

    prefix: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]


_GPT2 = "transformer.h.{}"
GPT2 = Tensors(
    prefix="transformer.",
    rules=(
        Rule("tokens.table", "V D", "transformer.wte.weight", "V D"),
        Rule("positions.table", "T D", "transformer.wpe.weight", "T D", longer=True),
        Rule("blocks.attention_norm.w", "L D", f"{_GPT2}.ln_1.weight", "D"),
        Rule("blocks.attention_norm.b", "L D", f"{_GPT2}.ln_1.bias", "D"),
        Rule("blocks.attention.qkv.w", "L D C N H", f"{_GPT2}.attn.c_attn.weight", "D (C N H)"),
        Rule("blocks.attention.qkv.b", "L C N H", f"{_GPT2}.attn.c_attn.bias", "(C N H)"),
        Rule("blocks.attention.out.w", "L N H D", f"{_GPT2}.attn.c_proj.weight", "(N H) D"),
        Rule("blocks.attention.out.b", "L D", f"{_GPT2}.attn.c_proj.bias", "D"),
        Rule("blocks.mlp_norm.w", "L D", f"{_GPT2}.ln_2.weight", "D"),
        Rule("blocks.mlp_norm.b", "L D", f"{_GPT2}.ln_2.bias", "D"),
        Rule("blocks.mlp.up.w", "L D F", f"{_GPT2}.mlp.c_fc.weight", "D F"),
        Rule("blocks.mlp.up.b", "L F", f"{_GPT2}.mlp.c_fc.bias", "F"),
        Rule("blocks.mlp.down.w", "L F D", f"{_GPT2}.mlp.c_proj.weight", "F D"),
        Rule("blocks.mlp.down.b", "L D", f"{_GPT2}.mlp.c_proj.bias", "D"),
        Rule("norm.w", "D", "transformer.ln_f.weight", "D"),
        Rule("norm.b", "D", "transformer.ln_f.bias", "D"),
        Rule("head.table", "V D", "lm_head.weight", "V D"),
    ),
    ignored=(r"h\.\d+\.attn\.(masked_)?bias",),  # the causal mask
)

_LLAMA = "model.layers.{}"
_HEADS = f"{_LLAMA}.self_attn"
_MLP = f"{_LLAMA}.mlp"
LLAMA = Tensors(
    prefix="model.",
    rules=(
        Rule("tokens.table", "V D", "model.embed_tokens.weight", "V D"),
        Rule("blocks.attention_norm.w", "L D", f"{_LLAMA}.input_layernorm.weight", "D"),
        # Hugging Face turns feature i with i + H / 2, we turn neighbours.
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
        Rule("blocks.mlp_norm.w", "L D", f"{_LLAMA}.post_attention_layernorm.weight", "D"),
        Rule("blocks.mlp.up.w", "L D [0] F", f"{_MLP}.gate_proj.weight", "F D"),
        Rule("blocks.mlp.up.w", "L D [1] F", f"{_MLP}.up_proj.weight", "F D"),
        Rule("blocks.mlp.up.b", "L [0] F", f"{_MLP}.gate_proj.bias", "F"),
        Rule("blocks.mlp.up.b", "L [1] F", f"{_MLP}.up_proj.bias", "F"),
        Rule("blocks.mlp.down.w", "L F D", f"{_MLP}.down_proj.weight", "D F"),
        Rule("blocks.mlp.down.b", "L D", f"{_MLP}.down_proj.bias", "D"),
        Rule("norm.w", "D", "model.norm.weight", "D"),
        Rule("head.table", "V D", "lm_head.weight", "V D"),
    ),
    ignored=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
)

# Our name of a family -> its tensors.
TENSORS: Mapping[str, Tensors] = MappingProxyType(
    {"gpt": GPT2, "llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "mistral": LLAMA}
)
