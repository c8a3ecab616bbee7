"""PyTorch's steps of `benchmarks/gpu.py`, in a process of their own.

`python -m benchmarks.gpu_torch --case 124m --steps 20` prints one JSON object, as `gpu_jaxptd.py`.

GPT-2 written for speed: bfloat16 autocast over float32 weights, `torch.compile`, scaled dot product
attention by cuDNN or FlashAttention, fused AdamW, the same clipping, batch and vocabulary as ours.
`tests/test_gpu_benchmark.py` holds its loss and gradients against ours.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_cases import CASES, VOCABULARY, Case

WARM_UP = 3
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
DECAY, CLIP = 0.1, 1.0  # as OptimizerConfig's


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x[B, T, D] -> the same."""
        B, T, D = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(B, T, D))
        h = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(h)


class GPT(nn.Module):
    """GPT-2, its output tied to its tokens."""

    def __init__(self, case: Case, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, case.hidden)
        self.positions = nn.Embedding(case.length, case.hidden)
        self.blocks = nn.ModuleList(Block(case.hidden, case.heads) for _ in range(case.layers))
        self.norm = nn.LayerNorm(case.hidden)
        self._initialise(case.layers)

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


def load(model: GPT, params: Mapping[str, np.ndarray]) -> None:
    """Our canonical parameters into the peer's."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(np.array(_ours(name, params))).view_as(p))


def gradients(model: GPT) -> dict[str, np.ndarray]:
    """The peer's, by the peer's names."""
    return {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def _ours(name: str, params: Mapping[str, np.ndarray]) -> np.ndarray:
    """Our array for a parameter of the peer, its output dim first."""
    head, _, kind = name.rpartition(".")
    if head in ("tokens", "positions"):
        return params[f"{head}.table"]
    ours = {"weight": "w", "bias": "b"}[kind]
    if head == "norm":
        return params[f"norm.{ours}"]
    _, number, part = head.split(".")
    place = {"qkv": "attention.qkv", "out": "attention.out", "up": "mlp.up", "down": "mlp.down"}
    x = params[f"blocks.{place.get(part, part)}.{ours}"][int(number)]
    if kind == "bias" or part.endswith("norm"):
        return x.reshape(-1)
    outputs = params[f"blocks.{place[part]}.b"][int(number)].size
    return x.reshape(-1, outputs).T


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and tables decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def run(case: Case, steps: int) -> dict[str, Any]:
    """Trains on one batch, again and again."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    model = GPT(case).to(device)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-4, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model)
    rows = torch.randint(0, VOCABULARY, (case.batch, case.length + 1), device=device)
    seconds, losses = [], []
    for _ in range(WARM_UP + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(BACKENDS, set_priority=True):
            loss = compiled(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds[WARM_UP:],
        "compiling": seconds[0],
        "losses": losses,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "attention": "cudnn or flash",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Times steps of a model on this machine's first GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_torch")
    parser.add_argument("--case", choices=tuple(CASES), required=True)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)
    print(json.dumps(run(CASES[options.case], options.steps)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
