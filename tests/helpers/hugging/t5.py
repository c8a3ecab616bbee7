"""The tensors of a tiny T5, release 1.0 or 1.1, by transformers' names."""

from collections.abc import Mapping
from typing import Any

import numpy as np

VOCAB = 37
CONFIG: Mapping[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "num_layers": 2,
    "num_decoder_layers": 3,
    "d_model": 12,
    "num_heads": 4,
    "d_kv": 5,
    "d_ff": 20,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "vocab_size": VOCAB,
    "decoder_start_token_id": 0,
}
RELEASE_11: Mapping[str, Any] = {
    **CONFIG,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
D, F, N, H = (CONFIG[name] for name in ("d_model", "d_ff", "num_heads", "d_kv"))
BUCKETS = CONFIG["relative_attention_num_buckets"]


def attention(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{each}.weight": (N * H, D) for each in "qkv"} | {
        f"{name}.o.weight": (D, N * H)
    }


def stack(name: str, layers: int, *, cross: bool, gated: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{name}.final_layer_norm.weight": (D,)}
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    found[bias] = (BUCKETS, N)
    for number in range(layers):
        layer = f"{name}.block.{number}.layer"
        found |= attention(f"{layer}.0.SelfAttention")
        found |= attention(f"{layer}.1.EncDecAttention") if cross else {}
        dense = f"{layer}.{1 + cross}.DenseReluDense"
        up = ("wi_0", "wi_1") if gated else ("wi",)
        found |= {f"{dense}.{each}.weight": (F, D) for each in up} | {f"{dense}.wo.weight": (D, F)}
        found |= {f"{layer}.{part}.layer_norm.weight": (D,) for part in range(2 + cross)}
    return found


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    gated = "gated" in config.get("feed_forward_proj", "relu")
    found: dict[str, tuple[int, ...]] = {"shared.weight": (VOCAB, D)}
    found |= stack("encoder", config["num_layers"], cross=False, gated=gated)
    found |= stack("decoder", config["num_decoder_layers"], cross=True, gated=gated)
    untied = config.get("tie_word_embeddings") is False
    return found | ({"lm_head.weight": (VOCAB, D)} if untied else {})


def t5_tensors(config: Mapping[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """The state dict of a T5ForConditionalGeneration."""
    rng = np.random.default_rng(0)
    found = {name: rng.normal(0, 0.3, shape) for name, shape in shapes(config).items()}
    return {name: x.astype(np.float32) for name, x in found.items()}
