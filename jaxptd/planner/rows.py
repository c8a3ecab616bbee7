"""Measured steps of published programs: sizes of their models, and rows read from CSV files."""

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from jaxptd.costs.program import Dispatch, Parallelism, Remat
from jaxptd.errors import UserError, did_you_mean, quoted, read_small
from jaxptd.hardware import Accelerator, Cluster
from jaxptd.parts.architecture import Architecture, Stack
from jaxptd.parts.attention import AttentionShape
from jaxptd.parts.ends import Embedding, Head
from jaxptd.parts.mlp import MLPShape
from jaxptd.parts.moe import MoEShape
from jaxptd.parts.part import Part
from jaxptd.planner.cost import StepDescription, StepTime, step_time
from jaxptd.planner.programs import (
    MAXTEXT_POLICIES,
    PROGRAMS,
    published_collectives,
    record_of,
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Args:
        num_layers, hidden_size, num_heads, vocab_size, seq_length: the model's.
        num_kv_heads: heads of keys and values; 0: the same as num_heads.
        ffn_hidden_size: hidden units of the MLP; 0: four times the hidden size.
        gated: whether the MLP has a gate, and so a third matrix.
        head_size: units of a head; 0: the hidden size over the heads.
        num_experts: experts of a layer; 0: every layer has an MLP.
        top_k: experts of a token.
        moe_ffn_hidden_size: hidden units of an expert.
        shared_ffn_hidden_size: hidden units of an MLP besides experts, which all tokens pass.
        dense_layers: how many first layers have an MLP instead of experts.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    num_kv_heads: int = 0
    ffn_hidden_size: int = 0
    gated: bool = False
    head_size: int = 0
    num_experts: int = 0
    top_k: int = 0
    moe_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    dense_layers: int = 0

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @cached_property
    def architecture(self) -> Architecture:
        """The parts of the model."""
        D, T, V = self.hidden_size, self.seq_length, self.vocab_size
        head_size = self.head_size or D // self.num_heads
        attention = AttentionShape(
            D, self.num_heads, self.kv_heads, head_size, 1, T, (T,), has_norm=False
        )
        dense = self.dense_layers if self.num_experts else self.num_layers
        layers: dict[str, tuple[int, Part]] = {"blocks": (dense, MLPShape(D, self.ffn, self.gated))}
        if self.num_experts:
            layers["sparse"] = (self.num_layers - dense, self._experts)
        stacks = tuple(
            Stack(name, number, (attention, part), 2)
            for name, (number, part) in layers.items()
            if number
        )
        return Architecture(D, (Embedding(D, V, (T,)),), stacks, (Head(D, V, statistics=2),))

    @property
    def causal_flops(self) -> float:
        """FLOPs of a step per sequence, where a causal mask halves the scores.

        Source: NVIDIA/Megatron-LM, megatron/training/training.py, num_floating_point_operations.
        """
        model, T = self.architecture, self.seq_length
        scores = sum(s.layers * part.score_flops for s in model.stacks for part in s.parts)
        return model.flops - 1.5 * T * scores

    @property
    def _experts(self) -> MoEShape:
        width, D = self.shared_ffn_hidden_size, self.hidden_size
        shared = MLPShape(D, width, self.gated) if width else None
        size = self.moe_ffn_hidden_size or self.ffn
        return MoEShape(D, size, self.gated, self.num_experts, self.top_k, shared)


# ---- rows, read from CSV, every value checked ----------------------------------------------------

TEXTS = ("name", "program", "hardware")
# Columns of models with experts; a file of dense models leaves them out, or empty.
EXPERTS = (
    *("head_size", "num_experts", "top_k", "moe_ffn_hidden_size", "shared_ffn_hidden_size"),
    *("dense_layers", "ep", "expert_tp", "dispatch"),
)
FIELDS = tuple(field.name for field in dataclasses.fields(Shape))
SHAPE = tuple(name for name in FIELDS if name not in EXPERTS)
SPREAD = (
    *("gpus", "global_batch", "micro_batch", "tp", "pp", "cp", "virtual_stages"),
    *("zero", "zero_group", "sequence_parallel", "remat"),
)
COLUMNS = (*TEXTS, *SHAPE, *SPREAD)
SECONDS, RATE = "seconds", "teraflops_per_gpu"  # a row gives one of them
MAY_BE_ZERO = ("num_kv_heads", "ffn_hidden_size", "zero", "zero_group", *EXPERTS)
DISPATCHES = dict.fromkeys(get_args(Dispatch))
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}
REMATS = {
    "selective": "attention",
    **{name: name for name in get_args(Remat)},
    **dict.fromkeys(MAXTEXT_POLICIES, "dots"),
}
ENDS = 2  # parts of the model without a layer, where embedding and loss are parts of their own
MOST_ROWS, LIMIT = 2000, 10**9
FEW = {"num_layers": 10**5, "pp": 10**5, "virtual_stages": 10**5}  # limits that bound run time
SHORTEST = 1e-9  # least seconds, or TFLOP/s


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured step.

    Args:
        name: the row's name.
        program: one of `PROGRAMS`.
        hardware: an accelerator's name.
        shape: the model's.
        parallelism: its layout, whose `experts_over` is what the program calls ep.
        seconds: the step's time, as published.
        policy: MaxText's name of what backward recomputes, if the row has one.
    """

    name: str
    program: str
    hardware: str
    shape: Shape
    parallelism: Parallelism
    seconds: float
    policy: str = ""

    def predict(self, accelerator: Accelerator, **changes: Any) -> StepTime:
        """The step's predicted time on an accelerator; changes: of the program's record."""
        record = record_of(self.program, self.parallelism, self.policy)
        record = dataclasses.replace(record, **changes)
        description = StepDescription(
            self.shape.architecture, self.parallelism, record, Cluster(accelerator)
        )
        return step_time(description, published_collectives(description))

    @property
    def gpus(self) -> int:
        """Devices of the layout."""
        return self.parallelism.gpus

    @property
    def flops(self) -> float:
        """FLOPs of the step, as `paper_flops` counts them."""
        return paper_flops(self.shape, self.parallelism.global_batch)


def paper_flops(shape: Shape, batch: int) -> float:
    """FLOPs of a GPT's step with full recomputation: 96 B T L D^2 (1 + ...).

    With experts, those of the model without recomputation, as publications about them count.
    Source: Narayanan et al., arXiv 2104.04473, equation 3.
    """
    if shape.num_experts:
        return float(batch * shape.causal_flops)
    T, L, D = shape.seq_length, shape.num_layers, shape.hidden_size
    more = 1 + T / (6 * D) + shape.vocab_size / (16 * L * D)
    return 96.0 * batch * T * L * D**2 * more


def read_rows(path: Path) -> list[Row]:
    """Reads rows from a CSV file; lines that begin with # are comments.

    Raises:
        UserError: the file cannot be read, a column is missing or unknown, or a value is wrong.
    """
    text = read_small(path, remedy="name a .csv file of rows")
    lines = [line for line in text.splitlines() if line.strip() and line[0] != "#"]
    if len(lines) > MOST_ROWS:
        raise UserError(f"{path} has more than {MOST_ROWS} rows; use fewer")
    try:
        reader = csv.DictReader(lines, skipinitialspace=True)
        _check_columns(path, reader.fieldnames or ())
        rows = [_row(f"{path} row {number}", cells) for number, cells in enumerate(reader, start=1)]
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: {error}; name a .csv file of rows") from error
    if not rows:
        raise UserError(f"{path} has no rows; write one below the column names")
    return rows


def _check_columns(path: Path, names: Sequence[str]) -> None:
    known = (*COLUMNS, *EXPERTS, SECONDS, RATE)
    for name in names:
        if name not in known:
            remedy = did_you_mean(str(name), known, otherwise="remove it")
            raise UserError(f"{path}: unknown column {quoted(repr(name))}; {remedy}")
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise UserError(f"{path} lacks the column {missing[0]}; it needs {', '.join(COLUMNS)}")
    if (SECONDS in names) == (RATE in names) or len(set(names)) < len(names):
        raise UserError(f"{path}: give each column once, and one of {SECONDS} and {RATE}")


def _row(where: str, cells: Mapping[Any, Any]) -> Row:
    if None in cells or None in cells.values():
        number = len([name for name in cells if name is not None])
        raise UserError(f"{where}: not one value per column; give it {number}")
    values = {name: str(cell).strip() for name, cell in cells.items()}
    _check_choice(where, "program", values["program"], PROGRAMS)
    own = {name: _value(where, name, values[name]) for name in (*SHAPE, *SPREAD)}
    own |= {name: _value(where, name, values[name]) for name in EXPERTS if values.get(name)}
    shape = Shape(**{name: own[name] for name in FIELDS if name in own})
    check_experts(where, shape, own)
    parallelism = Parallelism(**{name: own[name] for name in SPREAD}, **_experts_of(shape, own))
    check_layout(where, shape, parallelism)
    measured = _number(where, SECONDS if SECONDS in values else RATE, values)
    name = quoted(values["name"])
    policy = values["remat"] if values["remat"] in MAXTEXT_POLICIES else ""
    row = Row(name, values["program"], values["hardware"], shape, parallelism, measured, policy)
    if SECONDS in values:
        return row
    return dataclasses.replace(row, seconds=row.flops / (parallelism.gpus * measured * 1e12))


def _experts_of(shape: Shape, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a layout that split experts, which are whole on a device without `expert_tp`."""
    if not shape.num_experts:
        return {}
    return {
        "experts_over": values.get("ep") or 1,
        "expert_tp": values.get("expert_tp") or 1,
        "dispatch": values.get("dispatch", "alltoall"),
    }


