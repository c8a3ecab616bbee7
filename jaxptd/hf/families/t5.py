"""T5, releases 1.0 and 1.1. Sources: `modeling_t5.py`, `configuration_t5.py` of transformers 5.

Letters besides those of `Tensors`: R buckets of distances.
"""

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.dims import Rule
from jaxptd.hf.families.family import Family, Json, Tensors, activation_name, read_activation

_SCALED, _PAD, _START = "scale_decoder_outputs", "pad_token_id", "decoder_start_token_id"
_GATED, _GATED_GELU = "gated-", "gated-gelu"  # the tanh approximation, unlike "gelu"


def _stack(name: str, *, mlp: int) -> tuple[Rule, ...]:
    """The rules of a stack. mlp: number of the MLP among the parts of a layer."""
    part = f"{name}.block.{{}}.layer"
    heads, dense = f"{part}.0.SelfAttention", f"{part}.{mlp}.DenseReluDense"
    return (
        Rule(f"{name}.attention_norm.w", "L D", f"{part}.0.layer_norm.weight", "D"),
        Rule(f"{name}.attention.qkv.w", "L D [0] N H", f"{heads}.q.weight", "(N H) D"),
        Rule(f"{name}.attention.qkv.w", "L D [1] N H", f"{heads}.k.weight", "(N H) D"),
        Rule(f"{name}.attention.qkv.w", "L D [2] N H", f"{heads}.v.weight", "(N H) D"),
        Rule(f"{name}.attention.out.w", "L N H D", f"{heads}.o.weight", "D (N H)"),
        Rule(f"{name}.mlp_norm.w", "L D", f"{part}.{mlp}.layer_norm.weight", "D"),
        Rule(f"{name}.mlp.up.w", "L D F", f"{dense}.wi.weight", "F D"),
        Rule(f"{name}.mlp.up.w", "L D [0] F", f"{dense}.wi_0.weight", "F D"),  # the gate
        Rule(f"{name}.mlp.up.w", "L D [1] F", f"{dense}.wi_1.weight", "F D"),
        Rule(f"{name}.mlp.down.w", "L F D", f"{dense}.wo.weight", "D F"),
        Rule(
            *(f"common.{name}_bias.table", "R N"),
            *(f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "R N"),
        ),
    )


_CROSS = "decoder.block.{}.layer.1.EncDecAttention"
TENSORS = Tensors(
    prefix="",
    rules=(
        Rule("tokens.table", "V D", "shared.weight", "V D"),
        *_stack("encoder", mlp=1),
        Rule("common.source_norm.w", "D", "encoder.final_layer_norm.weight", "D"),
        *_stack("decoder", mlp=2),
        Rule("decoder.cross_norm.w", "L D", "decoder.block.{}.layer.1.layer_norm.weight", "D"),
        Rule("decoder.cross.q.w", "L D N H", f"{_CROSS}.q.weight", "(N H) D"),
        Rule("decoder.cross.kv.w", "L D [0] N H", f"{_CROSS}.k.weight", "(N H) D"),
        Rule("decoder.cross.kv.w", "L D [1] N H", f"{_CROSS}.v.weight", "(N H) D"),
        Rule("decoder.cross.out.w", "L N H D", f"{_CROSS}.o.weight", "D (N H)"),
        Rule("norm.w", "D", "decoder.final_layer_norm.weight", "D"),
        Rule("head.table", "V D", "lm_head.weight", "V D"),
    ),
    ignored=(  # unused: keys of the source have no distance to a query
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    aliases=((r"(encoder|decoder)\.embed_tokens\.weight|lm_head\.weight", "shared.weight"),),
)


# ---- config.json -------------------------------------------------------------------------------


def _read(config: Json) -> Json:
    """Gate, activation, and the factor on x before the output layer.

    That factor depends on its own key, which transformers 5 writes, or on `tie_word_embeddings`,
    and not on whether the output layer really is the embedding.
    """
    projection = config.get("feed_forward_proj", "relu")
    if not isinstance(projection, str):
        raise UserError(
            f"feed_forward_proj={quoted(projection)}; it must be a text such as gated-gelu"
        )
    name = "gelu_new" if projection == _GATED_GELU else projection.removeprefix(_GATED)
    scaled = config.get(_SCALED, config.get("tie_word_embeddings") is not False)
    pad, start = config.get(_PAD, 0), config.get(_START, 0)
    if pad != start:  # transformers reads the one after an ignored target
        raise UserError(
            f"{_PAD}={quoted(pad)} and {_START}={quoted(start)}; use a model with one id for both"
        )
    return {
        "activation": read_activation("dense_act_fn", config.get("dense_act_fn", name)),
        "gated": bool(config.get("is_gated_act", projection.startswith(_GATED))),
        "encoder_decoder.output_scale": config["d_model"] ** -0.5 if scaled else 1.0,
    }


def _write(model: ModelConfig) -> Json:
    """The keys of `_read`. Raises UserError if they have no value for the model."""
    name, scale = activation_name(option(model, "activation")), model.block.output_scale
    usual = model.hidden_size**-0.5
    if scale not in ((1.0, usual) if model.tie_embeddings else (1.0,)):
        raise UserError(
            f"model.encoder_decoder.output_scale={scale}: Hugging Face's t5 has 1, or with "
            "tie_embeddings hidden_size ** -0.5; export a model with one of these"
        )
    gated = option(model, "gated")
    projection = _GATED_GELU if gated and name == "gelu_new" else f"{_GATED * gated}{name}"
    return {
        "feed_forward_proj": projection,
        "dense_act_fn": name,
        "is_gated_act": gated,
        _SCALED: scale != 1.0,
        "tie_word_embeddings": scale != 1.0,
        _PAD: option(model, "encoder_decoder.start_token"),
    }


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    TENSORS,
    keys={
        "num_layers": ("num_layers", 6),
        "encoder_decoder.num_layers": ("num_decoder_layers", None),
        "hidden_size": ("d_model", 512),
        "num_heads": ("num_heads", 8),
        "head_size": ("d_kv", 64),
        "ffn_hidden_size": ("d_ff", 2048),
        "vocab_size": ("vocab_size", 32128),
        "norm_eps": ("layer_norm_epsilon", 1e-6),
        "encoder_decoder.relative_buckets": ("relative_attention_num_buckets", 32),
        "encoder_decoder.relative_distance": ("relative_attention_max_distance", 128),
        "seq_length": ("n_positions", 512),  # length of its training texts
        "encoder_decoder.start_token": (_START, 0),
    },
    options={
        "norm": "rmsnorm",
        "norm_order": "pre",
        "linear_bias": "none",
        "positions": "relative",
        "qk_norm": False,
        "window": None,
    },
    fixed={"is_encoder_decoder": True},
    unwritten={"is_causal": True},
    others=_read,
    write_others=_write,
    tokens={"eos_token_id": None},
)
