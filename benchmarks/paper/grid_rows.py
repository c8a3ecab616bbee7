"""Layouts of table 2 and figures 7, 11 and 12 of Zhu and Dong, compiled: memory of one GPU.

Nothing is run. Models are the four of its table 3, with eight sequences of 512 tokens a GPU, as
table 2 has them. The paper does not say what its program keeps for backward, so every row is
compiled with several remat policies.
Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, sections 3.2, 3.3 and 3.5.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.grid.gpu import laid_out
from benchmarks.paper.memory import Memory, compiled_memory
from benchmarks.paper.models import parameters
from jaxptd.analysis.report import table
from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, Remat
from jaxptd.hardware import Accelerator, find_accelerator
from jaxptd.mesh import Layout

GPU = Path(__file__).with_name("rtx4090.yaml")
SEQUENCES = 8  # a GPU: 32 on 4 and 64 on 8
REMATS: tuple[Remat, ...] = ("full", "dots", "none")
# By name of a packaged config, the model of table 3.
MODELS = {"gpt2-0.54b": "0.54 B", "gpt2-2.5b": "2.50 B", "gpt2-4.2b": "4.20 B"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One layout of a model.

    Args:
        name: of the layout in the paper.
        model: the packaged config.
        layout: over its GPUs.
    """

    name: str
    model: str
    layout: Layout

    @property
    def gpus(self) -> int:
        return self.layout.num_devices

    @property
    def sequences(self) -> int:
        """Sequences in a step."""
        return SEQUENCES * self.gpus

    def config(self, remat: Remat = "dots") -> Config:
        """Its config, with fewer and wider heads where tp does not divide them."""
        config = laid_out(load_config(self.model), self.layout)
        train = dataclasses.replace(config.train, global_batch_size=self.sequences)
        model = dataclasses.replace(config.model, remat=remat)
        return dataclasses.replace(config, model=model, train=train)

    @property
    def parameters(self) -> int:
        """Numbers of the model on one device."""
        return parameters(self.model)


TABLE_2 = (
    Row("DP=4", "gpt2-2.5b", Layout(dp=4)),
    Row("TP=2, DP=2", "gpt2-2.5b", Layout(dp=2, tp=2)),
    Row("TP=4", "gpt2-2.5b", Layout(tp=4)),
    Row("TP2D=4", "gpt2-2.5b", Layout(row=2, col=2)),
    Row("TP=8", "gpt2-2.5b", Layout(tp=8)),
    Row("TP2D=4, DP=2", "gpt2-2.5b", Layout(dp=2, row=2, col=2)),
)
FIGURE_7 = (
    Row("one GPU", "gpt2-0.54b", Layout()),
    Row("TP + DP", "gpt2-2.5b", Layout(dp=2, tp=2)),
    Row("TP", "gpt2-2.5b", Layout(tp=4)),
    Row("TP2D", "gpt2-2.5b", Layout(row=2, col=2)),
    Row("TP + DP", "gpt2-4.2b", Layout(dp=2, tp=4)),
    Row("TP", "gpt2-4.2b", Layout(tp=8)),
    Row("TP2D", "gpt2-4.2b", Layout(dp=2, row=2, col=2)),
)
FIGURE_11 = (Row("TP", "gpt2-2.5b", Layout(tp=4)), Row("TP2D", "gpt2-2.5b", Layout(row=2, col=2)))


@dataclasses.dataclass(frozen=True)
class Found:
    """A row with the memory of its compiled steps, by remat policy."""

    row: Row
    memory: Mapping[Remat, Memory]

    @property
    def fitting(self) -> list[Remat]:
        """Policies whose peak a GPU of the paper can hold."""
        return [remat for remat, each in self.memory.items() if each.fits(gpu().hbm_bytes)]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a page's table: its head, and its cell in the row of a layout."""

    head: str
    cell: Callable[[Found], str]


def gpu() -> Accelerator:
    """The GPU that the paper used."""
    return find_accelerator("rtx4090", GPU)


@functools.cache
def _memory(config: Config) -> Memory:
    return compiled_memory(config)


def compiled(rows: Sequence[Row]) -> list[Found]:
    """Compiles every row with every policy of `REMATS`, unless another page did."""
    found = []
    for row in rows:
        memory = {remat: _memory(row.config(remat)) for remat in REMATS}
        found.append(Found(row, memory))
        peaks = (f"{remat} {each.peak / 2**30:.2f}" for remat, each in memory.items())
        print(f"{row.name} on {row.gpus}, peak GiB: {', '.join(peaks)}", flush=True)
    return found


def filled(columns: Sequence[Column], found: Sequence[Found]) -> str:
    """The table of a page, in Markdown."""
    return table([[each.head for each in columns], *([c.cell(f) for c in columns] for f in found)])
