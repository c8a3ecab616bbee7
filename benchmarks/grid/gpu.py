"""Training on a grid, compiled for H200s: memory, bytes sent, and the work that hides them.

Makes the output of `python -m benchmarks.grid --gpu`: one config in the layouts of table 2 of Zhu
and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, with every algorithm on the grid. All figures
are for one GPU and one step. Bytes sent assume that collectives run as rings.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.lib.compiler import PACKAGES, axis_sizes, on_h200s
from benchmarks.lib.pages import gib, joined, printed
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hlo.kernels import summary
from jaxptd.analysis.hlo.timeline import Move, moves
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config
from jaxptd.mesh import Layout

SP = {"sequence_parallel": True, "keep_gathered": True}
# The layouts of the paper's table 2, on 4 and 8 GPUs, with their names there.
LAYOUTS: tuple[tuple[str, Layout], ...] = (
    ("TP=2, DP=2", Layout(dp=2, tp=2)),
    ("TP=4", Layout(tp=4)),
    ("TP=4", Layout(tp=4, **SP)),
    *(("TP2D=4", Layout(row=2, col=2, matmul2d_slices=slices)) for slices in (1, 2, 4)),
    ("TP2D=4", Layout(row=2, col=2, matmul2d="summa")),
    ("TP2D=4", Layout(row=2, col=2, matmul2d="fox")),
    ("TP2D=4", Layout(row=2, col=2, matmul2d="cannon")),
    ("TP=8", Layout(tp=8)),
    ("TP=8", Layout(tp=8, **SP)),
    *(("TP2D=4, DP=2", Layout(dp=2, row=2, col=2, matmul2d_slices=slices)) for slices in (1, 4)),
)
PUBLISHED = {"TP=2, DP=2": 22.3, "TP=4": 21.5, "TP2D=4": 19.8}  # GB
PUBLISHED |= {"TP=8": 22.2, "TP2D=4, DP=2": 20.0}
NEEDS: tuple[str, ...] = ("layout", "peak GiB", "temp GiB", "state GiB", "GiB sent, by axes")
NEEDS += ("in all", "published GB (RTX 4090, s=512, 8 samples per GPU)")
OVER: tuple[str, ...] = ("layout", "collective", "executions", "GiB sent", "over attention")
OVER += ("over matmuls", "over nothing")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step's memory and collectives; `others` is the bytes of all other kernels."""

    config: Config
    named: str
    peak: int
    temporary: int
    state: int
    moves: list[Move]
    others: int = 0  # without those of matmuls and attention

    def sent(self, *, kind: str = "", axes: str = "", over: str = "") -> int:
        """Bytes sent by all collectives, or by those of a kind, axes or overlap."""
        sizes = {str(axis): size for axis, size in self.config.layout.sizes.items()}
        return sum(
            each.sent(sizes)
            for each in self.moves
            if kind in ("", each.kind)
            and axes in ("", " x ".join(each.axes))
            and over in ("", each.hidden_by)
        )

    @property
    def needs(self) -> list[str]:
        """Its row in the first table."""
        by_axes = sorted({" x ".join(each.axes) for each in self.moves})
        sent = ", ".join(f"{axes} {gib(self.sent(axes=axes))}" for axes in by_axes)
        published = PUBLISHED.get(self.named)
        figures = map(gib, (self.peak, self.temporary, self.state))
        cells = [self._words, *figures, sent, gib(self.sent())]
        return [*cells, f"{published} ({self.named})" if published else ""]

    @property
    def _words(self) -> str:
        return f"{self.config.layout}, {self.config.model.num_heads} heads"

    @property
    def over(self) -> Iterator[list[str]]:
        """Its rows in the second table: all kinds together, then each."""
        for kind in ("", *sorted({each.kind for each in self.moves})):
            sent = self.sent(kind=kind)
            count = sum(each.count for each in self.moves if kind in ("", each.kind))
            work = [
                self.sent(kind=kind, over=each) for each in ("attention", "products", "nothing")
            ]
            shares = [f"{each / max(sent, 1):.0%}" for each in work]
            yield [self._words, kind or "all", str(count), gib(sent), *shares]


def laid_out(config: Config, layout: Layout) -> Config:
    """Copies the config with another layout and the same number of samples per device.

    The copy has fewer heads if the config's do not split over tp.
    """
    model, devices = config.model, config.layout.num_devices
    batch = config.train.global_batch_size * layout.num_devices // devices
    heads = next(
        n
        for n in range(model.num_heads, 0, -1)
        if n % layout.tp == 0
        and model.hidden_size % (8 * n) == 0  # cuDNN needs sizes that 8 divides
    )
    model = dataclasses.replace(model, num_heads=heads)
    train = dataclasses.replace(config.train, global_batch_size=batch)
    return dataclasses.replace(config, model=model, layout=layout, train=train)


def compiled(program: Any, named: str = "", options: Mapping[str, Any] | None = None) -> Compiled:
    step = compile_step(program, options)
    memory, text = step.memory_analysis(), step.as_text()
    return Compiled(
        program.config,
        named,
        memory.peak_memory_in_bytes,
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        moves(text, axis_sizes(program.mesh)),
        summary(text).other_bytes,
    )


def report(config: Config, options: Mapping[str, Any] | None = None) -> str:
    """Makes both tables, with every layout."""
    found: list[Compiled] = []

    def rows() -> Iterator[list[str]]:
        for named, layout in LAYOUTS:
            found.append(compiled(on_h200s(laid_out(config, layout)), named, options))
            yield found[-1].needs

    model, train = config.model, config.train
    title = (
        f"{model.num_layers} layers, hidden {model.hidden_size}, sequence {model.seq_length}, "
        f"{train.global_batch_size // config.layout.num_devices} samples per GPU, "
        f"{model.dtype}, remat {model.remat}"
    )
    chosen = "".join(f", {name}={value}" for name, value in (options or {}).items())
    needs = table([NEEDS, *printed(rows())])
    over = table([OVER, *(row for each in found for row in each.over)])
    return joined(versions(*PACKAGES[2:]), f"{title}{chosen}.", needs, over)
