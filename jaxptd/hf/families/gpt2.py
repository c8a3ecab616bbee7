"""GPT-2. Source: `modeling_gpt2.py` of transformers 5."""

from jaxptd.hf.dims import Rule
from jaxptd.hf.families.family import Family, Tensors

_LAYER = "transformer.h.{}"
TENSORS = Tensors(
    prefix="transformer.",
    rules=(
        Rule("tokens.table", "V D", "transformer.wte.weight", "V D"),
        Rule("positions.table", "T D", "transformer.wpe.weight", "T D", longer=True),
        Rule("blocks.attention_norm.w", "L D", f"{_LAYER}.ln_1.weight", "D"),
        Rule("blocks.attention_norm.b", "L D", f"{_LAYER}.ln_1.bias", "D"),
        Rule("blocks.attention.qkv.w", "L D C N H", f"{_LAYER}.attn.c_attn.weight", "D (C N H)"),
        Rule("blocks.attention.qkv.b", "L C N H", f"{_LAYER}.attn.c_attn.bias", "(C N H)"),
        Rule("blocks.attention.out.w", "L N H D", f"{_LAYER}.attn.c_proj.weight", "(N H) D"),
        Rule("blocks.attention.out.b", "L D", f"{_LAYER}.attn.c_proj.bias", "D"),
        Rule("blocks.mlp_norm.w", "L D", f"{_LAYER}.ln_2.weight", "D"),
        Rule("blocks.mlp_norm.b", "L D", f"{_LAYER}.ln_2.bias", "D"),
        Rule("blocks.mlp.up.w", "L D F", f"{_LAYER}.mlp.c_fc.weight", "D F"),
        Rule("blocks.mlp.up.b", "L F", f"{_LAYER}.mlp.c_fc.bias", "F"),
        Rule("blocks.mlp.down.w", "L F D", f"{_LAYER}.mlp.c_proj.weight", "F D"),
        Rule("blocks.mlp.down.b", "L D", f"{_LAYER}.mlp.c_proj.bias", "D"),
        Rule("norm.w", "D", "transformer.ln_f.weight", "D"),
        Rule("norm.b", "D", "transformer.ln_f.bias", "D"),
        Rule("head.table", "V D", "lm_head.weight", "V D"),
    ),
    ignored=(r"h\.\d+\.attn\.(masked_)?bias",),  # the causal mask
    aliases=((r"lm_head\.weight", "transformer.wte.weight"),),
)
GPT2 = Family(
    "gpt",
    "GPT2LMHeadModel",
    TENSORS,
    keys={
        "num_layers": ("n_layer", 12),
        "hidden_size": ("n_embd", 768),
        "num_heads": ("n_head", 12),
        "ffn_hidden_size": ("n_inner", None),
        "vocab_size": ("vocab_size", 50257),
        "max_positions": ("n_positions", 1024),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "gelu_new"),
    },
    options={
        "norm": "layernorm",
        "norm_order": "pre",
        "gated": False,
        "linear_bias": "all",
        "positions": "learned",
        "qk_norm": False,
        "window": None,
    },
    synonyms={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    unwritten={"is_causal": True},
    tied=True,
)
