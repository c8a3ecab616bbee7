"""Tiny Gemmas: their tensors without transformers, and logits by transformers' formulas in numpy.

Letters: T query position, S key position, D model, N heads, H head size.
"""

from typing import Any

import numpy as np

D, N, K, H, F, VOCAB, LENGTH = 12, 4, 2, 6, 20, 13, 11
BASE = {
    "hidden_size": D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "intermediate_size": F,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "query_pre_attn_scalar": 5,
    "sliding_window": 3,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "num_hidden_layers": 3,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
        "rope_theta": 100.0,
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "rope_theta": 50.0,
        "rope_local_base_freq": 7.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
}
CONFIGS = {kind: {"model_type": kind, **BASE, **each} for kind, each in CONFIGS.items()}
Tensors = dict[str, np.ndarray]


def gemma_tensors(kind: str) -> Tensors:
    """Random weights; those of norms have few digits, as in 16 bits."""
    layer = {
        "self_attn.q_proj": (N * H, D),
        "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D),
        "self_attn.o_proj": (D, N * H),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
        "pre_feedforward_layernorm": (D,),
        "post_feedforward_layernorm": (D,),
    }
    if kind == "gemma3_text":
        layer |= {"self_attn.q_norm": (H,), "self_attn.k_norm": (H,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, D), "model.norm": (D,)}
    for number in range(CONFIGS[kind]["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    found = {f"{name}.weight": rng.normal(0, 0.4, shape) for name, shape in shapes.items()}
    return {
        name: (np.round(x * 64) / 64 + 0.0 if x.ndim == 1 else x).astype(np.float32)
        for name, x in found.items()
    }


def logits(kind: str, tensors: Tensors, token_T: np.ndarray) -> np.ndarray:
    """The logits `[T, V]` of a text, in float64."""
    config = CONFIGS[kind]
    table = tensors["model.embed_tokens.weight"].astype(float)
    x = table[token_T] * D**0.5
    for number in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{number}.").removesuffix(".weight"): w.astype(float)
            for name, w in tensors.items()
            if name.startswith(f"model.layers.{number}.")
        }
        y = _attention(_norm(x, own["input_layernorm"]), own, config, number)
        x = x + _norm(y, own["post_attention_layernorm"])
        n = _norm(x, own["pre_feedforward_layernorm"])
        y = (_gelu(n @ own["mlp.gate_proj"].T) * (n @ own["mlp.up_proj"].T)) @ own[
            "mlp.down_proj"
        ].T
        x = x + _norm(y, own["post_feedforward_layernorm"])
    found = _norm(x, tensors["model.norm.weight"].astype(float)) @ table.T
    return _capped(found, config["final_logit_softcapping"])


def _norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + w)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _attention(x: np.ndarray, own: Tensors, config: dict[str, Any], number: int) -> np.ndarray:
    """Heads of queries by groups over keys and values; the window by the layer's number."""
    period = config.get("sliding_window_pattern", 2)
    slides = bool((number + 1) % period)
    q, k, v = (
        (x @ own[f"self_attn.{name}_proj"].T).reshape(len(x), -1, H).swapaxes(0, 1)
        for name in "qkv"
    )
    if "self_attn.q_norm" in own:
        q, k = _norm(q, own["self_attn.q_norm"]), _norm(k, own["self_attn.k_norm"])
    theta, factor = config["rope_theta"], 1.0
    if slides:
        theta = config.get("rope_local_base_freq", theta)
    elif "rope_scaling" in config:
        factor = config["rope_scaling"]["factor"]
    q, k = (_rotated(each, theta, factor) for each in (q, k))
    k, v = (np.repeat(each, N // K, 0) for each in (k, v))
    scores = np.einsum("NTH,NSH->NTS", q, k) * config["query_pre_attn_scalar"] ** -0.5
    scores = _capped(scores, config["attn_logit_softcapping"])
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    hidden = (distance < 0) | (slides & (distance >= config["sliding_window"]))
    p = np.exp(np.where(hidden, -np.inf, scores))
    o = np.einsum("NTS,NSH->TNH", p / p.sum(-1, keepdims=True), v)
    return o.reshape(len(x), -1) @ own["self_attn.o_proj"].T


def _rotated(x: np.ndarray, theta: float, factor: float) -> np.ndarray:
    """Feature i with feature i + H / 2, `[.., T, H]`."""
    angle = np.arange(x.shape[-2])[:, None] / factor * theta ** -(np.arange(0, H, 2) / H)
    first, second = x[..., : H // 2], x[..., H // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
