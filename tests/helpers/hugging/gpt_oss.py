"""A tiny gpt-oss: its tensors without transformers, and logits by transformers' formulas in numpy.

Letters: T query position, S key position, D model, N heads, H head size, E experts.
"""

import math
from typing import Any

import numpy as np

D, N, K, H, F, VOCAB, EXPERTS, CHOSEN = 64, 4, 2, 16, 32, 13, 6, 2
CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "intermediate_size": F,
    "vocab_size": VOCAB,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "experts_per_token": CHOSEN,
    "max_position_embeddings": 64,
    "initial_context_length": 16,
    "sliding_window": 3,
    "rope_theta": 50.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 3.0,
        "beta_slow": 0.4,
        "original_max_position_embeddings": 16,
        "truncate": False,
    },
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.9,
    "output_router_logits": False,
}
Tensors = dict[str, np.ndarray]


def gpt_oss_tensors() -> Tensors:
    """Random weights, so large that many hidden units are beyond the clamps."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (VOCAB, D),
    }
    heads = {"q_proj": (N * H, D), "k_proj": (K * H, D), "v_proj": (K * H, D), "o_proj": (D, N * H)}
    for number in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{number}"
        for each, shape in heads.items():
            shapes[f"{name}.self_attn.{each}.weight"] = shape
            shapes[f"{name}.self_attn.{each}.bias"] = shape[:1]
        shapes |= {
            f"{name}.self_attn.sinks": (N,),
            f"{name}.input_layernorm.weight": (D,),
            f"{name}.post_attention_layernorm.weight": (D,),
            f"{name}.mlp.router.weight": (EXPERTS, D),
            f"{name}.mlp.router.bias": (EXPERTS,),
            f"{name}.mlp.experts.gate_up_proj": (EXPERTS, D, 2 * F),
            f"{name}.mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * F),
            f"{name}.mlp.experts.down_proj": (EXPERTS, F, D),
            f"{name}.mlp.experts.down_proj_bias": (EXPERTS, D),
        }
    rng = np.random.default_rng(0)
    scale = {"experts.gate_up_proj": 1.5, "norm.weight": 1.0}
    return {
        name: rng.normal(
            0, next((s for end, s in scale.items() if name.endswith(end)), 0.3), shape
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def logits(tensors: Tensors, token_T: np.ndarray) -> tuple[np.ndarray, float]:
    """(the logits `[T, V]` of a text, in float64; the share of hidden units beyond a clamp)."""
    x, beyond = tensors["model.embed_tokens.weight"].astype(float)[token_T], []
    for number in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{number}."
        own = {k.removeprefix(name): w.astype(float) for k, w in tensors.items() if name in k}
        x = x + _attention(_norm(x, own["input_layernorm.weight"]), own, number % 2 == 0)
        y, share = _experts(_norm(x, own["post_attention_layernorm.weight"]), own)
        x = x + y
        beyond.append(share)
    x = _norm(x, tensors["model.norm.weight"].astype(float))
    return x @ tensors["lm_head.weight"].astype(float).T, float(np.mean(beyond))


def _norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w


def _attention(x: np.ndarray, own: Tensors, slides: bool) -> np.ndarray:
    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ own[f"self_attn.{name}.weight"].T + own[f"self_attn.{name}.bias"]

    q, k, v = (linear(x, f"{c}_proj").reshape(len(x), -1, H).swapaxes(0, 1) for c in "qkv")
    q, k = _rotated(q), _rotated(k)
    k, v = (np.repeat(each, N // K, 0) for each in (k, v))
    scores = np.einsum("NTH,NSH->NTS", q, k) * H**-0.5
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    hidden = (distance < 0) | (slides & (distance >= CONFIG["sliding_window"]))
    p = np.exp(np.where(hidden, -np.inf, scores))
    total = p.sum(-1, keepdims=True) + np.exp(own["self_attn.sinks"])[:, None, None]
    o = np.einsum("NTS,NSH->TNH", p / total, v).reshape(len(x), -1)
    return linear(o, "o_proj")


def _rotated(x: np.ndarray) -> np.ndarray:
    """Feature i with feature i + H / 2, by yarn's angles, whose ends are not whole pairs."""
    values, theta = CONFIG["rope_scaling"], CONFIG["rope_theta"]

    def pair(turns: float) -> float:
        length = values["original_max_position_embeddings"] / (2 * math.pi * turns)
        return H * math.log(length) / (2 * math.log(theta))

    low, high = max(pair(values["beta_fast"]), 0), min(pair(values["beta_slow"]), H - 1)
    ramp = np.clip((np.arange(H // 2) - low) / (high - low), 0, 1)
    turn = theta ** -(np.arange(0, H, 2) / H)
    turn = turn / values["factor"] * ramp + turn * (1 - ramp)
    angle = np.arange(x.shape[-2])[:, None] * turn
    length = 0.1 * math.log(values["factor"]) + 1
    first, second = x[..., : H // 2], x[..., H // 2 :]
    cos, sin = length * np.cos(angle), length * np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _experts(x: np.ndarray, own: Tensors) -> tuple[np.ndarray, float]:
    """The sum over each token's experts, and the share of gates and ups beyond a clamp."""
    y, beyond = np.zeros_like(x), []
    of_router = x @ own["mlp.router.weight"].T + own["mlp.router.bias"]
    for t, logit_E in enumerate(of_router):
        chosen = np.argsort(-logit_E)[:CHOSEN]
        factor = np.exp(logit_E[chosen] - logit_E.max())
        for e, weight in zip(chosen, factor / factor.sum(), strict=True):
            h = x[t] @ own["mlp.experts.gate_up_proj"][e] + own["mlp.experts.gate_up_proj_bias"][e]
            gate, up = h[::2], h[1::2]
            beyond += [gate > 7, np.abs(up) > 7]
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            h = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            out = h @ own["mlp.experts.down_proj"][e] + own["mlp.experts.down_proj_bias"][e]
            y[t] += weight * out
    return y, float(np.mean(beyond))


# ---- MXFP4 ---------------------------------------------------------------------------------------

FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """(the tensors of a release, with experts in MXFP4; the numbers that these stand for)."""
    rng, stored, read = np.random.default_rng(2), dict(tensors), dict(tensors)
    for name, x in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")) or ".experts." not in name:
            continue
        experts, columns, rows = x.shape
        bits = rng.integers(0, 16, (experts, rows, columns // 32, 32)).astype(np.uint8)
        scale = rng.integers(124, 129, (experts, rows, columns // 32)).astype(np.uint8)
        values = np.vectorize(lambda b: FOUR_BITS[b & 7] * (-1 if b & 8 else 1))(bits)
        values = values * 2.0 ** (scale.astype(float) - 127)[..., None]
        read[name] = values.reshape(experts, rows, columns).swapaxes(1, 2).astype(np.float32)
        del stored[name]
        stored[f"{name}_blocks"] = bits[..., ::2] | (bits[..., 1::2] << 4)
        stored[f"{name}_scales"] = scale
    return stored, read
