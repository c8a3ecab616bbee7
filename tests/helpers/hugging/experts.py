"""Tiny models with experts: their tensors without transformers, and what transformers computes.

In every layer the last expert receives no token: the first feature of every token is large, and
only that expert's row of the router reads it.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hugging.reference import batch, loss_and_gradients, summary
from jaxptd import Program
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.run.folder import RunDir

D, N, K, H, F, WIDE, VOCAB, EXPERTS = 32, 4, 2, 8, 16, 24, 64, 8
LENGTH, ROWS = 11, 4
Q_RANK, RANK, TURNED, VALUE = 20, 12, 4, 6  # of latent attention
BUFFER = "e_score_correction_bias"  # without a gradient
BASE = {
    "num_hidden_layers": 2,
    "hidden_size": D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": F, "num_local_experts": EXPERTS},
    "qwen2_moe": {
        "intermediate_size": WIDE,
        "moe_intermediate_size": F,
        "shared_expert_intermediate_size": WIDE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
    },
    "qwen3_moe": {  # its first layer is dense
        "num_hidden_layers": 3,
        "head_dim": H,
        "intermediate_size": WIDE,
        "moe_intermediate_size": F,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "dots1": {  # two of three groups, with two shared experts and a dense layer
        "num_hidden_layers": 3,
        "intermediate_size": WIDE,
        "moe_intermediate_size": F,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2": {  # queries without a latent vector
        "num_hidden_layers": 3,
        "num_key_value_heads": N,
        "intermediate_size": WIDE,
        "moe_intermediate_size": F,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 3,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": H,
        "qk_rope_head_dim": TURNED,
        "v_head_dim": VALUE,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": N,
        "intermediate_size": WIDE,
        "moe_intermediate_size": F,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": H,
        "qk_rope_head_dim": TURNED,
        "v_head_dim": VALUE,
    },
    "olmoe": {
        "intermediate_size": F,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "pad_token_id": None,  # otherwise torch would not train the row of id 1
    },
    "granitemoe": {
        "intermediate_size": F,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "attention_multiplier": 0.4,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.6,
        "logits_scaling": 3.0,
    },
}
CONFIGS = {name: {"model_type": name, **BASE, **sizes} for name, sizes in CONFIGS.items()}
REQUIRED = {  # keys without a default
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 6},
}

Shapes = dict[str, tuple[int, ...]]


def sparse_layers(kind: str) -> list[int]:
    """Indices of the layers with experts."""
    config = CONFIGS[kind]
    dense = config.get("mlp_only_layers", range(config.get("first_k_dense_replace", 0)))
    return [i for i in range(config["num_hidden_layers"]) if i not in dense]


def experts_of(kind: str) -> int:
    """The number of experts in a layer."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next(CONFIGS[kind][name] for name in names if name in CONFIGS[kind])


def counts_of(kind: str, chosen: Any) -> np.ndarray:
    """Number of tokens of each expert, by layer; chosen: the experts of each token."""
    return np.stack([np.bincount(np.ravel(x), minlength=experts_of(kind)) for x in chosen])


# ---- a directory ---------------------------------------------------------------------------------


def mlp(name: str, size: int) -> Shapes:
    up = {f"{name}.{each}_proj.weight": (size, D) for each in ("gate", "up")}
    return up | {f"{name}.down_proj.weight": (D, size)}


def mixtral_layer(name: str, experts: int) -> Shapes:
    expert = {"w1": (F, D), "w3": (F, D), "w2": (D, F)}
    name = f"{name}.block_sparse_moe"
    found = {
        f"{name}.experts.{i}.{each}.weight": shape
        for i in range(experts)
        for each, shape in expert.items()
    }
    return found | {f"{name}.gate.weight": (experts, D)}


def qwen_layer(name: str, experts: int) -> Shapes:
    """The experts of Qwen 3, and of all families that use the same names."""
    found = {f"{name}.mlp.gate.weight": (experts, D)}
    for i in range(experts):
        found |= mlp(f"{name}.mlp.experts.{i}", F)
    return found


def qwen2_layer(name: str, experts: int) -> Shapes:
    shared = mlp(f"{name}.mlp.shared_expert", WIDE)
    return qwen_layer(name, experts) | shared | {f"{name}.mlp.shared_expert_gate.weight": (1, D)}


def dots1_layer(name: str, experts: int) -> Shapes:
    shared = mlp(f"{name}.mlp.shared_experts", 2 * F)
    return qwen_layer(name, experts) | shared | {f"{name}.mlp.gate.{BUFFER}": (experts,)}


def deepseek2_layer(name: str, experts: int) -> Shapes:
    return qwen_layer(name, experts) | mlp(f"{name}.mlp.shared_experts", 2 * F)


def granite_layer(name: str, experts: int) -> Shapes:
    name = f"{name}.block_sparse_moe"
    return {
        f"{name}.router.layer.weight": (experts, D),
        f"{name}.input_linear.weight": (experts, 2 * F, D),
        f"{name}.output_linear.weight": (experts, D, F),
    }


