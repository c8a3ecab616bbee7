"""The interface of a training framework: its layouts, its record of time, its memory, its words.

A framework prices layouts as it runs them and writes them in its own words. Its file has all of it,
with the sources of each fact. Letters: V chunks of the model on a stage, m micro-batches.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from jaxptd.config import Config, ModelConfig, Remat
from jaxptd.costs.program import Implementation, Parallelism
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster
from jaxptd.models.families import architecture_of, family_of
from jaxptd.parts.architecture import Architecture, Stack
from jaxptd.parts.part import Product
from jaxptd.planner.cost import Placed, StepDescription
from jaxptd.planner.programs import published_collectives

# ---- what is planned -----------------------------------------------------------------------------

PINS = (  # fields that mean the same in every framework
    *("layout.tp", "layout.pp", "layout.cp", "layout.ep", "layout.dp"),
    *("layout.virtual_stages", "train.micro_batches", "model.remat"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """A model and its batch, and the devices to train it on.

    Args:
        config: the run's; its own layout is not used.
        cluster: the devices.
        gpus: their number.
        pins: fields with the only value that is tried.
    """

    config: Config
    cluster: Cluster
    gpus: int
    pins: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @functools.cached_property
    def architecture(self) -> Architecture:
        """The parts of the model."""
        return architecture_of(self.model)

    @property
    def layers(self) -> int:
        """Layers of all stacks."""
        return sum(stack.layers for stack in self.architecture.stacks)

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.config.train.global_batch_size

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.architecture.stacks[-1].tokens

    def allows(self, name: str, value: Any) -> bool:
        """True if no pin excludes a field's value."""
        return name not in self.pins or self.pins[name] == value


@dataclasses.dataclass(frozen=True)
class Setup:
    """One layout of a framework.

    Args:
        parallelism: axes, micro-batches, ZeRO, and what backward recomputes, for the cost model.
        recompute: the framework's own word for what backward recomputes, such as `full`.
    """

    parallelism: Parallelism
    recompute: str

    @property
    def chunk_remat(self) -> int:
        """Layers that each chunk of a stage recomputes, where their number is given."""
        return (self.parallelism.remat_layers or 0) // self.parallelism.virtual_stages


