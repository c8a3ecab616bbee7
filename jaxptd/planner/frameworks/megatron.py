"""Megatron-LM: its layouts, time, memory and flags.

Names: `megatron/training/arguments.py`, and the dataclasses from which `argument_utils.py` makes
flags: `megatron/core/transformer/transformer_config.py`, `megatron/core/model_parallel_config.py`,
`megatron/training/config/training_config.py`, `megatron/core/distributed/
distributed_data_parallel_config.py`, `megatron/core/optimizer/optimizer_config.py`.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxptd.config import Remat
from jaxptd.costs.program import Implementation, Parallelism
from jaxptd.planner.frameworks.framework import (
    ACTIVATIONS,
    Framework,
    Setup,
    State,
    Workload,
    Written,
    check_decoder,
    cooldown_steps,
    even_chunks,
    final_rate,
    unsupported,
)
from jaxptd.planner.programs import NEMO

HOST = 8  # most GPUs of a host; a larger domain of NVLink has several hosts
WIDTH = 92  # characters of a line of flags
ENDS = 2  # layers as which embedding and loss count, with the flags --account-for-*


class Megatron(Framework):
    """Megatron-LM's `pretrain_gpt.py` with Transformer Engine."""

    name = "megatron"
    title = "Megatron-LM (0.20.0)"
    source = "NVIDIA/Megatron-LM, commit d98e8a6 of 22 August 2026"
    evidence = (
        "its record is NVIDIA NeMo's with gradients in float32; nine published steps of GPT on 48 "
        "to 6,144 H100s took 1.00 to 1.20 times the seconds predicted with the best micro-batches "
        "and chunks"
    )
    suffix = ".sh"
    remats: ClassVar[Mapping[Remat, str]] = {"none": "none", "full": "full"}
    logit_bytes = 10  # in 16 bits, in float32, and the gradient in float32

    def check(self, workload: Workload) -> None:
        check_decoder(self, workload)
        rope = workload.model.rope
        if rope and rope.scaling not in (None, "llama3"):
            raise unsupported(self, f"model.rope.scaling={rope.scaling} is not written as flags")

    def variants(self, workload: Workload, base: Parallelism) -> Iterator[Parallelism]:
        """1F1B, or interleaved 1F1B whose stages divide the micro-batches; ZeRO 1 if it can."""
        zero = int(base.dp * base.cp > 1)  # --use-distributed-optimizer
        if base.pp == 1:
            yield dataclasses.replace(base, zero=zero)
            return
        for chunks in even_chunks(workload, base.pp, accounted(workload, base.pp)):
            if chunks == 1 or base.micro_batches % base.pp == 0:
                schedule = "1f1b" if chunks == 1 else "interleaved"
                yield dataclasses.replace(base, zero=zero, virtual_stages=chunks, schedule=schedule)

    def recomputes(self, workload: Workload, parallelism: Parallelism) -> Iterator[list[Setup]]:
        """Nothing, or the first layers of each chunk (`--recompute-method block`).

        Recomputing only core attention saves nothing with a fused kernel.
        """
        chunks = parallelism.pp * parallelism.virtual_stages
        extra = accounted(workload, parallelism.pp) if chunks > 1 else 0
        depth = (workload.layers + extra) // chunks
        family = [Setup(parallelism, "none")]
        for layers in range(1, depth + 1):
            first = layers * parallelism.virtual_stages
            both = dataclasses.replace(parallelism, remat="full", remat_layers=first)
            family.append(Setup(both, f"full ({layers} of {depth} layers)"))
        yield family

    def implementation(self, workload: Workload, parallelism: Parallelism) -> Implementation:
        """NeMo's record, which has `--tp-comm-overlap`, with gradients summed in float32.

        Only the interleaved schedule overlaps messages between stages.
        """
        options = workload.model.block
        return dataclasses.replace(
            NEMO,
            name=self.name,
            gradient=4,
            dropout=workload.model.dropout > 0,
            bias=options.linear_bias == "all",
            rotary=options.positions == "rope",
            sends_hidden=parallelism.virtual_stages > 1,
        )

    def state(self, setup: Setup, elements: float, layer: float, shards: int) -> State:
        """16-bit parameters, float32 gradients; sharded master parameters and Adam's moments.

        Source: Megatron-LM's `docs/user-guide/features/dist_optimizer.md`: 6 + 12/d bytes.
        """
        return State(2 * elements, 4 * elements, 12 * elements / shards)

    def layout_words(self, setup: Setup) -> str:
        p = setup.parallelism
        words = [f"TP {p.tp}"] if p.tp > 1 else []
        words += [f"CP {p.cp}"] if p.cp > 1 else []
        words += [f"EP {p.expert_devices}"] if p.expert_devices > 1 else []
        chunks = f" x{p.virtual_stages}" if p.virtual_stages > 1 else ""
        words += [f"PP {p.pp}{chunks}"] if p.pp > 1 else []
        words.append(f"DP {p.sample_shards}")
        return " ".join(words) + (" distributed optimizer" if p.zero else "")

    # ---- flags ---------------------------------------------------------------------------------

    def write(self, workload: Workload, setup: Setup) -> Written:
        node, p = workload.cluster.node_size, setup.parallelism
        processes = min(node, workload.gpus)
        groups = [
            model_flags(workload),
            layout_flags(workload, setup),
            training_flags(workload, setup),
        ]
        lines = [line for group in groups for line in wrapped(group)]
        start = (
            f"torchrun --nproc_per_node {processes} --nnodes {workload.gpus // processes} "
            "pretrain_gpt.py"
        )
        before = ["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if p.tp * p.cp > 1 else []
        text = "\n".join([*before, " \\\n    ".join([start, *lines])]) + "\n"
        notes = [
            "fill in --data-path, --tokenizer-type and --tokenizer-model, which sets the "
            f"vocabulary ({workload.model.vocab_size:,}), --save, --load, and torchrun's rendezvous"
        ]
        if p.tp > 1:
            notes.append("--tp-comm-overlap needs Transformer Engine's user buffers, within a node")
        if node > HOST:
            notes.append("set --nproc_per_node and --nnodes to the GPUs of a host and the hosts")
        return Written(text, notes)


def accounted(workload: Workload, pp: int) -> int:
    """Layers as which the ends of the model count: 0 if the stages divide the layers, else 2."""
    return 0 if workload.layers % pp == 0 else ENDS


def wrapped(flags: Mapping[str, Any]) -> list[str]:
    """Flags in lines of at most `WIDTH` characters.

    >>> wrapped({"--bf16": True, "--num-layers": 32})
    ['--bf16 --num-layers 32']
    """
    lines: list[str] = []
    for name, value in flags.items():
        flag = name if value is True else f"{name} {value}"
        if lines and len(lines[-1]) + 1 + len(flag) <= WIDTH:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    return lines


def model_flags(workload: Workload) -> dict[str, Any]:
    """The sizes and options of the model."""
    model, options = workload.model, workload.model.block
    flags: dict[str, Any] = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.mlp_size,
        "--num-attention-heads": model.num_heads,
        "--kv-channels": options.head_size,
    }
    if options.num_kv_heads != model.num_heads:
        flags |= {"--group-query-attention": True, "--num-query-groups": options.num_kv_heads}
    flags |= {"--seq-length": model.seq_length, "--max-position-embeddings": model.num_positions}
    if model.rope:
        flags |= {"--position-embedding-type": "rope", "--rotary-base": f"{model.rope.theta:.0f}"}
        if model.rope.scaling:
            flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": model.rope.factor}
    if options.norm == "rmsnorm":
        flags["--normalization"] = "RMSNorm"
    flags["--norm-epsilon"] = f"{options.norm_eps:g}"
    switches = {
        "--no-bias-gelu-fusion": options.activation == "gelu",  # the fused one is gelu-tanh
        "--swiglu": ACTIVATIONS[options.activation, options.gated] == "SwiGLU",
        "--disable-bias-linear": options.linear_bias != "all",
        "--add-qkv-bias": options.linear_bias == "qkv",
        "--qk-layernorm": options.qk_norm is True,
        "--untie-embeddings-and-output-weights": not model.tie_embeddings,
    }
    flags |= {name: True for name, on in switches.items() if on}
    if model.window:
        flags["--window-size"] = f"{model.window - 1},0"
    rate = f"{model.dropout:g}"
    return {
        **flags,
        "--attention-dropout": rate,
        "--hidden-dropout": rate,
        **expert_flags(workload),
    }


