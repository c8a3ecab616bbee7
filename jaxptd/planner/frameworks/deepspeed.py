"""DeepSpeed with a Hugging Face model: its layouts, time, memory and JSON.

Names: `docs/_pages/config-json.md`; `sequence_parallel_size`: `docs/_tutorials/
ulysses-alst-sequence-parallelism.md`; pipelines: `docs/_tutorials/pipeline.md`. What excludes what:
`docs/_tutorials/autotp-training.md` and `ds-sequence.md`, and `deepspeed/runtime/pipe/engine.py`.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from jaxptd.costs.collective import ALL_TO_ALL, REDUCE_SCATTER
from jaxptd.costs.program import Implementation, Parallelism
from jaxptd.planner.cost import Placed, StepDescription
from jaxptd.planner.frameworks.framework import (
    Framework,
    Setup,
    State,
    Workload,
    Written,
    check_decoder,
    divisors,
    final_rate,
    last_step,
)
from jaxptd.planner.programs import AUTOMODEL, BATCH

BUCKET = 5e8  # elements of `reduce_bucket_size` and of `stage3_prefetch_bucket_size`, by default
RING = ("keys and values", "keys and values again", "their gradients")


class DeepSpeed(Framework):
    """DeepSpeed's engine around a Hugging Face model in PyTorch's eager mode."""

    name = "deepspeed"
    title = "DeepSpeed (0.19.6)"
    source = "deepspeedai/DeepSpeed, commit edaa722 of 22 August 2026"
    evidence = "its record is from documentation only: no published row checks it"
    suffix = ".json"
    comment = ""
    sequence_parallel = False
    shards_vocabulary = False
    logit_bytes = 12  # in 16 bits and in float32, and their gradients

    def check(self, workload: Workload) -> None:
        check_decoder(self, workload)

    def tensor_sizes(self, workload: Workload) -> list[int]:
        """AutoTP; not with experts, whose AutoEP cannot be combined with it yet."""
        return [1] if workload.model.moe else super().tensor_sizes(workload)

    def context_sizes(self, workload: Workload, tp: int) -> list[int]:
        """Ulysses: devices take heads in turn with tokens. Not together with AutoTP or AutoEP."""
        model = workload.model
        if model.moe:
            return [1]
        shared = math.gcd(model.num_heads, model.block.num_kv_heads, model.seq_length)
        return [1] if tp > 1 else divisors(math.gcd(shared, workload.gpus))

    def stage_counts(self, workload: Workload, tp: int, cp: int) -> list[int]:
        """Stages of `PipelineModule`, alone; its equal parts have as many layers each."""
        counts = super().stage_counts(workload, tp, cp)
        return [pp for pp in counts if pp == 1 or (tp * cp == 1 and workload.layers % pp == 0)]

    def variants(self, workload: Workload, base: Parallelism) -> Iterator[Parallelism]:
        """ZeRO 0 to 3; with AutoTP up to 2, in a pipeline up to 1 (1F1B). Ulysses takes 3."""
        replicas = base.dp * base.cp
        most = 1 if base.pp > 1 else 2 if base.tp > 1 else 3
        least = 3 if base.cp > 1 else 0
        for zero in range(least, most + 1) if replicas > 1 else [0]:
            yield dataclasses.replace(base, zero=zero)

    def recomputes(self, workload: Workload, parallelism: Parallelism) -> Iterator[list[Setup]]:
        """Nothing, or every layer, as the model's code asks for."""
        full = dataclasses.replace(parallelism, remat="full")
        yield [Setup(parallelism, "none"), Setup(full, "full")]

    # ---- time ----------------------------------------------------------------------------------

    def implementation(self, workload: Workload, parallelism: Parallelism) -> Implementation:
        """PyTorch's eager kernels: each operation of a norm reads and writes its tensor.

        `stream_forward` of `LlamaRMSNorm` of transformers: to float32 (6), square (8), mean (4),
        scale (8), to 16 bits (6), weight (4), and the addition (6): 42. Backward twice that but for
        the addition. `accumulate`: a 16-bit gradient into the float32 sum (10). `logit`: to float32
        (6), log-softmax (12) and its gradient (12), to 16 bits (6), shift (4). AutoTP's all-reduces
        overlap nothing, and every device of it computes the loss of all logits.
        """
        options = workload.model.block
        last = parallelism.zero in (0, 1) and not parallelism.pp > 1
        return dataclasses.replace(
            AUTOMODEL,
            again_all=True,
            name=self.name,
            dropout=workload.model.dropout > 0,
            bias=options.linear_bias == "all",
            rotary=options.positions == "rope",
            accumulate=10,
            gradient=2,
            update=40,
            logit=40 * parallelism.tp,
            tp_under="nothing",
            dp_under="nothing" if last or parallelism.pp > 1 else "backward",
            sends_hidden=False,
            stream_forward=42,
            stream_backward=78,
        )

    def collectives(self, description: StepDescription) -> list[Placed]:
        """ZeRO 2 reduces each layer's gradients in each micro-batch; Ulysses trades heads.

        Ulysses: an all-to-all of queries, keys and values before attention and of its output after
        it, and their gradients; nothing overlaps them. Source: arXiv 2309.14509.
        """
        placed = [e for e in super().collectives(description) if e.name not in RING]
        p = description.parallelism
        if p.zero == 2:
            placed = [e for e in placed if e.kind != REDUCE_SCATTER]
            for stack in description.model.stacks:
                size = description.implementation.gradient * description.layer_parameters(stack)
                reduced = Placed(
                    *("gradients", REDUCE_SCATTER, BATCH, 1, size),
                    *("backward", "layer"),
                    stack=stack.name,
                )
                placed += [reduced] if p.group(BATCH).members > 1 else []
        if p.cp > 1:
            placed += list(_traded(description))
        return placed

    # ---- memory --------------------------------------------------------------------------------

    def state(self, setup: Setup, elements: float, layer: float, shards: int) -> State:
        """16-bit parameters, float32 sums of gradients, float32 master parameters and moments.

        Source: Rajbhandari et al., arXiv 1910.02054, with `grad_accum_dtype` fp32. Buckets are of
        `reduce_bucket_size`, and at stage 3 of parameters that are gathered ahead.
        """
        p = setup.parallelism
        bucket = min(BUCKET, elements)
        parameters = 2 * elements / (shards if p.zero == 3 else 1)
        gradients = 4 * elements / (shards if p.zero >= 2 else 1)
        gathered = 2 * bucket + (2 * (bucket + layer) if p.zero == 3 else 0)
        return State(parameters, gradients, 12 * elements / shards, gathered)

    # ---- words ---------------------------------------------------------------------------------

    def layout_words(self, setup: Setup) -> str:
        p = setup.parallelism
        words = [f"autotp={p.tp}"] if p.tp > 1 else []
        words += [f"sequence_parallel={p.cp}"] if p.cp > 1 else []
        words += [f"autoep={p.expert_devices}"] if p.expert_devices > 1 else []
        words += [f"stages={p.pp}"] if p.pp > 1 else []
        words += [f"data={p.sample_shards}"] if p.sample_shards > 1 else []
        return " ".join([*words, f"ZeRO {p.zero}"])

    def write(self, workload: Workload, setup: Setup) -> Written:
        text = json.dumps(config_of(workload, setup), indent=2) + "\n"
        return Written(text, notes_of(workload, setup))