def _value(where: str, name: str, text: str) -> Any:
    if name == "dispatch":
        _check_choice(where, name, text, DISPATCHES)
        return text
    if name in ("gated", "sequence_parallel"):
        _check_choice(where, name, text.lower(), TRUTH)
        return TRUTH[text.lower()]
    if name == "remat":
        _check_choice(where, name, text, REMATS)
        return REMATS[text]
    lowest = 0 if name in MAY_BE_ZERO else 1
    try:
        number = int(text)
    except ValueError:
        raise UserError(f"{where}: {name}={quoted(text)}; use a whole number") from None
    limit = FEW.get(name, LIMIT)
    if not lowest <= number < limit:
        raise UserError(f"{where}: {name}={quoted(text)}; use {lowest} to {limit - 1}")
    return number


def _number(where: str, name: str, values: Mapping[str, str]) -> float:
    try:
        number = float(values[name])
    except ValueError:
        raise UserError(f"{where}: {name}={quoted(values[name])}; use a number") from None
    if not SHORTEST <= number < LIMIT:
        words = f"use a number above 0 and below {LIMIT}"
        raise UserError(f"{where}: {name}={quoted(values[name])}; {words}")
    return number


def _check_choice(where: str, name: str, text: str, choices: Mapping[str, Any]) -> None:
    if text not in choices:
        known = ", ".join(filter(None, choices))
        raise UserError(f"{where}: {name}={quoted(text)}; use one of {known}")