class State(NamedTuple):
    """Bytes of a device for parameters, their gradients and the optimizer between two layers.

    gathered: whole parameters and gradients of the layers at work, besides their shards.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float = 0.0


class Written(NamedTuple):
    """A layout in a framework's words.

    text: of the config file or the flags.
    notes: what the user has to fill in or to know, a sentence each.
    """

    text: str
    notes: Sequence[str]


# ---- the interface -------------------------------------------------------------------------------


class Framework(abc.ABC):
    """A training framework.

    Attributes:
        name: as `--print` takes it.
        title: its name and the version that was read.
        source: repository and commit of every name that it prints.
        evidence: which published measurements check its record, in a sentence.
        suffix: of its config files.
        remats: its word for each policy of recomputation that it has.
        comment: what begins a comment in them; empty: they have none.
        sequence_parallel: whether tensor parallelism also shards tokens between matmuls.
        logit_bytes: of a logit on the last stage, forward and backward together.
        shards_vocabulary: whether tensor parallelism shards the table of tokens and the logits.
    """

    name: str
    title: str
    source: str
    evidence: str
    suffix: str
    remats: ClassVar[Mapping[Remat, str]]
    comment: str = "#"
    sequence_parallel: bool = True
    logit_bytes: int
    shards_vocabulary: bool = True

    # ---- what it can do ------------------------------------------------------------------------

    @abc.abstractmethod
    def check(self, workload: Workload) -> None:
        """Raises UserError for a model or an optimizer that it cannot train."""

    def tensor_sizes(self, workload: Workload) -> list[int]:
        """Sizes of tensor parallelism: within a node, and divisors of all that it shards."""
        model = workload.model
        heads = math.gcd(model.num_heads, model.block.num_kv_heads)
        shared = math.gcd(heads, model.mlp_size, model.seq_length, workload.gpus)
        return divisors(shared, workload.cluster.node_size)

    def context_sizes(self, workload: Workload, tp: int) -> list[int]:
        """Sizes of context parallelism, which takes two slices of a sequence per device."""
        slices = workload.model.seq_length // (2 * tp)
        whole = workload.model.seq_length % (2 * tp) == 0
        return [
            cp
            for cp in divisors(workload.gpus // tp, WIDEST)
            if cp == 1 or (whole and slices % cp == 0)
        ]

    def stage_counts(self, workload: Workload, tp: int, cp: int) -> list[int]:
        """Numbers of pipeline stages."""
        return divisors(workload.gpus // (tp * cp), workload.layers)

    def expert_sizes(self, workload: Workload, tp: int, cp: int, dp: int) -> list[int]:
        """Sizes of expert parallelism over the devices that share a stage."""
        moe = workload.model.moe
        return divisors(math.gcd(moe.num_experts, tp * cp * dp)) if moe else [1]

    def expert_slices(self, tp: int) -> int:
        """Devices that share each expert's matrices."""
        return 1

    @abc.abstractmethod
    def variants(self, workload: Workload, base: Parallelism) -> Iterator[Parallelism]:
        """Its chunks and ZeRO stages with these axes; none if it has no such layout."""

    @abc.abstractmethod
    def recomputes(self, workload: Workload, parallelism: Parallelism) -> Iterator[list[Setup]]:
        """Lists of what backward may recompute, each from the fastest to the smallest."""

    # ---- time ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def implementation(self, workload: Workload, parallelism: Parallelism) -> Implementation:
        """Its record for the cost model."""

    def collectives(self, description: StepDescription) -> list[Placed]:
        """All that it sends, except messages between stages."""
        return [
            each
            for each in published_collectives(description)
            if not is_tied(each) or shares_table(description.model)
        ]

    def again(self, setup: Setup) -> float:
        """Share of a layer's matmuls that backward recomputes beyond the cost model's policy."""
        return 0.0

    def passes_held(self, parallelism: Parallelism, stage: int) -> float:
        """Micro-batches whose activations a stage holds: 1F1B, or interleaved 1F1B.

        Source: Narayanan et al., arXiv 2104.04473; for chunks, the warm-up passes of Megatron-LM's
        `schedules.py` and PyTorch's `ScheduleInterleaved1F1B`.
        """
        m, later = parallelism.micro_batches, parallelism.pp - stage - 1
        chunks = parallelism.virtual_stages
        if chunks == 1:
            return min(m, later + 1)
        warm_up = 2 * later + (chunks - 1) * parallelism.pp + 1
        return min(m * chunks, warm_up) / chunks

    # ---- memory --------------------------------------------------------------------------------

    @abc.abstractmethod
    def state(self, setup: Setup, elements: float, layer: float, shards: int) -> State:
        """Bytes of parameters, gradients and optimizer.

        Args:
            setup: the layout.
            elements: parameters of the device's stage, whole over dp.
            layer: those of its largest layer, or of a table outside the layers.
            shards: devices that share a copy of what ZeRO shards.
        """

    def layer_bytes(
        self, description: StepDescription, stack: Stack, remat: Remat, saved: Mapping[Remat, float]
    ) -> float:
        """Bytes that a layer saves for backward of a micro-batch.

        Args:
            description: the step.
            stack: the layer's.
            remat: its policy.
            saved: bytes by policy of this library's layers; see `memory.saved`.
        """
        return saved[remat]

    # ---- words ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def layout_words(self, setup: Setup) -> str:
        """The layout in its words, in one line."""

    @abc.abstractmethod
    def write(self, workload: Workload, setup: Setup) -> Written:
        """The layout as its config file or flags."""


WIDEST = 64  # most devices that share a sequence


def divisors(number: int, most: int | None = None) -> list[int]:
    """Divisors of a number, up to `most`.

    >>> divisors(12, 4)
    [1, 2, 3, 4]
    """
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def is_tied(each: Placed) -> bool:
    """True for the gradient of a table that the first and the last stage share."""
    return each.axes == ("ends",)


def shares_table(model: Architecture) -> bool:
    """True if the head uses the table of tokens."""
    return not any(getattr(end, "own", False) for end in model.behind)