def expert_flags(workload: Workload) -> Mapping[str, Any]:
    """Experts and their router; none for a dense model."""
    moe = workload.model.moe
    if moe is None:
        return {}
    flags: dict[str, Any] = {
        "--num-experts": moe.num_experts,
        "--moe-router-topk": moe.top_k,
        "--moe-ffn-hidden-size": moe.ffn_hidden_size or workload.model.mlp_size,
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
    }
    if moe.shared_ffn_hidden_size:
        flags["--moe-shared-expert-intermediate-size"] = moe.shared_ffn_hidden_size
    sparse = [int(moe.is_sparse(layer)) for layer in range(workload.model.num_layers)]
    if not all(sparse):
        runs = ((kind, len(list(run))) for kind, run in itertools.groupby(sparse))
        pattern = "+".join(f"[{kind}]*{length}" for kind, length in runs)
        flags["--moe-layer-freq"] = f"'({pattern})'"
    if moe.score == "sigmoid":
        flags["--moe-router-score-function"] = "sigmoid"
    if not moe.normalize and moe.score == "softmax":
        flags["--moe-router-pre-softmax"] = True
    if moe.scale != 1:
        flags["--moe-router-topk-scaling-factor"] = f"{moe.scale:g}"
    if moe.num_groups > 1:
        groups = {"--moe-router-num-groups": moe.num_groups}
        flags |= groups | {"--moe-router-group-topk": moe.top_groups}
    if moe.balance_loss:
        flags["--moe-router-load-balancing-type"] = "seq_aux_loss"
        flags["--moe-aux-loss-coeff"] = f"{moe.balance_loss:g}"
    if moe.z_loss:
        flags["--moe-z-loss-coeff"] = f"{moe.z_loss:g}"
    if moe.bias_rate:
        flags["--moe-router-enable-expert-bias"] = True
        flags["--moe-router-bias-update-rate"] = f"{moe.bias_rate:g}"
    return flags