LAYERS = {
    "mixtral": mixtral_layer,
    "qwen2_moe": qwen2_layer,
    "qwen3_moe": qwen_layer,
    "dots1": dots1_layer,
    "deepseek_v2": deepseek2_layer,
    "deepseek_v3": dots1_layer,
    "granitemoe": granite_layer,
    "olmoe": qwen_layer,
}


def latent_attention(kind: str, name: str) -> Shapes:
    both = H + TURNED
    found = {
        f"{name}.kv_a_proj_with_mqa.weight": (RANK + TURNED, D),
        f"{name}.kv_a_layernorm.weight": (RANK,),
        f"{name}.kv_b_proj.weight": (N * (H + VALUE), RANK),
        f"{name}.o_proj.weight": (D, N * VALUE),
    }
    if CONFIGS[kind]["q_lora_rank"] is None:
        return found | {f"{name}.q_proj.weight": (N * both, D)}
    return found | {
        f"{name}.q_a_proj.weight": (Q_RANK, D),
        f"{name}.q_a_layernorm.weight": (Q_RANK,),
        f"{name}.q_b_proj.weight": (N * both, Q_RANK),
    }


def attention(kind: str, name: str) -> Shapes:
    if "kv_lora_rank" in CONFIGS[kind]:
        return latent_attention(kind, name)
    sizes = {"q": N * H, "k": K * H, "v": K * H}
    found: Shapes = {f"{name}.{each}_proj.weight": (size, D) for each, size in sizes.items()}
    found[f"{name}.o_proj.weight"] = (D, N * H)
    if kind == "qwen2_moe":
        found |= {f"{name}.{each}_proj.bias": (size,) for each, size in sizes.items()}
    if kind in ("qwen3_moe", "dots1"):
        found |= {f"{name}.{each}_norm.weight": (H,) for each in "qk"}
    if kind == "olmoe":
        found |= {f"{name}.q_norm.weight": (N * H,), f"{name}.k_norm.weight": (K * H,)}
    return found


def shapes(kind: str) -> Shapes:
    """All tensors of a family's tiny model, by their names in files."""
    config = CONFIGS[kind]
    found: Shapes = {"model.embed_tokens.weight": (VOCAB, D)}
    for number in range(config["num_hidden_layers"]):
        name = f"model.layers.{number}"
        found |= {f"{name}.{each}_layernorm.weight": (D,) for each in ("input", "post_attention")}
        found |= attention(kind, f"{name}.self_attn")
        sparse = number in sparse_layers(kind)
        found |= LAYERS[kind](name, experts_of(kind)) if sparse else mlp(f"{name}.mlp", WIDE)
    return found | {"model.norm.weight": (D,), "lm_head.weight": (VOCAB, D)}