def _traded(description: StepDescription) -> Iterator[Placed]:
    """All-to-alls of Ulysses; bytes are those that a device sends."""
    p = description.parallelism
    for stack in description.model.stacks:
        tokens = description.tokens(stack)
        columns = sum(2 * part.key_columns for part in stack.parts) + 2 * stack.hidden
        sent = 2.0 * tokens * columns * (p.cp - 1) / p.cp
        again = 2 if p.remat == "full" else 1
        forward = Placed("heads for tokens", ALL_TO_ALL, ("cp",), 2, sent / 2, "forward")
        forward = forward._replace(stack=stack.name)
        yield forward
        yield forward._replace(name="gradients of heads", place="backward", count=2 * again)


def config_of(workload: Workload, setup: Setup) -> dict[str, Any]:
    """The JSON config. `train_batch_size` follows from the other two numbers."""
    p, config = setup.parallelism, workload.config
    optimizer = config.optimizer
    zero: dict[str, Any] = {"stage": p.zero}
    if p.zero >= 2:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if p.zero:
        zero["reduce_scatter"] = True
    written: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": p.micro_batch,
        "gradient_accumulation_steps": p.micro_batches,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "gradient_clipping": optimizer.grad_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.learning_rate,
                "betas": [optimizer.beta1, optimizer.beta2],
                "eps": optimizer.epsilon,
                "weight_decay": optimizer.weight_decay,
            },
        },
    }
    if p.tp > 1:
        written["tensor_parallel"] = {"autotp_size": p.tp}
    if p.cp > 1:
        written["sequence_parallel_size"] = p.cp
    if workload.model.moe:
        written["expert_parallel"] = {"enabled": True, "autoep_size": p.expert_devices}
    if optimizer.decay == "cosine":
        written["scheduler"] = scheduler_of(workload)
    return written


def scheduler_of(workload: Workload) -> dict[str, Any]:
    """Warm-up, then a cosine to the final rate, which DeepSpeed counts as shares."""
    config = workload.config
    final = round(final_rate(config) / config.optimizer.learning_rate, 6)
    params = {
        "total_num_steps": last_step(config),
        "warmup_num_steps": max(1, config.optimizer.warmup(config.train.steps)),
        "warmup_type": "linear",
        "cos_min_ratio": final,
    }
    return {"type": "WarmupCosineLR", "params": params}


def notes_of(workload: Workload, setup: Setup) -> list[str]:
    """Lists what the JSON cannot say: the model and its data are Python code."""
    p, model = setup.parallelism, workload.model
    notes = [
        f"the model ({model.num_layers} layers of {model.hidden_size:,}), its sequences of "
        f"{model.seq_length:,} tokens, data and tokenizer are in your code"
    ]
    if p.remat == "full" and p.pp == 1:
        notes.append("call model.gradient_checkpointing_enable()")
    if p.pp > 1:
        interval = ", activation_checkpoint_interval=1" if p.remat == "full" else ""
        notes.append(f"wrap the layers in PipelineModule(layers, num_stages={p.pp}{interval})")
    if p.cp > 1:
        notes.append(
            "call UlyssesSPAttentionHF.register_with_transformers with "
            f"sequence_parallel_size={p.cp}, and wrap the loader in UlyssesSPDataLoaderAdapter"
        )
    if workload.config.optimizer.decay != "cosine":
        notes.append(f"add a scheduler for optimizer.decay={workload.config.optimizer.decay}")
    return notes
