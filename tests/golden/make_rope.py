"""Writes the rotations that transformers derives from keys of a `config.json`.

    python tests/golden/make_rope.py

Needs torch and transformers; made with transformers 5.24.0 and torch 2.14.1. For each case
the file holds the keys, the angle of each pair at position 1 and the factor of rotated vectors, or
null if transformers fails.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
DEFAULT = {"rope_type": "default"}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS = (DEFAULT, LINEAR, LLAMA3, YARN)
# Values to try for single keys of each kind's object.
KEYS: dict[str, tuple[Any, ...]] = {
    "factor": (None, "4.0", 1.0, 3),
    "original_max_position_embeddings": (None, "32", 64, 64.0),
    "attention_factor": (None, "1", 1.0, 1.138629436111989, 1.2079441541679836),
    "mscale": (None, 0.707),
    "truncate": (True,),
    "beta_fast": (None, 0, "32", 16),
    "beta_slow": (None, 2),
    "low_freq_factor": (None, 2.0),
    "high_freq_factor": (3.0,),
    "partial_rotary_factor": (None, 1.0, 0.5),
    "finetuned": (True,),
    "attn_factor": (0.8782488562869419,),
    "type": ("linear",),
    "rope_type": (None, "longrope", 3),
    "rope_theta": (None, "1e4", 100.0),
}


def cases() -> Iterator[dict[str, Any]]:
    """Yields the keys of each case."""
    yield {}
    yield {"rope_theta": 500.0}
    for kind in KINDS:
        for key, values in KEYS.items():
            yield from ({"rope_scaling": {**kind, key: value}} for value in values)
        old = {"type" if key == "rope_type" else key: x for key, x in kind.items()}
        yield {"rope_scaling": old, "rope_theta": 500.0}
        yield {"rope_parameters": {**kind, "rope_theta": 100.0}, "rope_theta": 500.0}
        for other in (*KINDS, {}, None):
            yield {"rope_parameters": {**kind, "rope_theta": 100.0}, "rope_scaling": other}
        for value in (16, None, "16"):
            yield {"rope_scaling": kind, "original_max_position_embeddings": value}
        yield from ({"rope_scaling": kind, "partial_rotary_factor": x} for x in (1.0, 0.5, None))
        yield from ({"rope_scaling": {k: x for k, x in kind.items() if k != key}} for key in kind)
    for one, other, factor in itertools.product((0.707, 1.0), (0.707, 1.0), (4.0, 0.5)):
        yield {"rope_scaling": {**YARN, "factor": factor, "mscale": one, "mscale_all_dim": other}}


def rotation(keys: dict[str, Any]) -> tuple[list[float], float] | None:
    """Rotation that transformers derives from these keys; None if it fails."""
    try:
        made = LlamaRotaryEmbedding(LlamaConfig.from_dict({**SIZES, **keys}))
        return [float(f"{x:.8g}") for x in made.inv_freq.tolist()], 1.0 * made.attention_scaling
    except Exception:
        return None


if __name__ == "__main__":
    lines = (json.dumps([keys, rotation(json.loads(json.dumps(keys)))]) for keys in cases())
    text = ",\n".join(lines)
    Path(__file__).with_name("rope.json").write_text(f"[\n{text}\n]\n")
