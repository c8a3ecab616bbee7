"""PyTorch's training steps for `benchmarks.one_device`; `trainer.py` runs them.

They use bfloat16 autocast over float32 weights, `torch.compile`, scaled dot product attention by
cuDNN or FlashAttention, and fused AdamW, with jaxptd's clipping, batch and vocabulary. The models
are in `torch_gpt2.py` and `torch_transformers.py`.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.one_device.cases import Case
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.errors import UserError

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
DECAY, CLIP = 0.1, 1.0  # those of OptimizerConfig


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups parameters: matrices and tables decay, vectors do not."""
    split: dict[float, list[nn.Parameter]] = {DECAY: [], 0.0: []}
    for p in model.parameters():
        split[DECAY if p.ndim >= 2 else 0.0].append(p)
    return [{"params": params, "weight_decay": decay} for decay, params in split.items()]


def start(case: Case) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Makes `step` and `facts` of a `trainer.Trainer`.

    Raises:
        UserError: PyTorch finds no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU; install its build for CUDA")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    peer = importlib.import_module(f"benchmarks.one_device.torch_{case.peer}")
    model = peer.make(case.config).to("cuda")
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
        # On its way to the host before the next step starts; `item()` would wait for that as well.
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
            "versions": {name: importlib.import_module(name).__version__ for name in peer.USES},
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "attention": "cudnn or flash",
        }

    return step, facts
