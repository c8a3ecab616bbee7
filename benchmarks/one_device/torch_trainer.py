"""PyTorch's steps of `benchmarks.one_device`; run by `trainer.py`.

GPT-2 written for speed: bfloat16 autocast over float32 weights, `torch.compile`, scaled dot product
attention by cuDNN or FlashAttention, fused AdamW, with jaxptd's clipping, batch and vocabulary.
`benchmarks/one_device/test_one_device.py` compares its loss and gradients with jaxptd's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.one_device.cases import VOCABULARY, Case
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.errors import UserError

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
DECAY, CLIP = 0.1, 1.0  # those of OptimizerConfig


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
    """Loads jaxptd's canonical parameters into the peer."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(np.array(_ours(name, params))).view_as(p))


def gradients(model: GPT) -> dict[str, np.ndarray]:
    """The peer's gradients, by the peer's names."""
    return {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def _ours(name: str, params: Mapping[str, np.ndarray]) -> np.ndarray:
    """jaxptd's array for a parameter of the peer, its output dim first."""
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


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups parameters: matrices and tables decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def start(case: Case) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Makes the step and the facts of `trainer.Trainer`.

    Raises:
        UserError: PyTorch finds no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU; install its build for CUDA")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = GPT(case).to("cuda")
    optimizer = torch.optim.AdamW(groups(model), lr=1e-4, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model)
    batch = random_batch(case.config)
    ids = {n: torch.from_numpy(x.astype(np.int64)).to("cuda") for n, x in batch.items()}

    def step() -> Callable[[], float]:
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(BACKENDS, set_priority=True):
            loss = compiled(ids["tokens"], ids["targets"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # On its way to the host before the next step starts; `item()` would wait for that, too.
        found = torch.empty((), pin_memory=True)
        found.copy_(loss.detach(), non_blocking=True)
        (end := torch.cuda.Event()).record()

        def wait() -> float:
            end.synchronize()
            return found.item()

        return wait

    def facts() -> dict[str, Any]:
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__},
            "attention": "cudnn or flash",
        }

    return step, facts
