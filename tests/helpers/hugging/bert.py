"""The tensors of a tiny BERT, by transformers' names."""

from typing import Any

import numpy as np

VOCAB, LENGTH = 37, 16
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForPreTraining"],
    "num_hidden_layers": 3,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": LENGTH + 4,
    "vocab_size": VOCAB,
}
D, F, T = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["max_position_embeddings"]


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.LayerNorm.weight": (D,), f"{name}.LayerNorm.bias": (D,)}


def shapes(prefix: str = "bert.") -> dict[str, tuple[int, ...]]:
    tables = {"word": VOCAB, "position": T, "token_type": 2}
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.{name}_embeddings.weight": (rows, D) for name, rows in tables.items()
    }
    found |= norm(f"{prefix}embeddings")
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"{prefix}encoder.layer.{layer}"
        for each in ("query", "key", "value"):
            found |= linear(f"{name}.attention.self.{each}", D, D)
        found |= linear(f"{name}.attention.output.dense", D, D) | norm(f"{name}.attention.output")
        found |= linear(f"{name}.intermediate.dense", F, D)
        found |= linear(f"{name}.output.dense", D, F) | norm(f"{name}.output")
    found |= linear(f"{prefix}pooler.dense", D, D)
    found |= linear("cls.predictions.transform.dense", D, D) | norm("cls.predictions.transform")
    return found | {"cls.predictions.bias": (VOCAB,)} | linear("cls.seq_relationship", 2, D)


def bert_tensors(*, prefix: str = "bert.", dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The state dict of a BertForPreTraining."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes(prefix).items()}
