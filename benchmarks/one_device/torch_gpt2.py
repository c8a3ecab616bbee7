"""GPT-2 in PyTorch, written for speed.

`benchmarks/one_device/test_one_device.py` compares its loss and gradients with jaxptd's.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxptd.config import Config, ModelConfig

USES = ("torch",)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x[B, T, D] -> x[B, T, D]."""
        B, T, D = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(B, T, D))
        h = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(h)


class GPT(nn.Module):
    """GPT-2 with the output tied to the token table."""

    def __init__(self, sizes: ModelConfig) -> None:
        super().__init__()
        hidden, blocks = sizes.hidden_size, range(sizes.num_layers)
        self.tokens = nn.Embedding(sizes.vocab_size, hidden)
        self.positions = nn.Embedding(sizes.seq_length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, sizes.num_heads) for _ in blocks)
        self.norm = nn.LayerNorm(hidden)
        self._initialise(sizes.num_layers)

    def _initialise(self, layers: int) -> None:
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.ndim == 2:
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [B, T] -> mean cross-entropy, nats."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(config: Config) -> GPT:
    """The model of a config, with its own initial parameters."""
    return GPT(config.model)


def load(model: GPT, params: Mapping[str, np.ndarray]) -> None:
    """Loads jaxptd's canonical parameters into the peer."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(np.array(_ours(name, params))).view_as(p))


def gradients(model: GPT) -> dict[str, np.ndarray]:
    """The peer's gradients, by the peer's names."""
    return {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def _ours(name: str, params: Mapping[str, np.ndarray]) -> np.ndarray:
    """jaxptd's array for one of the peer's parameters, with the output dim first."""
    head, _, kind = name.rpartition(".")
    if head in ("tokens", "positions"):
        return params[f"{head}.table"]
    ours = {"weight": "w", "bias": "b"}[kind]
    if head == "norm":
        return params[f"norm.{ours}"]
    _, number, module = head.split(".")
    place = {"qkv": "attention.qkv", "out": "attention.out", "up": "mlp.up", "down": "mlp.down"}
    x = params[f"blocks.{place.get(module, module)}.{ours}"][int(number)]
    if kind == "bias" or module.endswith("norm"):
        return x.reshape(-1)
    outputs = params[f"blocks.{place[module]}.b"][int(number)].size
    return x.reshape(-1, outputs).T