def even_chunks(workload: Workload, pp: int, extra: int = 0) -> list[int]:
    """Numbers of chunks per stage that divide the layers equally.

    Args:
        workload: the model.
        pp: stages.
        extra: layers that embedding and loss count as.
    """
    if (workload.layers + extra) % pp:
        return []
    return divisors((workload.layers + extra) // pp)


def layer_products(description: StepDescription, stack: Stack) -> list[Product]:
    """The matmuls of a layer."""
    work = description.work(stack)
    return [product for part in stack.parts for product in part.products(work)]


# ---- models that all of them can train -----------------------------------------------------------

ACTIVATIONS = {("silu", True): "SwiGLU", ("gelu-tanh", False): "GELU", ("gelu", False): "GELU"}


def check_decoder(framework: Framework, workload: Workload) -> None:
    """Raises UserError for a model that is no plain decoder, or that its flags cannot express."""
    model, options, optimizer = workload.model, workload.model.block, workload.config.optimizer
    title, family = framework.title.split(" (")[0], family_of(model)
    next_tokens = family.has_vocabulary and family.objective is None
    wrong = {
        f"model.family={model.family}": not next_tokens,
        f"model.mlp={model.mlp}": model.mlp != "dense",
        f"model.activation={options.activation} with model.gated={str(options.gated).lower()}": (
            (options.activation, options.gated) not in ACTIVATIONS
        ),
        f"model.positions={options.positions}": options.positions not in ("rope", "learned"),
        "model.linear_bias=all with model.moe": options.linear_bias == "all" and bool(model.moe),
        "rotary positions that yarn stretches between pairs (model.rope.truncate)": bool(
            model.rope and model.rope.truncate is False
        ),
        f"model.norm_order={options.norm_order}": options.norm_order != "pre",
        "model.attention_sinks=true": options.attention_sinks,
        "latent attention (model.latent)": bool(model.latent),
        f"model.mtp.layers={model.ahead}": model.ahead > 0,
        "a window in some layers only (model.window_layers)": not all(model.windowed),
        "heads of several widths (model.head_sizes)": bool(model.head_sizes),
        "rotary positions by layer (model.rope.layers, model.rope.window_theta)": bool(
            model.rope and (model.rope.layers or model.rope.window_theta is not None)
        ),
        "model.causal=false": not options.causal,
        f"model.embedding_scale={options.embedding_scale}": options.embedding_scale != 1,
        f"model.residual_scale={options.residual_scale}": options.residual_scale != 1,
        f"model.logit_divisor={options.logit_divisor}": options.logit_divisor != 1,
        f"model.attention_scale={model.attention_scale}": model.attention_scale is not None,
        f"model.attention_softcap={model.attention_softcap}": model.attention_softcap is not None,
        f"model.logit_softcap={model.logit_softcap}": model.logit_softcap is not None,
        f"model.z_loss={model.z_loss}": model.z_loss != 0,
        f"model.qk_norm={options.qk_norm}": options.qk_norm == "whole",
        f"model.dtype={model.dtype}": model.dtype != "bfloat16",
        f"model.products={model.products}": model.products != "native",
        f"optimizer.name={optimizer.name}": optimizer.name != "adamw",
        f"optimizer.ema_decay={optimizer.ema_decay}": optimizer.ema_decay != 0,
        "optimizer.rates": bool(optimizer.rates),
        "optimizer.frozen": bool(optimizer.frozen),
        "adapters (model.lora)": bool(model.lora),
        "pairs of answers (model.preference)": bool(model.preference),
    }
    for words, bad in wrong.items():
        if bad:
            raise unsupported(framework, f"{words} is not written as a setting of {title}")


def unsupported(framework: Framework, words: str) -> UserError:
    """The error for a config that a framework cannot run, or that is not written for it."""
    return UserError(f"--print {framework.name}: {words}; change that field")


# ---- the learning rate, which frameworks count in different ways ---------------------------------


def final_rate(config: Config) -> float:
    """The learning rate after the decay."""
    optimizer = config.optimizer
    lowest = optimizer.min_learning_rate
    return optimizer.learning_rate / 10 if lowest is None else lowest


def last_step(config: Config) -> int:
    """The step at which the decay ends."""
    return config.optimizer.decay_steps or config.train.steps


def cooldown_steps(config: Config) -> int:
    """Steps of the decay of `wsd`."""
    return config.optimizer.cooldown_steps or max(1, round(last_step(config) / 10))