def layout_flags(workload: Workload, setup: Setup) -> dict[str, Any]:
    """Axes, schedule, overlap and recomputation."""
    p = setup.parallelism
    flags: dict[str, Any] = {
        "--tensor-model-parallel-size": p.tp,
        "--pipeline-model-parallel-size": p.pp,
        "--context-parallel-size": p.cp,
    }
    if workload.model.moe:
        flags |= {
            "--expert-model-parallel-size": p.expert_devices,
            "--expert-tensor-parallel-size": 1,
        }
    if p.virtual_stages > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = p.virtual_stages
    if p.pp > 1 and accounted(workload, p.pp):
        flags["--account-for-embedding-in-pipeline-split"] = True
        flags["--account-for-loss-in-pipeline-split"] = True
    if p.sequence_parallel:
        flags |= {"--sequence-parallel": True, "--tp-comm-overlap": True}
    if p.zero:
        flags |= {"--use-distributed-optimizer": True, "--overlap-param-gather": True}
    if p.sample_shards * p.cp > 1:
        flags["--overlap-grad-reduce"] = True
    if setup.parallelism.remat == "full":
        flags |= {"--recompute-granularity": "full", "--recompute-method": "block"}
        flags["--recompute-num-layers"] = setup.chunk_remat
    return flags


def training_flags(workload: Workload, setup: Setup) -> dict[str, Any]:
    """Batch, precision, kernels and the optimizer."""
    optimizer, steps = workload.config.optimizer, workload.config.train.steps
    cooldown: dict[str, Any] = {}
    if optimizer.decay == "wsd":
        length = cooldown_steps(workload.config)
        cooldown = {"--lr-wsd-decay-style": "linear", "--lr-wsd-decay-iters": length}
    return {
        "--micro-batch-size": setup.parallelism.micro_batch,
        "--global-batch-size": workload.batch,
        "--bf16": True,
        "--transformer-impl": "transformer_engine",
        "--cross-entropy-loss-fusion": True,
        "--train-iters": steps,
        "--lr": f"{optimizer.learning_rate:g}",
        "--min-lr": f"{final_rate(workload.config):g}",
        "--lr-decay-style": {"wsd": "WSD"}.get(optimizer.decay, optimizer.decay),
        **cooldown,
        "--lr-warmup-iters": optimizer.warmup(steps),
        "--lr-decay-iters": optimizer.decay_steps or steps,
        "--weight-decay": f"{optimizer.weight_decay:g}",
        "--adam-beta1": f"{optimizer.beta1:g}",
        "--adam-beta2": f"{optimizer.beta2:g}",
        "--adam-eps": f"{optimizer.epsilon:g}",
        "--clip-grad": f"{optimizer.grad_clip:g}",
    }
