"""Memory of a layer's activations: the formulas of tensor and sequence parallelism, compiled.

`python -m benchmarks.paper --memory`: the published bytes of one layer, this library's formula, and
what one more layer costs in steps compiled for H200s, bfloat16, dropout 0.1. Nothing is run.

Letters, as published: s tokens, b sequences, h hidden size, a heads, t devices.
Source: Korthikanti et al., arXiv 2205.05198, table 2.
"""

import dataclasses
from collections.abc import Sequence

from benchmarks.paper.formulas.growth import Growth, absent, growth
from jaxptd.analysis.memory_report import published_layer
from jaxptd.analysis.report import table, versions
from jaxptd.compiling import PLUGINS
from jaxptd.config import Config, ModelConfig, Remat, TrainConfig
from jaxptd.mesh import Layout

SEQUENCES = 8
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=1024,
    num_heads=16,
    seq_length=1024,
    vocab_size=256,
    dtype="bfloat16",
    dropout=0.1,
)
REMATS: tuple[Remat, ...] = ("none", "full")
# By layout: bytes / (s b h), as published, without scores (which a flash kernel never keeps).
LAYOUTS = {
    Layout(): "34",
    Layout(tp=4): "10 + 24/t",
    Layout(tp=4, sequence_parallel=True): "34/t",
}
HEAD = ("layout", "`remat`", "published, with scores", "published, without", "formula here")
HEAD += ("compiled",)
INTRODUCTION = f"""\
Bytes that one layer keeps for backward on one device, over s b h: {MODEL.hidden_size} hidden, \
{MODEL.num_heads} heads,
{SEQUENCES} sequences of {MODEL.seq_length} tokens, bfloat16, dropout. *Published*: Korthikanti et
al., arXiv 2205.05198, table 2: `34 + 5 a s / h` on one device, `10 + (24 + 5 a s / h) / t` with
tensor parallelism, `(34 + 5 a s / h) / t` with sequence parallelism too, 2 (over t, where the input
is sharded) if all is computed again. The term with a is the scores, which a flash kernel never
keeps; *without* is without it. *Compiled*: temporary memory of steps with 4 layers less that of 2,
halved, less the gradients of a layer, compiled for H200s; nothing was run."""
WORDS = """\
The formula here is the published one less two masks of dropout of one byte a number, since masks
are functions of numbers and computed again. With sequence parallelism backward gathers again what
the two first products take, as Megatron's does; `layout.keep_gathered` would keep it, and
`2 * 2 (1 - 1/t)` more. On one device the compiled step keeps 3 s b h less than the formula; why was
not looked into."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One layout and policy, with what one more layer costs."""

    config: Config
    growth: Growth

    @property
    def cells(self) -> list[str]:
        layout, remat = self.config.layout, self.config.model.remat
        unit = SEQUENCES * MODEL.seq_length * MODEL.hidden_size
        without: Remat = "attention" if remat == "none" else remat
        sizes = (
            published_layer(self.config, remat),
            published_layer(self.config, without),
            self.growth.formula,
            self.growth.kept,
        )
        return [f"`{layout}`", f"`{remat}`", *(f"{(size or 0) / unit:.2f}" for size in sizes)]


def configs() -> list[Config]:
    """Every layout with every policy."""
    return [
        Config(
            dataclasses.replace(MODEL, remat=remat),
            layout,
            train=TrainConfig(global_batch_size=SEQUENCES),
        )
        for layout in LAYOUTS
        for remat in REMATS
    ]


def compiled() -> list[Row]:
    """Compiles every layout with every policy; about 15 s of CPU time a step."""
    rows = []
    for config in configs():
        rows.append(Row(config, growth(config, absent)))
        print(*rows[-1].cells, flush=True)
    return rows


def page(rows: Sequence[Row]) -> str:
    """The page of results, in Markdown."""
    sections = (
        versions("flax", *PLUGINS.split()),
        INTRODUCTION,
        table([HEAD, *(row.cells for row in rows)]),
        WORDS,
    )
    return "\n\n".join(sections) + "\n"
