"""The configuration of a run: frozen dataclasses and their checks in words.

Anything wrong raises `UserError`: one line that names the field and the remedy. `command_line.py`
reads them from YAML and options.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jaxptd.config.checks import (
    require_below_one,
    require_divides,
    require_not_empty,
    require_not_negative,
    require_positive,
)
from jaxptd.config.layout_checks import check_layout
from jaxptd.config.processes import ProcessesConfig
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Products = Literal["native", "fp8"]
Remat = Literal["none", "dots", "attention", "full"]
AttentionKind = Literal["auto", "xla", "cudnn"]
Documents = Literal["joined", "apart"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model.

    Args:
        family: the architecture; gpt is GPT-2.
        num_layers: transformer blocks.
        hidden_size: width of the residual stream.
        num_heads: attention heads; they split hidden_size.
        ffn_hidden_size: width inside the MLP; null is 4 * hidden_size.
        seq_length: tokens in a sequence.
        vocab_size: token ids the model knows; null is the tokenizer's.
        vocab_multiple: rows of the token table on each device are a multiple of it, the last ones
            unused; GPUs multiply by matrices of 128's multiples faster.
        dropout: share of values dropped after the embedding, in attention and before each
            residual sum.
        dtype: compute precision; parameters and optimizer are float32 (float64 for float64);
            float16 scales the loss.
        products: precision of a block's four matrix products: native is dtype, fp8 is 8-bit
            numbers with a scale for each tensor.
        tie_embeddings: use the embedding as output layer.
        remat: what backward computes again: none, attention (its core), dots (all but matrix
            products and attention), full (the block).
        remat_layers: only so many layers, the first, compute that again, in a pipeline the first
            of each part of the model; null is all.
        attention: kernel; auto is cudnn where the device and the shapes allow it, else xla.
        scan_layers: one compiled block run num_layers times; false unrolls it (slower to compile,
            can run faster).
    """

    family: Literal["gpt"] = "gpt"
    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    ffn_hidden_size: int | None = None
    seq_length: int = 256
    vocab_size: int | None = None
    vocab_multiple: int = 1
    dropout: float = 0.0
    dtype: Dtype = "float32"
    products: Products = "native"
    tie_embeddings: bool = True
    remat: Remat = "none"
    remat_layers: int | None = None
    attention: AttentionKind = "auto"
    scan_layers: bool = True

    def __post_init__(self) -> None:
        require_positive("model", self, "num_layers", "hidden_size", "num_heads")
        require_positive("model", self, "ffn_hidden_size", "seq_length", "vocab_size")
        require_positive("model", self, "vocab_multiple")
        require_below_one("model", self, "dropout")
        require_not_negative("model", self, "remat_layers")
        if (self.remat_layers or 0) > self.num_layers:
            raise UserError(
                f"model.remat_layers={self.remat_layers} is more than model.num_layers="
                f"{self.num_layers}; use fewer, or null for all"
            )
        require_divides("model.hidden_size", self.hidden_size, "model.num_heads", self.num_heads)
        if self.attention == "cudnn" and self.dropout > 0:
            raise UserError(
                f"model.attention=cudnn has no dropout (model.dropout={self.dropout}); "
                "use model.attention=xla or model.dropout=0"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    def padded_vocab(self, padded: Callable[[int], int]) -> int:
        """Rows of the token table. padded: a size -> in as many equal parts as it is cut into."""
        return self.vocab_multiple * padded(-(-(self.vocab_size or 0) // self.vocab_multiple))

    def remats(self, layers: int) -> tuple[tuple[Remat, int], ...]:
        """What a stack of so many layers computes again: (policy, layers of it), in their order."""
        first = layers if self.remat_layers is None else min(self.remat_layers, layers)
        both: tuple[tuple[Remat, int], ...] = ((self.remat, first), ("none", layers - first))
        return tuple((remat, count) for remat, count in both if count)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus.

    Args:
        source: stdlib (the Python standard library's source text), or paths or globs of text,
            jsonl, nanoGPT .bin, Megatron .bin/.idx.
        tokenizer: bytes, or the path of a tokenizers JSON file (needs the hf extra).
        validation_fraction: share of the corpus, its last part, held out for evaluation.
        documents: joined, or apart: attention never crosses from one document of a sequence into
            another.
    """

    source: str | list[str] = "stdlib"
    tokenizer: str = "bytes"
    validation_fraction: float = 0.05
    documents: Documents = "joined"

    def __post_init__(self) -> None:
        require_below_one("data", self, "validation_fraction")
        require_not_empty("data", self, "tokenizer")
        if not self.source:
            raise UserError("data.source is empty; name stdlib, or paths or globs of files")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate.

    Args:
        learning_rate: its peak, after warm-up.
        warmup_steps: steps of linear warm-up.
        decay: from the peak to a tenth of it over the remaining steps, or constant.
        weight_decay: on matrices; never on norms and biases.
        beta1: decay of the gradient's mean.
        beta2: decay of its square's mean.
        grad_clip: largest global gradient norm; 0 never clips.
        skip_above: a step with a gradient norm above it is skipped; 0 skips only what is not
            finite.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    skip_above: float = 0.0

    def __post_init__(self) -> None:
        require_positive("optimizer", self, "learning_rate")
        require_not_negative("optimizer", self, "warmup_steps", "weight_decay", "grad_clip")
        require_not_negative("optimizer", self, "skip_above")
        require_below_one("optimizer", self, "beta1", "beta2")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run.

    Args:
        steps: optimizer steps in all.
        global_batch_size: sequences a step, over all devices.
        micro_batches: parts each device's batch is run in, one after the other.
        max_skipped: skipped steps in a row that end the run.
        seed: of initial parameters, dropout and the order of the data.
        log_every: steps between log lines; 0 is never.
        eval_every: steps between evaluations; 0 is never.
        eval_batches: global batches an evaluation reads.
        sample_tokens: tokens of text the trained model writes at the end; 0 is none.
        run_dir: where everything the run writes goes.
        platform: auto, or cpu to simulate devices on the CPU.
    """

    steps: int = 1000
    global_batch_size: int = 8
    micro_batches: int = 1
    max_skipped: int = 10
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    sample_tokens: int = 200
    run_dir: str = "runs/default"
    platform: Literal["auto", "cpu"] = "auto"

    def __post_init__(self) -> None:
        require_positive("train", self, "steps", "global_batch_size", "micro_batches")
        require_positive("train", self, "max_skipped", "eval_batches")
        require_not_negative("train", self, "seed", "log_every", "eval_every", "sample_tokens")
        require_not_empty("train", self, "run_dir")
        if self.seed >= 2**32:
            raise UserError(f"train.seed={self.seed} must be below 2**32")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming.

    Args:
        every: steps between checkpoints; 0 is never.
        keep: newest checkpoints kept.
        keep_best: checkpoints with the lowest validation loss kept beyond them.
        asynchronous: the run goes on while a checkpoint is written.
        resume: auto (from the newest good one of run_dir, if any), best (from the one with the
            lowest validation loss; later ones are set aside), never, or the path of a checkpoint.
    """

    every: int = 500
    keep: int = 2
    keep_best: int = 1
    asynchronous: bool = True
    resume: str = "auto"

    def __post_init__(self) -> None:
        require_not_negative("checkpoint", self, "every", "keep_best")
        require_positive("checkpoint", self, "keep")
        require_not_empty("checkpoint", self, "resume")


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. Fields that must fit each other are checked here."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    layout: Layout = dataclasses.field(default_factory=Layout)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    processes: ProcessesConfig = dataclasses.field(default_factory=ProcessesConfig)

    def __post_init__(self) -> None:
        check_layout(self.model, self.layout)
        parts = self.layout.dp * self.train.micro_batches
        if self.train.global_batch_size % parts:
            raise UserError(
                f"train.global_batch_size={self.train.global_batch_size} does not split over "
                f"layout.dp={self.layout.dp} x train.micro_batches={self.train.micro_batches}; "
                f"use a multiple of {parts}"
            )


def from_dict(sections: dict[str, Any]) -> Config:
    """The config with these sections (`{"model": {"num_layers": 4}, ...}`), checked.

    Raises:
        UserError: unknown section or field, or values that do not fit each other.
    """
    types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Config)}
    for name, values in sections.items():
        if name not in types:
            raise UserError(f"unknown section {name}; the sections are {', '.join(types)}")
        if not isinstance(values, dict):
            raise UserError(f"{name}: expected a section of fields, got {values!r}")
        known = {field.name for field in dataclasses.fields(types[name])}
        if unknown := sorted(set(values) - known):
            raise UserError(f"unknown key {name}.{unknown[0]}; see --help for every field")
    return Config(**{name: types[name](**values) for name, values in sections.items()})


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dicts, as in the YAML file."""
    return dataclasses.asdict(config)
