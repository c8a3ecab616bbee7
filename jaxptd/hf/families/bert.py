"""BERT with both of its heads. Source: `modeling_bert.py` of transformers 5.

Letters besides those of `Tensors`: C token types or classes of pairs, E outputs of a square matmul
with D inputs.
"""

from jaxptd.hf.dims import Rule
from jaxptd.hf.families.family import Family, Tensors

_EMBEDDINGS = "bert.embeddings"
_LAYER = "bert.encoder.layer.{}"
_HEADS = f"{_LAYER}.attention.self"
_OUT = f"{_LAYER}.attention.output"
_MLM = "cls.predictions"
_TABLE = f"{_EMBEDDINGS}.word_embeddings.weight"
TENSORS = Tensors(
    prefix="bert.",
    rules=(
        Rule("tokens.table", "V D", _TABLE, "V D"),
        Rule(
            *("positions.table", "T D", f"{_EMBEDDINGS}.position_embeddings.weight", "T D"),
            longer=True,
        ),
        Rule("types.w", "C D", f"{_EMBEDDINGS}.token_type_embeddings.weight", "C D"),
        Rule("norm.w", "D", f"{_EMBEDDINGS}.LayerNorm.weight", "D"),
        Rule("norm.b", "D", f"{_EMBEDDINGS}.LayerNorm.bias", "D"),
        Rule("blocks.attention.qkv.w", "L D [0] N H", f"{_HEADS}.query.weight", "(N H) D"),
        Rule("blocks.attention.qkv.w", "L D [1] N H", f"{_HEADS}.key.weight", "(N H) D"),
        Rule("blocks.attention.qkv.w", "L D [2] N H", f"{_HEADS}.value.weight", "(N H) D"),
        Rule("blocks.attention.qkv.b", "L [0] N H", f"{_HEADS}.query.bias", "(N H)"),
        Rule("blocks.attention.qkv.b", "L [1] N H", f"{_HEADS}.key.bias", "(N H)"),
        Rule("blocks.attention.qkv.b", "L [2] N H", f"{_HEADS}.value.bias", "(N H)"),
        Rule("blocks.attention.out.w", "L N H D", f"{_OUT}.dense.weight", "D (N H)"),
        Rule("blocks.attention.out.b", "L D", f"{_OUT}.dense.bias", "D"),
        Rule("blocks.attention_norm.w", "L D", f"{_OUT}.LayerNorm.weight", "D"),
        Rule("blocks.attention_norm.b", "L D", f"{_OUT}.LayerNorm.bias", "D"),
        Rule("blocks.mlp.up.w", "L D F", f"{_LAYER}.intermediate.dense.weight", "F D"),
        Rule("blocks.mlp.up.b", "L F", f"{_LAYER}.intermediate.dense.bias", "F"),
        Rule("blocks.mlp.down.w", "L F D", f"{_LAYER}.output.dense.weight", "D F"),
        Rule("blocks.mlp.down.b", "L D", f"{_LAYER}.output.dense.bias", "D"),
        Rule("blocks.mlp_norm.w", "L D", f"{_LAYER}.output.LayerNorm.weight", "D"),
        Rule("blocks.mlp_norm.b", "L D", f"{_LAYER}.output.LayerNorm.bias", "D"),
        Rule("transform.w", "D E", f"{_MLM}.transform.dense.weight", "E D"),
        Rule("transform.b", "E", f"{_MLM}.transform.dense.bias", "E"),
        Rule("transform_norm.w", "D", f"{_MLM}.transform.LayerNorm.weight", "D"),
        Rule("transform_norm.b", "D", f"{_MLM}.transform.LayerNorm.bias", "D"),
        Rule("bias.b", "V", f"{_MLM}.bias", "V"),
        Rule("pooler.w", "D E", "bert.pooler.dense.weight", "E D"),
        Rule("pooler.b", "E", "bert.pooler.dense.bias", "E"),
        Rule("pairs.table", "C D", "cls.seq_relationship.weight", "C D"),
        Rule("pairs_bias.b", "C", "cls.seq_relationship.bias", "C"),
    ),
    ignored=(r"embeddings\.position_ids",),
    aliases=(
        (r"(.*LayerNorm)\.gamma", r"\1.weight"),  # of TensorFlow's files
        (r"(.*LayerNorm)\.beta", r"\1.bias"),
        (r"cls\.predictions\.decoder\.weight", _TABLE),
        (r"cls\.predictions\.decoder\.bias", f"{_MLM}.bias"),
    ),
)
BERT = Family(
    "bert",
    "BertForPreTraining",
    TENSORS,
    keys={
        "num_layers": ("num_hidden_layers", 12),
        "hidden_size": ("hidden_size", 768),
        "num_heads": ("num_attention_heads", 12),
        "ffn_hidden_size": ("intermediate_size", 3072),
        "vocab_size": ("vocab_size", 30522),
        "max_positions": ("max_position_embeddings", 512),
        "norm_eps": ("layer_norm_eps", 1e-12),
        "activation": ("hidden_act", "gelu"),
    },
    options={
        "norm": "layernorm",
        "norm_order": "post",
        "gated": False,
        "linear_bias": "all",
        "positions": "learned",
        "qk_norm": False,
        "window": None,
        "causal": False,
        "token_types": 2,
    },
    fixed={
        "type_vocab_size": 2,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    tokens={"pad_token_id": "[PAD]"},
)
