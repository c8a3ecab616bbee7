"""MaxText on GPUs: its layouts, time, memory and YAML.

Names: `src/maxtext/configs/base.yml`; values for GPUs: `src/maxtext/configs/gpu/`. Policies of
recomputation: `get_remat_policy` of `src/maxtext/layers/decoders.py`.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxptd.config import Remat
from jaxptd.costs.program import Implementation, Parallelism
from jaxptd.parts.architecture import Stack
from jaxptd.planner.cost import StepDescription
from jaxptd.planner.frameworks.framework import (
    Framework,
    Setup,
    State,
    Workload,
    Written,
    check_decoder,
    cooldown_steps,
    even_chunks,
    final_rate,
    last_step,
    unsupported,
)
from jaxptd.planner.programs import record_of

# Values of `decoder_block` by family.
BLOCKS = {
    "llama": "llama2",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
}
POLICIES: Mapping[Remat, str] = {"dots": "minimal_with_context", "full": "full"}
AXES = ("tensor", "context", "expert", "fsdp", "pipeline", "data")  # from the fastest links


class MaxText(Framework):
    """MaxText on GPUs, with Transformer Engine's attention."""

    name = "maxtext"
    title = "MaxText"
    source = "AI-Hypercomputer/maxtext, commit e591f30 of 22 August 2026"
    evidence = (
        "twelve published steps of dense models with FSDP on 8 to 2,048 H100s, which recompute "
        "more, took 0.99 to 1.04 times the predicted seconds"
    )
    suffix = ".yml"
    remats: ClassVar[Mapping[Remat, str]] = POLICIES
    logit_bytes = 10  # in 16 bits, in float32, and the gradient in float32

    def check(self, workload: Workload) -> None:
        check_decoder(self, workload)
        model = workload.model
        scaling, decay = model.rope and model.rope.scaling, workload.config.optimizer.decay
        wrong = {
            f"model.family={model.family} is none of {', '.join(BLOCKS)}": (
                model.family not in BLOCKS
            ),
            f"model.rope.scaling={scaling} is not written": scaling is not None,
            f"model.window={model.window} is not written": model.window is not None,
            f"model.dropout={model.dropout} is not written": model.dropout != 0,
            f"optimizer.decay={decay}, but it has cosine and wsd": decay not in ("cosine", "wsd"),
        }
        for words, bad in wrong.items():
            if bad:
                raise unsupported(self, words)

    def stage_counts(self, workload: Workload, tp: int, cp: int) -> list[int]:
        """Stages that divide the layers; none beside context parallelism."""
        counts = super().stage_counts(workload, tp, cp)
        return [pp for pp in counts if pp == 1 or (cp == 1 and workload.layers % pp == 0)]

    def expert_sizes(self, workload: Workload, tp: int, cp: int, dp: int) -> list[int]:
        """An axis of its own, which takes samples as FSDP does; tensor shards experts as well."""
        return super().expert_sizes(workload, 1, 1, dp)

    def expert_slices(self, tp: int) -> int:
        return tp

    def variants(self, workload: Workload, base: Parallelism) -> Iterator[Parallelism]:
        """FSDP over all replicas, or within a node with copies between nodes; or plain copies.

        A pipeline's micro-batches are a multiple of its stages, and repeats divide its layers.
        """
        if base.pp > 1 and base.micro_batches % base.pp:
            return
        shard = workload.cluster.node_size // base.tp
        replicas = base.dp * base.cp
        groups = [0] if replicas > 1 else []
        inner = base.cp * base.expert_devices
        if 1 < shard < replicas and replicas % shard == 0 and shard % inner == 0:
            groups.append(shard)
        for chunks in even_chunks(workload, base.pp) if base.pp > 1 else [1]:
            schedule = "1f1b" if chunks == 1 else "interleaved"
            each = dataclasses.replace(base, virtual_stages=chunks, schedule=schedule)
            sharded = [dataclasses.replace(each, zero=3, zero_group=group) for group in groups]
            for one in [*sharded, each] if base.cp == 1 else sharded:
                if fills_nodes(workload, one):
                    yield one

    def recomputes(self, workload: Workload, parallelism: Parallelism) -> Iterator[list[Setup]]:
        """All but matmuls and attention, or everything."""
        yield [
            Setup(dataclasses.replace(parallelism, remat=remat), word)
            for remat, word in POLICIES.items()
        ]

    # ---- time ----------------------------------------------------------------------------------

    def implementation(self, workload: Workload, parallelism: Parallelism) -> Implementation:
        """The record of `planner.programs` with the policy `minimal_with_context`.

        `cast`: float32 parameters to 16 bits, before they are gathered with FSDP.
        """
        options = workload.model.block
        record = record_of("maxtext", parallelism, "minimal_with_context")
        return dataclasses.replace(
            record,
            gradient=4,
            rotary=options.positions == "rope",
            bias=options.linear_bias == "all",
            cast=0 if parallelism.zero else 6,
        )

    def passes_held(self, parallelism: Parallelism, stage: int) -> float:
        """Micro-batches in a pipeline: all, since backward follows the last forward.

        Each iteration saves a stage's layers, also while a stage waits: m V + pp - 1 of them.
        """
        if parallelism.pp == 1:
            return 1
        chunks = parallelism.virtual_stages
        return parallelism.micro_batches + (parallelism.pp - 1) / chunks

    # ---- memory --------------------------------------------------------------------------------

    def state(self, setup: Setup, elements: float, layer: float, shards: int) -> State:
        """Float32 parameters, gradients and moments in shards; two layers gathered in 16 bits.

        Sums over micro-batches are another float32 copy of the gradients.
        """
        p = setup.parallelism
        shard = elements / shards
        copies = 2 if p.micro_batches > 1 and p.pp == 1 else 1
        gathered = (2 + 2 + 4) * layer if p.zero else 2 * layer
        return State(4 * shard, 4 * copies * shard, 8 * shard, gathered)

    def layer_bytes(
        self, description: StepDescription, stack: Stack, remat: Remat, saved: Mapping[Remat, float]
    ) -> float:
        """Adds the output of the MLP's last matmul, which `minimal_with_context` saves."""
        more = 2 * description.stream(stack) if remat == "dots" else 0
        return saved[remat] + more

    # ---- words ---------------------------------------------------------------------------------

    def layout_words(self, setup: Setup) -> str:
        p = setup.parallelism
        sizes = {name: size for name, size in axes_of(setup).items() if size > 1}
        chunks = f" x{p.virtual_stages}" if p.virtual_stages > 1 else ""
        words = [
            f"{name}={size}{chunks if name == 'pipeline' else ''}" for name, size in sizes.items()
        ]
        return " ".join(reversed(words)) or "one device"

    def write(self, workload: Workload, setup: Setup) -> Written:
        sections = [
            {"base_config": "base.yml", "hardware": "gpu"},
            model_section(workload),
            layout_section(workload, setup),
            training_section(workload, setup),
        ]
        text = "\n".join(
            "".join(f"{key}: {json.dumps(value)}\n" for key, value in section.items())
            for section in sections
        )
        notes = [
            "fill in run_name, base_output_directory, dataset_type and its data, tokenizer_path",
            "run it with python3 -m maxtext.trainers.pre_train.train FILE; XLA_FLAGS that overlap "
            "collectives are in src/maxtext/configs/gpu/a3",
        ]
        return Written(text, notes)


