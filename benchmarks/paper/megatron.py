"""Megatron's table 1 (ten models, counted, compiled, predicted, planned) and its process groups.

`python -m benchmarks.paper --weak-scaling [--compile]` counts parameters in this library's models
of `configs/megatron/`. Memory is that of this library's steps, compiled for as many H200s as the
paper has A100s. Seconds are predicted for the program that the paper ran, each row by a fit of four
shares to the nine others (`jaxptd plan validate --held-out`). The FLOPs of a step are F = 96 B s l
h^2 (1 + s / 6h + V / 16 l h), with full recomputation. `--fresh` plans the models for the same
number of H100s and H200s. `python -m benchmarks.paper --groups` compares groups of 16 devices with
the lists in Megatron-LM's documentation.

Letters, as in the paper: B batch, s tokens in a sequence, l layers, h hidden size, V vocabulary.
Source: Narayanan et al., arXiv 2104.04473, section 2.2, equation 3 and table 1; Megatron-LM,
`initialize_model_parallel` in `megatron/core/parallel_state.py`: 16 GPUs, 2 along tensor model
parallel groups, 4 along pipelines.
"""

import csv
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.lib.compiler import PACKAGES, Memory, compiled_memory
from benchmarks.lib.pages import gib, joined, printed
from benchmarks.paper.published import parameters
from benchmarks.published.fit import FittedTable, fitted_table, table_1
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import load_config
from jaxptd.config import Config
from jaxptd.hardware import find_accelerator
from jaxptd.mesh import Layout, rank_groups
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.plan import plan
from jaxptd.planner.planning import layout_text
from jaxptd.planner.rows import Row

PATH = Path(__file__).with_name("megatron.csv")
GPU = "a100"
TERA, PETA = 1e12, 1e15
LAYOUTS = ("model", "billion parameters", "published", "GPUs", "tp", "pp", "dp")
LAYOUTS += ("chunks per stage", "sequences per step", "micro-batches")
COMPILED = ("peak GiB", "state GiB", "CPU s to compile")
TIMES = ("model", "GPUs", "seconds, predicted", "by the published rate")
TIMES += ("TFLOP/s per GPU, predicted", "published", "% of peak, predicted", "published")
TIMES += ("total PFLOP/s, predicted", "published", "error")


@functools.cache
def published() -> Mapping[str, Mapping[str, float]]:
    """The figures of table 1 by model and column, as in the paper."""
    with PATH.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if line[0] != "#"))
    return {row.pop("name"): {column: float(x) for column, x in row.items()} for row in rows}


@dataclasses.dataclass(frozen=True)
class Model:
    """One row of table 1."""

    row: Row  # sizes, layout and published seconds
    seconds: float  # predicted
    memory: Memory | None = None  # compiled, if requested

    @property
    def published(self) -> Mapping[str, float]:
        return published()[self.row.name]

    @functools.cached_property
    def config(self) -> Config:
        return load_config(f"megatron/{self.row.name}")

    @property
    def parameters(self) -> int:
        """The model's parameters, without padding."""
        return parameters(f"megatron/{self.row.name}")

    @property
    def gpus(self) -> int:
        return self.row.parallelism.gpus

    @property
    def petaflops(self) -> float:
        """Predicted PFLOP/s of all GPUs."""
        return self.row.flops / self.seconds / PETA

    @property
    def teraflops(self) -> float:
        """Predicted TFLOP/s of one GPU."""
        return self.petaflops * PETA / TERA / self.gpus

    @property
    def percent(self) -> float:
        """Predicted percentage of a GPU's peak."""
        return 100 * self.teraflops * TERA / find_accelerator(GPU).bf16_flops

    @property
    def layout_row(self) -> list[str]:
        parallelism, memory = self.row.parallelism, self.memory
        axes = parallelism.tp, parallelism.pp, parallelism.dp
        sizes = (self.gpus, *axes, parallelism.virtual_stages)
        billions = f"{self.parameters / 1e9:,.2f}", f"{self.published['params_billion']:,.1f}"
        batch = (
            f"{parallelism.global_batch:,}",
            f"{self.config.train.micro_batches} x {parallelism.micro_batch}",
        )
        cells = [self.row.name, *billions, *(f"{size:,}" for size in sizes), *batch]
        more = [gib(memory.peak), gib(memory.state), f"{memory.seconds:.0f}"] if memory else []
        return cells + more

    @property
    def time_row(self) -> list[str]:
        theirs = self.published
        return [
            *(self.row.name, f"{self.gpus:,}", f"{self.seconds:.2f}", f"{self.row.seconds:.2f}"),
            *(f"{self.teraflops:.0f}", f"{theirs['teraflops_per_gpu']:.0f}"),
            *(f"{self.percent:.0f}", f"{theirs['percent_of_peak']:.0f}"),
            *(f"{self.petaflops:.1f}", f"{theirs['aggregate_petaflops']:.1f}"),
            f"{self.seconds / self.row.seconds - 1:+.1%}",
        ]


def predictions() -> FittedTable:
    """Predicts every row by a fit to the others."""
    return fitted_table(table_1(), find_accelerator(GPU), held_out=True)


def models(found: FittedTable, *, compile_steps: bool) -> list[Model]:
    """The ten models; compile_steps: with memory, which takes about 15 s each."""
    made = [Model(outcome.row, outcome.seconds) for outcome in found.outcomes]
    if not compile_steps:
        return made
    return [dataclasses.replace(each, memory=compiled_memory(each.config)) for each in made]


