"""Weak scaling of Megatron's table 1: ten models, counted, compiled and predicted.

Parameters are counted in this library's models of `configs/megatron/`. Memory is of this library's
steps, compiled for as many H200s as the paper has A100s. Seconds are predicted of the program that
the paper ran, each row by a fit of four shares to the nine others (`jaxptd plan validate
--held-out`); FLOPs of a step are F = 96 B s l h^2 (1 + s / 6h + V / 16 l h), with all activations
computed again.

Letters, as in the paper: B batch, s tokens in a sequence, l layers, h hidden size, V vocabulary.
Source: Narayanan et al., arXiv 2104.04473, equation 3 and table 1.
"""

import csv
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.lib.measure import gib
from benchmarks.paper.memory import Memory, compiled_memory
from benchmarks.paper.models import parameters
from benchmarks.published.fit import FittedTable, fitted_table, table_1
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import load_config
from jaxptd.compiling import PLUGINS
from jaxptd.config import Config
from jaxptd.hardware import find_accelerator
from jaxptd.plan import plan
from jaxptd.planner.planning import layout_text
from jaxptd.planner.rows import Row
from jaxptd.planner.search.best import Candidate

PATH = Path(__file__).with_name("megatron.csv")
GPU = "a100"
TERA, PETA = 1e12, 1e15
Published = Mapping[str, float]  # column of table 1 -> its value
LAYOUTS = (
    "model",
    "billion parameters",
    "published",
    "GPUs",
    "tp",
    "pp",
    "dp",
    "chunks of a stage",
)
LAYOUTS += ("sequences in a step", "micro-batches")
COMPILED = ("peak GiB", "state GiB", "CPU s to compile")
TIMES = ("model", "GPUs", "seconds, predicted", "by the published rate", "TFLOP/s a GPU, predicted")
TIMES += ("published", "% of peak, predicted", "published", "PFLOP/s in all, predicted")
TIMES += ("published", "error")
INTRODUCTION = """\
Ten GPT models on 32 to 3,072 GPUs. *Parameters* are counted in this library's models. *Predicted*
is the time of the program that the paper ran, Megatron-LM of 2021 on A100s, each row by a fit of
four shares to the nine others; nothing of this library was run or timed. *Published*: table 1 of
Narayanan et al., arXiv 2104.04473, measured by its authors. FLOPs of a step are those of its
equation 3, F = 96 B s l h^2 (1 + s / 6h + V / 16 l h), with all activations computed again; the
published rate and F make the seconds, which the table does not have. Peak is 312 TFLOP/s."""
MEMORY = """\
*Memory* is of one GPU, of this library's step in the same layout, with bfloat16 and all layers
computed again in backward. It is compiled for as many H200s, as a stand-in for A100s: sizes of
arrays are the same, kernels and their workspace may differ. What CUDA and its libraries hold
themselves comes on top. An A100 has 80 GiB. The table publishes no memory."""


@dataclasses.dataclass(frozen=True)
class Model:
    """One row of table 1.

    Args:
        row: sizes, layout and published seconds.
        published: figures of the row.
        seconds: predicted.
        memory: compiled; None: not asked.
    """

    row: Row
    published: Published
    seconds: float
    memory: Memory | None = None

    @functools.cached_property
    def config(self) -> Config:
        return load_config(f"megatron/{self.row.name}")

    @property
    def parameters(self) -> int:
        """Numbers that the model has on one device, without padding."""
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
        return self.row.flops / self.seconds / self.gpus / TERA

    @property
    def percent(self) -> float:
        """Predicted per cent of a GPU's peak."""
        return 100 * self.teraflops * TERA / find_accelerator(GPU).bf16_flops

    @property
    def layout_row(self) -> list[str]:
        """Its row of the table of layouts."""
        parallelism = self.row.parallelism
        sizes = (
            self.gpus,
            parallelism.tp,
            parallelism.pp,
            parallelism.dp,
            parallelism.virtual_stages,
        )
        cells = [
            self.row.name,
            f"{self.parameters / 1e9:,.2f}",
            f"{self.published['params_billion']:,.1f}",
            *(f"{size:,}" for size in sizes),
            f"{parallelism.global_batch:,}",
            f"{self.config.train.micro_batches} x {parallelism.micro_batch}",
        ]
        if self.memory is None:
            return cells
        return [*cells, gib(self.memory.peak), gib(self.memory.state), f"{self.memory.seconds:.0f}"]

    @property
    def time_row(self) -> list[str]:
        """Its row of the table of times."""
        published = self.published
        return [
            self.row.name,
            f"{self.gpus:,}",
            f"{self.seconds:.2f}",
            f"{self.row.seconds:.2f}",
            f"{self.teraflops:.0f}",
            f"{published['teraflops_per_gpu']:.0f}",
            f"{self.percent:.0f}",
            f"{published['percent_of_peak']:.0f}",
            f"{self.petaflops:.1f}",
            f"{published['aggregate_petaflops']:.1f}",
            f"{self.seconds / self.row.seconds - 1:+.1%}",
        ]