def axes_of(setup: Setup) -> dict[str, int]:
    """Sizes of its axes; with context parallelism, the shards of FSDP include it."""
    p = setup.parallelism
    shards = max(1, p.shards // (p.cp * p.expert_devices)) if p.zero else 1
    sizes = {
        "tensor": p.tp,
        "context": p.cp,
        "expert": p.expert_devices,
        "fsdp": shards,
        "pipeline": p.pp,
    }
    return {**sizes, "data": p.dp // (shards * p.expert_devices)}


def fills_nodes(workload: Workload, parallelism: Parallelism) -> bool:
    """True if the sizes within a node multiply to its devices."""
    links = links_of(workload, Setup(parallelism, ""))
    inside = math.prod(size for name, size in links.items() if name.startswith("ici_"))
    return inside == min(workload.cluster.node_size, workload.gpus)


def links_of(workload: Workload, setup: Setup) -> dict[str, int]:
    """Sizes within a node (`ici`) and between nodes (`dcn`); the fastest axes fill the node."""
    left, links = min(workload.cluster.node_size, workload.gpus), {}
    sizes = axes_of(setup)
    for axis in AXES:
        inside = math.gcd(sizes[axis], left)
        left //= inside
        links[f"ici_{axis}_parallelism"] = inside
        links[f"dcn_{axis}_parallelism"] = sizes[axis] // inside
    return links


def model_section(workload: Workload) -> dict[str, Any]:
    model, options = workload.model, workload.model.block
    section: dict[str, Any] = {
        "decoder_block": BLOCKS[model.family],
        "base_num_decoder_layers": model.num_layers,
        "base_emb_dim": model.hidden_size,
        "base_mlp_dim": model.mlp_size,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": options.num_kv_heads,
        "head_dim": options.head_size,
        "mlp_activations": ["silu", "linear"] if options.gated else ["gelu"],
        "vocab_size": model.vocab_size,
        "normalization_layer_epsilon": options.norm_eps,
        "logits_via_embedding": model.tie_embeddings,
        "enable_dropout": False,
        "max_target_length": model.seq_length,
    }
    if model.rope:
        section["rope_max_timescale"] = int(model.rope.theta)
    if options.linear_bias == "qkv":
        section["attention_bias"] = True
    if options.qk_norm:
        section["use_qk_norm"] = True
    if moe := model.moe:
        section |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "base_moe_mlp_dim": moe.ffn_hidden_size or model.mlp_size,
            "norm_topk_prob": moe.normalize,
            "sparse_matmul": True,
        }
        if all(moe.is_sparse(layer) for layer in range(model.num_layers)):
            section["base_mlp_dim"] = section["base_moe_mlp_dim"]  # as base.yml asks for
    return section


def layout_section(workload: Workload, setup: Setup) -> dict[str, Any]:
    """Axes, batch, and what backward recomputes.

    `per_device_batch_size` is that of one forward pass: of all micro-batches in a pipeline, else of
    one.
    """
    p = setup.parallelism
    links = {name: size for name, size in links_of(workload, setup).items() if size > 1}
    always = {"ici_fsdp_parallelism": 1, "dcn_data_parallelism": 1}  # their defaults are -1
    passes = p.micro_batches if p.pp > 1 else 1
    each = p.micro_batch * p.sample_shards * passes / workload.gpus
    section: dict[str, Any] = {**always, **links, "per_device_batch_size": each}
    if p.pp > 1:
        per_stage = workload.layers // (p.pp * p.virtual_stages)
        section |= {
            "num_layers_per_pipeline_stage": per_stage,
            "num_pipeline_microbatches": p.micro_batches,
            "scan_layers": False,
        }
    else:
        section |= {"gradient_accumulation_steps": p.micro_batches, "scan_layers": True}
    kernel = {"attention": "cudnn_flash_te", "max_segments_per_seq": 32}
    return {**section, "remat_policy": setup.recompute, **kernel}


def training_section(workload: Workload, setup: Setup) -> dict[str, Any]:
    config, optimizer = workload.config, workload.config.optimizer
    warmup = optimizer.warmup(config.train.steps)
    section = {
        "dtype": "bfloat16",
        "weight_dtype": "float32",
        "opt_type": "adamw",
        "steps": config.train.steps,
        "learning_rate": optimizer.learning_rate,
        "lr_schedule_type": optimizer.decay,
        "learning_rate_schedule_steps": last_step(config),
        "warmup_steps_fraction": round(warmup / last_step(config), 6),
        "learning_rate_final_fraction": round(final_rate(config) / optimizer.learning_rate, 6),
        "adam_b1": optimizer.beta1,
        "adam_b2": optimizer.beta2,
        "adam_eps": optimizer.epsilon,
        "adam_weight_decay": optimizer.weight_decay,
        "gradient_clipping_threshold": optimizer.grad_clip,
    }
    if optimizer.decay == "wsd":
        share = round(cooldown_steps(config) / last_step(config), 6)
        section["wsd_decay_steps_fraction"] = share
    return section
