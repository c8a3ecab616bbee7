"""Training on a grid, compiled for H200s: memory, bytes, and the work that hides them.

Makes the output of `python -m benchmarks.grid --gpu`: one config in the layouts of table 2 of Zhu
and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, with every algorithm on the grid.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.lib.measure import gib
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hlo.kernels import summary
from jaxptd.analysis.hlo.timeline import Move, moves
from jaxptd.analysis.report import table, versions
from jaxptd.compiling import PLUGINS, gpus
from jaxptd.config import Config
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program

# The layouts of table 2 of the paper, 4 and 8 GPUs, and their names there.
LAYOUTS: tuple[tuple[str, Layout], ...] = (
    ("TP=2, DP=2", Layout(dp=2, tp=2)),
    ("TP=4", Layout(tp=4)),
    ("TP=4", Layout(tp=4, sequence_parallel=True, keep_gathered=True)),
    ("TP2D=4", Layout(row=2, col=2)),
    ("TP2D=4", Layout(row=2, col=2, matmul2d_slices=2)),
    ("TP2D=4", Layout(row=2, col=2, matmul2d_slices=4)),
    ("TP2D=4", Layout(row=2, col=2, matmul2d="summa")),
    ("TP2D=4", Layout(row=2, col=2, matmul2d="fox")),
    ("TP2D=4", Layout(row=2, col=2, matmul2d="cannon")),
    ("TP=8", Layout(tp=8)),
    ("TP=8", Layout(tp=8, sequence_parallel=True, keep_gathered=True)),
    ("TP2D=4, DP=2", Layout(dp=2, row=2, col=2)),
    ("TP2D=4, DP=2", Layout(dp=2, row=2, col=2, matmul2d_slices=4)),
)
PUBLISHED = {"TP=2, DP=2": 22.3, "TP=4": 21.5, "TP2D=4": 19.8}  # GB
PUBLISHED |= {"TP=8": 22.2, "TP2D=4, DP=2": 20.0}
NEEDS: tuple[str, ...] = ("layout", "peak GiB", "temp GiB", "state GiB", "GiB sent, by axes")
NEEDS += (
    "in all",
    "published GB (RTX 4090, s=512, 8 samples a GPU)",
)
OVER: tuple[str, ...] = ("layout", "collective", "executions", "GiB sent", "over attention")
OVER += (
    "over products",
    "over nothing",
)
INTRODUCTION = """All figures are of one GPU and one step; nothing was run or timed. Peak: all that
the program needs, state included. Sent: if collectives run as rings. Published: table 2 of the
paper, measured there with other software on other GPUs; it says nothing of remat or precision.
Where tp does not divide the heads there are fewer and wider ones, of the same width in all.
"""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step's memory and collectives; `others` is the bytes of all other kernels."""

    config: Config
    named: str
    peak: int
    temporary: int
    state: int
    moves: list[Move]
    others: int = 0  # without those of products and attention

    @property
    def sizes(self) -> dict[str, int]:
        return {str(axis): size for axis, size in self.config.layout.sizes.items()}

    def sent(self, *, kind: str = "", axes: str = "", over: str = "") -> int:
        """Bytes sent by all collectives, or by those of a kind, axes or overlap."""
        return sum(
            each.sent(self.sizes)
            for each in self.moves
            if kind in ("", each.kind)
            and axes in ("", _joined(each))
            and over in ("", each.hidden_by)
        )

    @property
    def needs(self) -> list[str]:
        """Its row of the first table."""
        by_axes = {_joined(each): None for each in sorted(self.moves, key=_joined)}
        sent = ", ".join(f"{axes} {gib(self.sent(axes=axes))}" for axes in by_axes)
        figures = (self.peak, self.temporary, self.state)
        published = PUBLISHED.get(self.named)
        cells = [self._words, *map(gib, figures), sent, gib(self.sent())]
        return [*cells, f"{published} ({self.named})" if published else ""]

    @property
    def _words(self) -> str:
        return f"{self.config.layout}, {self.config.model.num_heads} heads"

    @property
    def over(self) -> Iterator[list[str]]:
        """Its rows of the second table, all kinds and then each."""
        kinds = sorted({each.kind for each in self.moves})
        for kind in ("", *kinds):
            sent = self.sent(kind=kind)
            count = sum(each.count for each in self.moves if kind in ("", each.kind))
            shares = [
                f"{self.sent(kind=kind, over=over) / max(sent, 1):.0%}"
                for over in ("attention", "products", "nothing")
            ]
            yield [self._words, kind or "all", str(count), gib(sent), *shares]


def _joined(each: Move) -> str:
    return " x ".join(each.axes)


def laid_out(config: Config, layout: Layout) -> Config:
    """Copies the config with another layout and as many samples a device.

    With fewer heads, if the config's do not split over tp.
    """
    model, devices = config.model, config.layout.num_devices
    batch = config.train.global_batch_size * layout.num_devices // devices
    heads = next(
        n
        for n in range(model.num_heads, 0, -1)
        if n % layout.tp == 0 and model.hidden_size % (8 * n) == 0  # cuDNN: 8 divides a head's size
    )
    model = dataclasses.replace(model, num_heads=heads)
    train = dataclasses.replace(config.train, global_batch_size=batch)
    return dataclasses.replace(config, model=model, layout=layout, train=train)


def on_h200s(config: Config) -> Program:
    """A config's program on H200s that are not there."""
    return Program(config, make_mesh(config.layout, gpus(config.layout.num_devices)))


def compiled(
    program: Program, named: str = "", options: Mapping[str, Any] | None = None
) -> Compiled:
    """Compiles a program's step."""
    step = compile_step(program, options)
    memory, sizes = step.memory_analysis(), {str(a): n for a, n in program.mesh.shape.items()}
    text = step.as_text()
    return Compiled(
        program.config,
        named,
        memory.peak_memory_in_bytes,
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        moves(text, sizes),
        summary(text).other_bytes,
    )


def report(config: Config, options: Mapping[str, Any] | None = None) -> str:
    """Makes both tables, with every layout."""
    found = []
    for named, layout in LAYOUTS:
        start = time.perf_counter()
        found.append(compiled(on_h200s(laid_out(config, layout)), named, options))
        seconds = time.perf_counter() - start
        print(" ".join(found[-1].needs), f"(compiled in {seconds:.0f} s)", flush=True)
    model = config.model
    title = (
        f"{model.num_layers} layers, hidden {model.hidden_size}, sequence {model.seq_length}, "
        f"{config.train.global_batch_size // config.layout.num_devices} samples a GPU, "
        f"{model.dtype}, remat {model.remat}"
    )
    chosen = "".join(f", {name}={value}" for name, value in (options or {}).items())
    return "\n".join(
        [
            f"{versions(*PLUGINS.split())}\n\n{INTRODUCTION}\n{title}{chosen}.\n",
            table([NEEDS, *(each.needs for each in found)]),
            "\nOf the bytes sent, those that are under way during attention, during other products "
            "only, and\nduring neither:\n",
            table([OVER, *(row for each in found for row in each.over)]),
            "",
        ]
    )