def weak_scaling(rows: Sequence[Model], found: FittedTable) -> str:
    """The tables of times and of layouts, and the errors of the predictions."""
    compiled = all(model.memory for model in rows)
    baseline = [abs(error) for error in found.baseline]
    constant = f"{sum(baseline) / len(baseline):.1%} and {max(baseline):.1%}"
    errors = f"Errors of the predicted seconds: mean {found.mean:.1%}, worst {found.worst:.1%}. A "
    errors += f"constant TFLOP/s, the mean of the other rows, is off by {constant}."
    return joined(
        versions(*(PACKAGES if compiled else ())),
        table([TIMES, *(model.time_row for model in rows)]),
        errors,
        table([LAYOUTS + COMPILED * compiled, *(model.layout_row for model in rows)]),
    )


# ---- planned afresh -----------------------------------------------------------------------------

FRESH = ("h100", "h200")
FRESH_HEAD = ("model", "GPUs", "B", "layout", "micro-batch", "remat", "s/step", "TFLOP/s per GPU")
FRESH_HEAD += ("% of peak", "GiB", "times A100s, published")


def planned(row: Row, gpu: str) -> list[str]:
    """Plans a row's model for the same number of GPUs and the same batch; returns a table row."""
    gpus = row.parallelism.gpus
    best = plan(load_config(f"megatron/{row.name}"), gpus=gpus, gpu=gpu, top=1).best[0]
    config, seconds = best.config, best.step.seconds
    train, layers = config.train, config.model.remat_layers
    rate = row.flops / seconds / gpus
    micro_batch = train.global_batch_size // config.layout.dp // train.micro_batches
    return [
        *(row.name, f"{gpus:,}", f"{train.global_batch_size:,}", f"`{layout_text(config)}`"),
        f"{train.micro_batches} x {micro_batch}",
        config.model.remat + ("" if layers is None else f" (first {layers})"),
        *(f"{seconds:.2f}", f"{rate / TERA:.0f}"),
        f"{100 * rate / find_accelerator(gpu).bf16_flops:.0f}",
        *(f"{best.memory.total / 2**30:.1f}", f"{row.seconds / seconds:.1f}"),
    ]


def fresh(rows: Sequence[Row]) -> str:
    """The tables of the models, planned from scratch."""
    tables = (
        f"## {gpu.upper()}\n\n{table([FRESH_HEAD, *printed(planned(row, gpu) for row in rows)])}"
        for gpu in FRESH
    )
    return joined(versions(), *tables)


# ---- process groups -----------------------------------------------------------------------------

Groups = list[list[int]]
LAYOUT = Layout(pp=4, dp=2, tp=2)
# Megatron-LM's name and groups, by the name in `jaxptd mesh`.
DOCUMENTED: dict[str, tuple[str, Groups]] = {
    "tp": ("tensor model parallel", [[n, n + 1] for n in range(0, 16, 2)]),
    "pp": ("pipeline model parallel", [[n, n + 4, n + 8, n + 12] for n in range(4)]),
    "dp": ("data parallel", [[n + m, n + m + 2] for n in range(0, 16, 4) for m in (0, 1)]),
    "model": ("model parallel", [[n + m for m in (0, 1, 4, 5, 8, 9, 12, 13)] for n in (0, 2)]),
    "embedding": ("embedding", [[n, n + 12] for n in range(4)]),
    "position_embedding": ("position embedding", [[n] for n in range(4)]),
}
STAGES, CHUNKS, LAYERS = 2, 2, 8


def group_rows() -> Iterator[list[str]]:
    """A row for each kind of group."""
    found = rank_groups(LAYOUT)
    for ours, (name, groups) in DOCUMENTED.items():
        yield [name, str(len(found[ours])), _text(groups), _verdict(groups, found[ours])]


def _text(groups: Groups) -> str:
    return " ".join(f"[{','.join(map(str, group))}]" for group in groups)


def _verdict(documented: Groups, found: Groups) -> str:
    return "the same" if documented == found else _text(found)


def layers_of(stage: int, chunks: int) -> Groups:
    """The layers of each chunk of a stage."""
    name = "1f1b" if chunks == 1 else "interleaved"
    schedule = make_schedule(name, stages=STAGES, micro_batches=STAGES)
    size = LAYERS // schedule.parts
    parts = (schedule.part(stage, chunk) for chunk in range(chunks))
    return [[*range(part * size, (part + 1) * size)] for part in parts]


def formula(stage: int, chunks: int) -> Groups:
    """The same by the published formula: chunk k of stage r starts at k L / V + r L / (p V)."""
    size = LAYERS // (STAGES * chunks)
    begins = (k * LAYERS // chunks + stage * size for k in range(chunks))
    return [[*range(begin, begin + size)] for begin in begins]


def groups() -> str:
    """The tables of process groups and of the stages' layers."""
    parts = [["stage", "schedule", "by the formula", "here"]]
    for kind, chunks in (("plain", 1), ("interleaved", CHUNKS)):
        for stage in range(STAGES):
            wanted = formula(stage, chunks)
            verdict = _verdict(wanted, layers_of(stage, chunks))
            parts.append([str(stage), kind, _text(wanted), verdict])
    return joined(table([["groups", "number", "documented", "here"], *group_rows()]), table(parts))