@functools.cache
def published() -> Mapping[str, Published]:
    """The figures of table 1 by model, as the paper has them."""
    with PATH.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if line[0] != "#"))
    return {row.pop("name"): {column: float(x) for column, x in row.items()} for row in rows}


def predictions() -> FittedTable:
    """Predicts every row by a fit to the others."""
    return fitted_table(table_1(), find_accelerator(GPU), held_out=True)


def models(found: FittedTable, *, compile_steps: bool) -> list[Model]:
    """The ten models; compile_steps: with memory, about 15 s each."""
    made = []
    for outcome in found.outcomes:
        model = Model(outcome.row, published()[outcome.row.name], outcome.seconds)
        if compile_steps:
            model = dataclasses.replace(model, memory=compiled_memory(model.config))
            print(*model.layout_row, flush=True)
        made.append(model)
    return made


def page(rows: Sequence[Model], found: FittedTable, picture: str = "") -> str:
    """The page of results, in Markdown; picture: a file to show, if any."""
    compiled = all(model.memory for model in rows)
    head = (*LAYOUTS, *COMPILED) if compiled else LAYOUTS
    packages = ("flax", "optax", *PLUGINS.split()) if compiled else ()
    sections = (
        versions(*packages),
        INTRODUCTION,
        MEMORY if compiled else "",
        f"![TFLOP/s of a GPU and PFLOP/s in all, published and predicted]({picture})"
        * bool(picture),
        table([TIMES, *(model.time_row for model in rows)]),
        _errors(found),
        table([head, *(model.layout_row for model in rows)]),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _errors(found: FittedTable) -> str:
    sizes = [abs(error) for error in found.baseline]
    return (
        f"Errors of the seconds: mean {found.mean:.1%}, worst {found.worst:.1%}. A constant "
        "TFLOP/s, the mean of the\nother rows, has "
        f"{sum(sizes) / len(sizes):.1%} and {max(sizes):.1%}."
    )


# ---- planned afresh -----------------------------------------------------------------------------

FRESH = ("h100", "h200")
FRESH_HEAD = ("model", "GPUs", "B", "layout", "micro-batch", "remat", "s/step", "TFLOP/s a GPU")
FRESH_HEAD += ("% of peak", "GiB", "times A100s, published")
FRESH_WORDS = """\
The ten models of Megatron's table 1 on as many H100s and H200s, with its batches: the layout that
`jaxptd plan` finds fastest, of this library's steps. Everything is predicted, nothing was run or
compiled. FLOPs of a step are the paper's F, as if all activations were computed again, so rates
compare with the published ones; steps that keep more execute fewer. Peak is 989.5 TFLOP/s. GiB is
the predicted peak of a GPU; the search leaves 8 % of its memory. *Times A100s*: the published
seconds over the predicted ones. The H100's share of products is from one published row, the H200's
shares, but for its links', are measured on one: count on 6 %."""


@dataclasses.dataclass(frozen=True)
class Fresh:
    """A row of table 1 with the layout that is predicted to be fastest on other GPUs.

    Args:
        row: sizes, GPUs and batch.
        gpu: name of the accelerator.
        best: the layout, its step and its memory.
    """

    row: Row
    gpu: str
    best: Candidate

    @property
    def cells(self) -> list[str]:
        """Its row of the table."""
        config, seconds, gpus = self.best.config, self.best.step.seconds, self.row.parallelism.gpus
        train, layers = config.train, config.model.remat_layers
        rate = self.row.flops / seconds / gpus
        micro_batch = train.global_batch_size // config.layout.dp // train.micro_batches
        return [
            self.row.name,
            f"{gpus:,}",
            f"{train.global_batch_size:,}",
            f"`{layout_text(config)}`",
            f"{train.micro_batches} x {micro_batch}",
            config.model.remat + ("" if layers is None else f" (first {layers})"),
            f"{seconds:.2f}",
            f"{rate / TERA:.0f}",
            f"{100 * rate / find_accelerator(self.gpu).bf16_flops:.0f}",
            f"{self.best.memory.total / 2**30:.1f}",
            f"{self.row.seconds / seconds:.1f}",
        ]


def planned(rows: Sequence[Row], gpu: str) -> list[Fresh]:
    """Plans each row's model for as many GPUs and the same batch; seconds for each."""
    found = []
    for row in rows:
        config = load_config(f"megatron/{row.name}")
        made = plan(config, gpus=row.parallelism.gpus, gpu=gpu, top=1)
        found.append(Fresh(row, gpu, made.best[0]))
        print(gpu, *found[-1].cells, flush=True)
    return found


def fresh_page(found: Mapping[str, Sequence[Fresh]]) -> str:
    """The page of the models planned afresh, in Markdown; found: by accelerator."""
    sections = [versions(), FRESH_WORDS]
    for gpu, rows in found.items():
        sections += [f"## {gpu.upper()}", table([FRESH_HEAD, *(each.cells for each in rows)])]
    return "\n\n".join(sections) + "\n"