def expert_tensors(kind: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The state dict of a family's tiny model."""
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in shapes(kind).items():
        x = 0.1 * rng.normal(size=shape) + name.endswith("norm.weight")
        if name == "model.embed_tokens.weight":
            x = 10 * x + 4 * (np.arange(D) == 0)
        if name.endswith(BUFFER):
            x /= 2  # otherwise some experts would never be chosen
        if name.endswith((".gate.weight", ".router.layer.weight")):
            x[:, 0] = 0
            x[-1] = np.where(np.arange(D) == 0, -1, 0)
        found[name] = x.astype(dtype)
    return found


def fused(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors as a transformers 5 model names them, a layer's experts in two tensors."""
    found, apart = {}, dict[str, list[np.ndarray]]()
    for name, x in tensors.items():
        layer, is_expert, _ = name.partition(".experts.")
        if is_expert:  # in order, each with gate, up and down
            layer = layer.replace("block_sparse_moe", "mlp")
            apart.setdefault(layer, []).append(x)
            continue
        if "linear" not in name and "router" not in name:
            name = name.replace("block_sparse_moe", "mlp")
        for old, new in FUSED.items():
            name = name.replace(old, new)
        found[name] = x
    for layer, parts in apart.items():
        gate, up, down = (np.stack(parts[number::3]) for number in range(3))
        found[f"{layer}.experts.gate_up_proj"] = np.concatenate((gate, up), 1)
        found[f"{layer}.experts.down_proj"] = down
    return found


# Tensors that Granite's files already fuse, by their names in memory.
FUSED = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer.weight": "router.weight",
}


def expert(tensors: Mapping[str, np.ndarray], *, layer: int, number: int) -> list[np.ndarray]:
    """An expert's gate, up and down matrices."""
    whole = fused({name: x for name, x in tensors.items() if f"layers.{layer}." in name})
    gate_up, down = (
        next(x for name, x in whole.items() if name.endswith(f"experts.{each}_proj"))[number]
        for each in ("gate_up", "down")
    )
    return [*np.split(gate_up, 2), down]


def save(program: Program, params: Mapping[str, Any], run_dir: Path) -> None:
    """Writes a run with these parameters."""
    checkpoints = RunCheckpoints(program, RunDir(run_dir), print)
    checkpoints.save(program.states.new(dict(params)), 1, None)
    checkpoints.store.wait()


# ---- transformers in float64 ---------------------------------------------------------------------


def load(folder: Path) -> Any:
    """transformers' model of a directory in float64, with its rotary frequencies in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager).double()
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            theta, size = model.config.rope_parameters["rope_theta"], 2 * len(module.inv_freq)
            exact = theta ** -(torch.arange(0, size, 2).double() / size)
            torch.testing.assert_close(module.inv_freq, exact, rtol=1e-6, atol=0)
            module.inv_freq = exact
    return model.eval()


@contextlib.contextmanager
def without_narrowing() -> Iterator[None]:
    """Keeps float64 where transformers' code converts it to float32.

    Raises AssertionError if an operation still turns float64 into float32.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    def keeps(method: Any) -> Any:
        def kept(x: Any, *args: Any, **named: Any) -> Any:
            wants = (*args, *named.values(), *([torch.float32] if method is widest else []))
            wide = x.dtype == torch.float64 and torch.float32 in wants
            return x if wide else method(x, *args, **named)

        return kept

    def in_own_precision(softmax: Any) -> Any:
        return lambda x, dim=-1, dtype=None: softmax(x, dim=dim)

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            if any(x.dtype == torch.float64 for x in tensors) and isinstance(found, torch.Tensor):
                assert found.dtype != torch.float32, func
            return found

    widest = torch.Tensor.float
    places = {torch.Tensor: ("float", "to", "type"), torch.nn.functional: ("softmax",)}
    before = [(place, name, getattr(place, name)) for place in places for name in places[place]]
    before += [(place, "softmax", place.softmax) for place in (torch, torch.Tensor)]
    try:
        for place, name, usual in before:
            setattr(place, name, (in_own_precision if name == "softmax" else keeps)(usual))
        with Watched():
            yield
    finally:
        for place, name, usual in before:
            setattr(place, name, usual)


def inputs() -> dict[str, np.ndarray]:
    return batch(VOCAB, LENGTH, rows=ROWS)


def computed(
    folder: Path, given: dict[str, np.ndarray]
) -> tuple[float, dict[str, np.ndarray], Any]:
    """Runs transformers: the loss, gradients by their names in files, and experts of each token.

    The experts are sorted indices for each layer with experts and each token, `[L, B T, K]`.
    """
    model, chosen = load(folder), []
    hooks = [
        module.register_forward_hook(lambda _, __, found: chosen.append(found[-1]))
        for module in model.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]
    with without_narrowing():
        loss, _ = loss_and_gradients(model, given)
    for hook in hooks:
        hook.remove()
    experts = np.sort(np.stack([each.numpy() for each in chosen]), -1)
    return loss, in_files(model), experts


def in_files(model: Any) -> dict[str, np.ndarray]:
    """The gradients of a model's parameters, with the names and shapes of its files."""
    import torch
    from safetensors.numpy import load_file

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = load_file(Path(folder) / "model.safetensors")
    return {name: x for name, x in found.items() if not name.endswith(BUFFER)}


# ---- the golden file -----------------------------------------------------------------------------

# Our field -> an attribute of transformers' configurations.
FIELDS = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "moe.ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "moe.num_experts": ("num_experts", "num_local_experts"),
    "moe.top_k": ("num_experts_per_tok",),
    "moe.normalize": ("norm_topk_prob",),
    "moe.every": ("decoder_sparse_step",),
    "moe.dense_layers": ("mlp_only_layers",),
    "moe.shared_ffn_hidden_size": ("shared_expert_intermediate_size",),
    "moe.scale": ("routed_scaling_factor",),
    "moe.num_groups": ("n_group",),
    "moe.top_groups": ("topk_group",),
    "moe.first_dense": ("first_k_dense_replace",),
    "attention_scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_divisor": ("logits_scaling",),
}


def defaults(kind: str) -> dict[str, Any]:
    """Our fields as transformers' config class fills them in for an empty `config.json`."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **REQUIRED.get(kind, {}))
    found = {
        ours: next((getattr(config, name) for name in names if hasattr(config, name)), None)
        for ours, names in FIELDS.items()
    }
    found["rope.theta"] = config.rope_parameters["rope_theta"]
    return {name: x for name, x in found.items() if x is not None}


def write_golden(folders: Mapping[str, Path], path: Path) -> None:
    """Writes each model's defaults, loss, experts, and a summary of every gradient.

    Raises AssertionError if the last expert receives a token, or another one receives none.
    """
    found = []
    for kind, folder in folders.items():
        loss, gradients, experts = computed(folder, inputs())
        counts = counts_of(kind, experts)
        assert (counts[:, -1] == 0).all(), counts
        assert (counts[:, :-1] > 0).all(), counts
        lines = (f"{json.dumps(name)}: {summary(x)}" for name, x in gradients.items())
        found.append(
            f'"{kind}": {{\n"defaults": {json.dumps(defaults(kind))},\n"loss": {loss},\n'
            f'"experts": {experts.tolist()},\n"gradients": {{\n' + ",\n".join(lines) + "\n}}"
        )
    path.write_text("{\n" + ",\n".join(found) + "\n}\n")
