"""torchtitan: its layouts, time, memory and TOML.

Names: `torchtitan/config/job_config.py` of v0.2.2, the last release with TOML files. What FSDP2
moves and holds: `torchtitan/models/llama3/infra/parallelize.py`, and PyTorch's `fully_shard`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from jaxptd.config import ModelConfig, Remat
from jaxptd.costs.program import Implementation, Parallelism
from jaxptd.parts.architecture import Stack
from jaxptd.planner.cost import Placed, StepDescription
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
    layer_products,
    unsupported,
)
from jaxptd.planner.programs import AUTOMODEL

EVERY = (4, 3, 2)  # `selective_ac_option` that recomputes every n-th layer
ENDS = 2  # layers as which embedding and loss count, by default


class Flavor(NamedTuple):
    """The sizes of a flavor.

    Args: layers, hidden, heads, kv_heads, ffn, vocabulary; tied: one table for both ends; experts,
        chosen, expert_ffn: of each layer.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    expert_ffn: int = 0


# `torchtitan/models/llama3/__init__.py` and `torchtitan/models/qwen3/__init__.py` of v0.2.2; hidden
# units of Llama follow from `ffn_dim_multiplier` and `multiple_of`.
FLAVORS: Mapping[tuple[str, str], Flavor] = {
    ("llama3", "8B"): Flavor(32, 4096, 32, 8, 14336, 128256),
    ("llama3", "70B"): Flavor(80, 8192, 64, 8, 28672, 128256),
    ("llama3", "405B"): Flavor(126, 16384, 128, 8, 53248, 128256),
    ("qwen3", "0.6B"): Flavor(28, 1024, 16, 8, 3072, 151936, tied=True),
    ("qwen3", "1.7B"): Flavor(28, 2048, 16, 8, 6144, 151936, tied=True),
    ("qwen3", "4B"): Flavor(36, 2560, 32, 8, 9728, 151936, tied=True),
    ("qwen3", "8B"): Flavor(36, 4096, 32, 8, 12288, 151936),
    ("qwen3", "14B"): Flavor(40, 5120, 40, 8, 17408, 151936),
    ("qwen3", "32B"): Flavor(64, 5120, 64, 8, 25600, 151936),
    ("qwen3", "30B-A3B"): Flavor(
        48, 2048, 32, 4, 6144, 151936, experts=128, chosen=8, expert_ffn=768
    ),
    ("qwen3", "235B-A22B"): Flavor(
        94, 4096, 64, 4, 12288, 151936, experts=128, chosen=8, expert_ffn=1536
    ),
}
HEAD = 128  # head size of all of them
MODELS = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3"}