def check_experts(where: str, shape: Shape, values: Mapping[str, Any]) -> None:
    """Raises UserError for columns of experts that do not fit each other."""
    over, slices = values.get("ep") or 1, values.get("expert_tp") or 1
    devices = values["gpus"] // values["pp"]
    experts, chosen, dense = shape.num_experts, shape.top_k, shape.dense_layers
    without = [name for name in EXPERTS[1:] if values.get(name) and not experts]
    wrong = {
        f"{without[0] if without else ''} without num_experts": bool(without),
        f"top_k={chosen} with num_experts={experts}": experts and not 1 <= chosen <= experts,
        f"num_experts={experts} does not split over ep={over}": experts % over,
        f"ep={over} and expert_tp={slices} do not divide the {devices} devices of a stage": (
            devices % (over * slices)
        ),
        f"dense_layers={dense} leave no layer with experts": (
            experts and dense >= shape.num_layers
        ),
    }
    for words, bad in wrong.items():
        if bad:
            raise UserError(f"{where}: {words}; correct the row")


def check_layout(where: str, shape: Shape, parallelism: Parallelism) -> None:
    """Raises UserError for a layout that does not divide the devices, the batch or the model."""
    devices = parallelism.tp * parallelism.pp * parallelism.cp
    batch = parallelism.global_batch
    per_step = max(1, parallelism.sample_shards) * parallelism.micro_batch
    wrong = {
        f"gpus={parallelism.gpus} is not a multiple of tp x pp x cp = {devices}": parallelism.gpus
        % devices,
        f"global_batch={batch} is not a multiple of dp x micro_batch = {per_step}": (
            batch % per_step
        ),
        f"num_heads={shape.num_heads} does not split over tp={parallelism.tp}": (
            shape.num_heads % parallelism.tp
        ),
        f"hidden_size={shape.hidden_size} does not split over num_heads={shape.num_heads}": (
            not shape.head_size and shape.hidden_size % shape.num_heads
        ),
        f"num_heads={shape.num_heads} does not split over num_kv_heads={shape.kv_heads}": (
            shape.num_heads % shape.kv_heads
        ),
        f"seq_length={shape.seq_length} does not split over cp={parallelism.cp}": (
            shape.seq_length % parallelism.cp
        ),
        f"num_layers={shape.num_layers} are fewer than pp x virtual_stages": (
            shape.num_layers + ENDS < parallelism.pp * parallelism.virtual_stages
        ),
        f"virtual_stages={parallelism.virtual_stages} without a pipeline": (
            parallelism.pp == 1 and parallelism.virtual_stages > 1
        ),
        f"zero={parallelism.zero} is not a stage": parallelism.zero > 3,
        f"zero_group={parallelism.zero_group} does not divide dp x ep x cp": (
            parallelism.zero_group
            and parallelism.sample_shards * parallelism.cp % parallelism.zero_group
        ),
    }
    for words, bad in wrong.items():
        if bad:
            raise UserError(f"{where}: {words}; correct the row")
