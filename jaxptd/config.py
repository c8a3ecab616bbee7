"""The configuration of a run: frozen dataclasses and their checks in words.

Anything wrong raises `UserError`: one line that names the field and the remedy. `command_line.py`
reads them from YAML and options.
"""

import dataclasses
import math
from typing import Any, Literal

from jaxptd.checks import (
    divisors,
    require_below_one,
    require_divides,
    require_not_empty,
    require_not_negative,
    require_positive,
)
from jaxptd.errors import UserError
from jaxptd.mesh import Axis, Layout
from jaxptd.world import ProcessesConfig

Dtype = Literal["float32", "bfloat16", "float64"]
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
        dropout: share of values dropped after the embedding, in attention and before each
            residual sum.
        dtype: compute precision; parameters and optimizer are float32 (float64 for float64).
        tie_embeddings: use the embedding as output layer.
        remat: what backward computes again: none, attention (its core), dots (all but matrix
            products and attention), full (the block).
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
    dropout: float = 0.0
    dtype: Dtype = "float32"
    tie_embeddings: bool = True
    remat: Remat = "none"
    attention: AttentionKind = "auto"
    scan_layers: bool = True

    def __post_init__(self) -> None:
        require_positive("model", self, "num_layers", "hidden_size", "num_heads")
        require_positive("model", self, "ffn_hidden_size", "seq_length", "vocab_size")
        require_below_one("model", self, "dropout")
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
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        require_positive("optimizer", self, "learning_rate")
        require_not_negative("optimizer", self, "warmup_steps", "weight_decay", "grad_clip")
        require_below_one("optimizer", self, "beta1", "beta2")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run.

    Args:
        steps: optimizer steps in all.
        global_batch_size: sequences a step, over all devices.
        micro_batches: parts each device's batch is run in, one after the other.
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
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    sample_tokens: int = 200
    run_dir: str = "runs/default"
    platform: Literal["auto", "cpu"] = "auto"

    def __post_init__(self) -> None:
        require_positive(
            "train", self, "steps", "global_batch_size", "micro_batches", "eval_batches"
        )
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
        resume: auto (from the newest good one of run_dir, if any), never, or the path of a
            checkpoint.
    """

    every: int = 500
    keep: int = 2
    resume: str = "auto"

    def __post_init__(self) -> None:
        require_not_negative("checkpoint", self, "every")
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


def check_layout(model: ModelConfig, layout: Layout) -> None:
    """Raises UserError if the model cannot be spread by the layout."""
    require_divides("model.num_heads", model.num_heads, "layout.tp", layout.tp)
    if layout.attention2d == "heads" and model.num_heads % layout.col:
        raise UserError(
            f"model.num_heads={model.num_heads} does not split over layout.col={layout.col}; use a "
            f"size that divides it ({divisors(model.num_heads)}), or layout.attention2d=blocks"
        )
    require_divides("model.ffn_hidden_size", model.mlp_size, "layout.tp", layout.tp)
    _check_sequence(model.seq_length, layout)
    if layout.own_scores and model.attention == "cudnn":
        raise UserError(f"{layout.own_scores} makes its own scores; use model.attention=xla")


def _check_sequence(length: int, layout: Layout) -> None:
    """Raises UserError if a sequence of `length` does not split over the axes that cut it."""
    heads = layout.attention2d == "heads"
    ring, devices = _together(layout, Axis.CP, *((Axis.ROW,) if heads else ()))
    if devices > 1 and layout.ring == "zigzag" and length % (2 * devices):
        raise UserError(
            f"model.seq_length={length} does not split into two chunks for each of "
            f"{ring}={devices}, as layout.ring=zigzag needs; use a multiple of {2 * devices}, or "
            "layout.ring=blockwise"
        )
    inner = Axis.TP if layout.sequence_parallel else Axis.ROW
    unit = math.lcm(layout.row, layout.col) * layout.matmul2d_slices
    if not heads and layout.row * layout.col > 1 and length % unit:
        raise UserError(
            f"model.seq_length={length} does not split into panels of a grid of layout.row="
            f"{layout.row} x layout.col={layout.col}, layout.matmul2d_slices="
            f"{layout.matmul2d_slices}, as layout.attention2d=blocks needs; "
            f"use a multiple of {unit}, or layout.attention2d=heads"
        )
    for axes in ((Axis.CP,), (Axis.CP, inner)):
        require_divides("model.seq_length", length, *_together(layout, *axes))


def _together(layout: Layout, *axes: Axis) -> tuple[str, int]:
    """The name of several axes of a layout, for a message, and how many devices they hold."""
    cut = [axis for axis in axes if layout.sizes[axis] > 1]
    return " x ".join(f"layout.{axis}" for axis in cut), math.prod(layout.sizes[a] for a in cut)


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