class Torchtitan(Framework):
    """torchtitan with FSDP2, `torch.compile` and float32 master parameters."""

    name = "torchtitan"
    title = "torchtitan (0.2.2)"
    source = "pytorch/torchtitan, tag v0.2.2 (73a0e69) of 20 February 2026"
    evidence = (
        "its record is from documentation; four published steps, on H100s of 500 W with slower "
        "memory, took 1.24 to 1.36 times the seconds predicted here for 700 W"
    )
    suffix = ".toml"
    remats: ClassVar[Mapping[Remat, str]] = {"none": "none", "dots": "selective op", "full": "full"}
    logit_bytes = 12  # in 16 bits and in float32, and their gradients

    def check(self, workload: Workload) -> None:
        check_decoder(self, workload)
        model = workload.model
        wrong = {
            f"model.family={model.family} is none of {', '.join(MODELS)}": (
                model.family not in MODELS
            ),
            f"model.dropout={model.dropout}, but its models have none": model.dropout != 0,
            f"model.window={model.window}, but these models have none": model.window is not None,
        }
        for words, bad in wrong.items():
            if bad:
                raise unsupported(self, words)

    def stage_counts(self, workload: Workload, tp: int, cp: int) -> list[int]:
        """Numbers of stages; only llama3 has a `pipelining_fn`, for a head with its own table."""
        model = workload.model
        if MODELS[model.family] != "llama3" or model.tie_embeddings:
            return [1]
        return super().stage_counts(workload, tp, cp)

    def expert_sizes(self, workload: Workload, tp: int, cp: int, dp: int) -> list[int]:
        """With `expert_tensor_parallel_degree` 1, all of tp and some of the shards."""
        sizes = super().expert_sizes(workload, tp, cp, dp)
        return [ep for ep in sizes if ep == 1 or ep % tp == 0]

    def variants(self, workload: Workload, base: Parallelism) -> Iterator[Parallelism]:
        """FSDP over all replicas, or HSDP: a shard per node and copies between nodes.

        In a pipeline parameters stay gathered during a step, and gradients are reduced once: the
        traffic of ZeRO 2. HSDP is tried with one micro-batch and no pipeline.
        """
        replicas = base.dp * base.cp
        if replicas == 1 and workload.gpus > 1:
            return  # without FSDP nothing casts parameters to 16 bits
        if base.pp > 1:
            for chunks in even_chunks(workload, base.pp, accounted(workload, base.pp)):
                if base.micro_batches % base.pp == 0 and chunks in (1, 2, 3, 4, 5, 6, 8, 10):
                    schedule = "1f1b" if chunks == 1 else "interleaved"
                    yield dataclasses.replace(
                        base, zero=2, virtual_stages=chunks, schedule=schedule
                    )
            return
        yield dataclasses.replace(base, zero=3 if replicas > 1 else 0)
        shard = workload.cluster.node_size // base.tp
        parts = 1 < shard < replicas and replicas % shard == 0 and shard % base.cp == 0
        if parts and base.micro_batches == 1 and shard * base.tp >= base.expert_devices:
            yield dataclasses.replace(base, zero=3, zero_group=shard)

    def recomputes(self, workload: Workload, parallelism: Parallelism) -> Iterator[list[Setup]]:
        """Nothing; every n-th layer, or all; or all but every second matmul and attention (`op`).

        The cost model's `dots` stands for `op`.
        """
        depth = (workload.layers + accounted(workload, parallelism.pp)) // parallelism.pp
        family = [Setup(parallelism, "none")]
        for every in EVERY:
            if depth >= every:
                some = dataclasses.replace(parallelism, remat="full", remat_layers=depth // every)
                family.append(Setup(some, f"selective {every}"))
        family.append(Setup(dataclasses.replace(parallelism, remat="full"), "full"))
        yield family
        yield [Setup(dataclasses.replace(parallelism, remat="dots"), "selective op")]

    # ---- time ----------------------------------------------------------------------------------

    def implementation(self, workload: Workload, parallelism: Parallelism) -> Implementation:
        """NeMo's kernels without overlap inside tensor parallelism, and Automodel's of experts.

        `cast`: gathered parameters are copied out of the buffer (2 read, 2 written). `accumulate`:
        a 16-bit gradient is copied into the float32 buffer that is reduced (6), or in a pipeline
        added to the float32 sum (10). `update`: AdamW and clipping of float32 shards (40). `logit`:
        the compiled loss reads 16 bits three times and writes its gradient in two precisions (12);
        sharded over tp it is not compiled (40).
        """
        options = workload.model.block
        pipeline = parallelism.pp > 1
        return dataclasses.replace(
            AUTOMODEL,
            again_all=True,
            name=self.name,
            rotary=options.positions == "rope",
            bias=options.linear_bias == "all",
            accumulate=10 if pipeline else 6,
            gradient=4,
            update=40,
            logit=40 if parallelism.tp > 1 else 12,
            cast=0 if pipeline or not parallelism.zero else 4,
            tp_under="nothing",
            dp_under="nothing" if pipeline else "backward",
            sends_hidden=False,
        )

    def collectives(self, description: StepDescription) -> list[Placed]:
        """Inputs of column-parallel matmuls stay gathered for weight gradients.

        With `op` they are gathered once more, to recompute every second matmul.
        """
        placed = super().collectives(description)
        again = [e for e in placed if e.name == "gathers again for weights"]
        others = [e for e in placed if e.name != "gathers again for weights"]
        if description.parallelism.remat != "dots":
            return others
        return [*others, *(e._replace(name="gathers forward again", remat="dots") for e in again)]

    def again(self, setup: Setup) -> float:
        return 0.5 if setup.parallelism.remat == "dots" else 0.0

    # ---- memory --------------------------------------------------------------------------------

    def state(self, setup: Setup, elements: float, layer: float, shards: int) -> State:
        """Float32 parameters, gradients and moments in shards; whole ones of the layers at work.

        Gathered are, in 16 bits, two layers and the gradient of one, which is reduced in float32.
        In a pipeline every parameter is, with a float32 sum of its gradient.
        """
        p = setup.parallelism
        shard = elements / shards
        whole = 6 * elements if p.pp > 1 else (2 + 2 + 2 + 4) * layer
        return State(4 * shard, 4 * shard, 8 * shard, whole if p.zero else 2 * elements)

    def layer_bytes(
        self, description: StepDescription, stack: Stack, remat: Remat, saved: Mapping[Remat, float]
    ) -> float:
        """Adds gathered inputs of matmuls, and counts what `op` saves.

        That is the layer's input, attention's output, and every second matmul's output.
        """
        p, tokens = description.parallelism, description.tokens(stack)
        if remat == "none" and p.sequence_parallel:
            return saved["none"] + len(stack.parts) * 2 * tokens * stack.hidden * (1 - 1 / p.tp)
        if remat != "dots":
            return saved[remat]
        outputs = sum(2 * each.T * each.N for each in layer_products(description, stack))
        attention = saved["none"] - saved["attention"]  # with the logsumexp
        return saved["full"] + attention + outputs / 2

    # ---- words ---------------------------------------------------------------------------------

    def layout_words(self, setup: Setup) -> str:
        p, degrees = setup.parallelism, degrees_of(setup)
        words = [f"{name}={size}" for name, size in degrees.items() if size > 1]
        if p.pp > 1:
            chunks = f" x{p.virtual_stages}" if p.virtual_stages > 1 else ""
            words.append(SCHEDULES[p.schedule] + chunks)
        return " ".join(words) or "one device"

    def write(self, workload: Workload, setup: Setup) -> Written:
        sections = {
            "model": model_section(workload.model),
            "optimizer": optimizer_section(workload),
            "lr_scheduler": schedule_section(workload),
            "training": training_section(workload, setup),
            "parallelism": parallelism_section(workload, setup),
            "activation_checkpoint": recompute_section(setup),
            "compile": {"enable": True, "components": ["model", "loss"]},
        }
        text = "\n".join(
            "\n".join([f"[{name}]", *(f"{key} = {toml(v)}" for key, v in section.items())]) + "\n"
            for name, section in sections.items()
        )
        notes = ["fill in model.hf_assets_path, training.dataset and the section [checkpoint]"]
        name = MODELS[workload.model.family]
        if flavor_of(workload.model) is None:
            notes.append(
                f"no flavor of {name} has these sizes: add one to "
                f"torchtitan/models/{name}/__init__.py and name it in model.flavor"
            )
        if workload.model.rope and workload.model.rope.scaling is None and name == "llama3":
            notes.append("flavors of llama3 scale rotary positions as Llama 3.1 does")
        notes.append("the main branch (seen on 21 August 2026) takes configs in Python instead")
        return Written(text, notes)


SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


def accounted(workload: Workload, pp: int) -> int:
    """Layers as which the ends of the model count: 0 if the stages divide the layers, else 2."""
    return 0 if workload.layers % pp == 0 else ENDS


def degrees_of(setup: Setup) -> dict[str, int]:
    """Sizes of its axes; dp_shard excludes cp, over which FSDP shards as well."""
    p = setup.parallelism
    shards = (p.zero_group or p.sample_shards * p.cp) // p.cp
    return {
        "dp_replicate": p.sample_shards // shards,
        "dp_shard": shards,
        "cp": p.cp,
        "tp": p.tp,
        "pp": p.pp,
        "ep": p.expert_devices,
    }


def flavor_of(model: ModelConfig) -> str | None:
    """The name of the flavor with a model's sizes, or None."""
    moe = model.moe
    experts = (moe.num_experts, moe.top_k, moe.ffn_hidden_size or 0) if moe else (0, 0, 0)
    own = Flavor(
        model.num_layers,
        model.hidden_size,
        model.num_heads,
        model.block.num_kv_heads,
        model.mlp_size,
        model.vocab_size or 0,
        model.tie_embeddings,
        *experts,
    )
    for (name, flavor), sizes in FLAVORS.items():
        if name == MODELS[model.family] and sizes == own and model.block.head_size == HEAD:
            return flavor
    return None


# ---- sections of the file ------------------------------------------------------------------------

Section = dict[str, Any]


def toml(value: Any) -> str:
    """A value as TOML.

    >>> toml(True), toml(0.001), toml("a"), toml(["a", "b"])
    ('true', '0.001', '"a"', '["a", "b"]')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return repr(value)


def model_section(model: ModelConfig) -> Section:
    return {"name": MODELS[model.family], "flavor": flavor_of(model) or "your flavor"}


def optimizer_section(workload: Workload) -> Section:
    optimizer = workload.config.optimizer
    return {
        "name": "AdamW",
        "lr": optimizer.learning_rate,
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
    }


def schedule_section(workload: Workload) -> Section:
    """Warm-up and decay; the decay is a share of the steps, none for all after warm-up."""
    config = workload.config
    optimizer = config.optimizer
    warmup = optimizer.warmup(config.train.steps)
    section: Section = {"warmup_steps": warmup, "total_steps": last_step(config)}
    if optimizer.decay == "constant":
        return {**section, "decay_ratio": 0.0}
    if optimizer.decay == "wsd":
        section["decay_ratio"] = round(cooldown_steps(config) / last_step(config), 6)
    section["decay_type"] = "cosine" if optimizer.decay == "cosine" else "linear"
    return {
        **section,
        "min_lr_factor": round(final_rate(config) / optimizer.learning_rate, 6),
    }


def training_section(workload: Workload, setup: Setup) -> Section:
    """Batches: in a pipeline a local batch is all micro-batches of a step."""
    p, config = setup.parallelism, workload.config
    local = p.micro_batch * (p.micro_batches if p.pp > 1 else 1)
    return {
        "local_batch_size": local,
        "global_batch_size": workload.batch,
        "seq_len": workload.model.seq_length,
        "max_norm": config.optimizer.grad_clip,
        "steps": config.train.steps,
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    }


def parallelism_section(workload: Workload, setup: Setup) -> Section:
    p, degrees = setup.parallelism, degrees_of(setup)
    section: Section = {
        "data_parallel_replicate_degree": degrees["dp_replicate"],
        "data_parallel_shard_degree": degrees["dp_shard"],
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": p.tp,
        "context_parallel_degree": p.cp,
        "pipeline_parallel_degree": p.pp,
    }
    if p.pp > 1:
        extra = accounted(workload, p.pp)
        section |= {
            "pipeline_parallel_schedule": SCHEDULES[p.schedule],
            "pipeline_parallel_layers_per_stage": (
                (workload.layers + extra) // (p.pp * p.virtual_stages)
            ),
            "pipeline_parallel_first_stage_less_layers": extra // 2,
            "pipeline_parallel_last_stage_less_layers": extra // 2,
            "pipeline_parallel_microbatch_size": p.micro_batch,
        }
    if workload.model.moe:
        section |= {"expert_parallel_degree": p.expert_devices, "expert_tensor_parallel_degree": 1}
    return section


def recompute_section(setup: Setup) -> Section:
    mode, _, option = setup.recompute.partition(" ")
    return {"mode": mode, "selective_ac_option": option} if option else {"mode": mode}
