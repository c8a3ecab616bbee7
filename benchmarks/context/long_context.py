"""Measures a step's memory as the sequence grows, and the longest sequence that eight H200s hold.

`python -m benchmarks.context.long_context [--out FILE --picture FILE]`
`python -m benchmarks.context.long_context --gpu [--config configs/gpt-1.3b-131k.yaml --out FILE]`

The first command prints the temporary bytes on each device for the compiled step of a tiny GPT, in
float32 on simulated CPU devices. With the ring a device holds T/cp tokens, and blocks of scores
whose size does not depend on T: memory ~ (T/cp)^1. With RSA it holds T/cp rows of T scores: memory
~ T^2/cp. The printed exponent is the slope between the two longest sequences, in logarithms.
The second command compiles a config's step for H200s that need not be there (see
`benchmarks/gpu/compile_gpu.py`), at ever longer sequences until one does not fit. Peak is XLA's
figure, including state but not what cuDNN's backward allocates while it runs: at least a float32
sum of dq, 4 T/cp D / tp bytes.

Letters: T tokens of a sequence, D model, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.compiler import PACKAGES, QUICK, compile_only, on_h200s
from benchmarks.lib.pages import append, head, mib, parser
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import parse
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.mesh import Layout, RingKind, make_mesh
from jaxptd.plot import drawing
from jaxptd.run.devices import prepare
from jaxptd.step import Program

SIZES = (1, 2, 4, 8)
LENGTHS = {"zigzag": (16384, 65536), "rsa": (1024, 4096)}
MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=64, remat="full")
H200 = 140  # GiB that the driver reports for a GPU of 141 GB
LONGEST = 2**24  # the longest sequence to compile

Points = dict[tuple[RingKind, int], dict[int, int]]  # ring, cp -> T -> bytes


def temporary_bytes(length: int, cp: int, ring: RingKind, model: ModelConfig = MODEL) -> int:
    """Temporary bytes of one device's training step on simulated devices, excluding the state."""
    config = simulated(Layout(cp=cp, ring=ring), dataclasses.replace(model, seq_length=length))
    program = Program(config, make_mesh(config.layout))
    step: Any = program.train_step
    lowered = step.lower(program.abstract_state, program.abstract_batch)
    return lowered.compile(compiler_options=QUICK).memory_analysis().temp_size_in_bytes


def simulated(layout: Layout, model: ModelConfig = MODEL) -> Config:
    """Makes a config with one sequence per step, on simulated devices."""
    return Config(model, layout, train=TrainConfig(global_batch_size=1, platform="cpu"))


def measure(lengths: Mapping[RingKind, Sequence[int]], sizes: Sequence[int] = SIZES) -> Points:
    """Temporary bytes for each kind of ring, size and length; a ring of one counts as zigzag."""
    return {
        (ring, cp): {length: temporary_bytes(length, cp, ring) for length in lengths[ring]}
        for ring in lengths
        for cp in sizes
        if cp > 1 or ring == "zigzag"
    }


def exponent(points: Mapping[int, int]) -> float:
    """The exponent of T with which memory grows, between the two longest sequences."""
    (short, less), (long, more) = sorted(points.items())[-2:]
    return math.log(more / less) / math.log(long / short)


def rows(points: Points) -> list[list[str]]:
    """The table: a row for each ring and size, a column for each length."""
    lengths = sorted({length for found in points.values() for length in found})
    made = [["ring", "cp", *(f"T={length}" for length in lengths), "grows as"]]
    for (ring, cp), found in points.items():
        sizes = (mib(found[length]) if length in found else "" for length in lengths)
        made.append([ring, str(cp), *sizes, f"T^{exponent(found):.2f}"])
    return made


def draw(points: Points, path: Path) -> None:
    """Draws memory over T, both in powers of two; the same points give the same bytes."""
    style = drawing("jaxptd.plot.style")
    style.save_pictures({path.name: lambda: _picture(points, style)}, path.parent)


def _picture(points: Points, plot: Any) -> Any:
    figure = plot.new_picture(plot.PAGE, 4)
    axes = figure.subplots()
    for (ring, cp), found in points.items():
        style = {"zigzag": "o-", "rsa": "s--"}[ring]
        size = [bytes_ / 2**20 for bytes_ in found.values()]
        color = plot.COLORS[SIZES.index(cp)]
        axes.plot(list(found), size, style, color=color, ms=4, label=f"{ring}, cp={cp}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for each in (axes.xaxis, axes.yaxis):
        each.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens in a sequence, T", ylabel="temporary memory of a device, in MiB")
    axes.grid()
    figure.legend(loc="outside right center")
    return figure


# ---- H200s ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory that a step needs on each GPU, in GiB."""

    config: Config
    peak: float
    state: float
    temporary: float

    @property
    def workspace(self) -> float:
        """The minimum workspace of cuDNN's backward: dq of all local tokens in float32."""
        model, layout = self.config.model, self.config.layout
        return 4 * model.seq_length / layout.cp * model.hidden_size / layout.tp / 2**30

    @property
    def fits(self) -> bool:
        return self.peak + self.workspace <= H200

    @property
    def cells(self) -> list[str]:
        figures = (self.state, self.temporary, self.peak, self.workspace)
        words = [f"{self.config.model.seq_length:,}", str(self.config.layout)]
        vocabulary = f"{self.config.model.vocab_size:,}"
        return [*words, vocabulary, *(f"{x:.1f}" for x in figures), "yes" if self.fits else "no"]


HEAD = ["T", "layout", "V", "state GiB", "temp GiB", "peak GiB", "cuDNN GiB", f"fits in {H200}"]


def need(config: Config) -> Need:
    """Compiles a config's step for H200s and reads its memory."""
    found = compile_step(on_h200s(config)).memory_analysis()
    sizes = found.peak_memory_in_bytes, found.argument_size_in_bytes, found.temp_size_in_bytes
    return Need(config, *(size / 2**30 for size in sizes))


def with_model(config: Config, **sizes: int) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))


def longest(config: Config) -> Iterator[Need]:
    """Compiles the config's sequence length, its double, and so on, until one does not fit."""
    length = config.model.seq_length
    while length <= LONGEST:
        found = need(with_model(config, seq_length=length))
        yield found
        if not found.fits:
            return
        length *= 2


def on_gpus(config: Config) -> str:
    """Makes the table of lengths, and tries half the vocabulary at the longest that fits."""
    found = list(longest(config))
    held = [each for each in found if each.fits]
    lines = [each.cells for each in found]
    if not held:
        return f"{table([HEAD, *lines])}\n\nNothing fits.\n"
    last = held[-1].config
    half = need(with_model(last, vocab_size=(last.model.vocab_size or 0) // 2))
    words = f"Longest that fits: T={last.model.seq_length:,}. "
    words += f"With half the vocabulary the peak there is {half.peak:.1f} GiB."
    return f"{table([HEAD, *lines, half.cells])}\n\n{words}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures memory by sequence length, on simulated devices or compiled for H200s."""
    made = parser("context.long_context", main, config=True)
    made.add_argument("--gpu", action="store_true", help="compile the config for H200s")
    made.add_argument("--picture", default="", help="SVG file to draw")
    config, options = parse(made, argv)
    if options["gpu"]:
        compile_only()
        config = with_vocabulary(config)
        positions = config.model.block.positions
        title = f"Compiled for H200s: {config.layout}, positions {positions}"
        body = f"{versions(*PACKAGES[2:])}\n\n{on_gpus(config)}"
    else:
        prepare(simulated(Layout(cp=max(SIZES))))
        points = measure(LENGTHS)
        title, body = "Simulated devices", f"{versions()}\n\n{table(rows(points))}\n"
        if options["picture"]:
            draw(points, Path(options["picture"]))
    print(body)
    append(options["out"], head("Long context", "context.long_context"), f"## {title}\n\n{body}")
    return 0


if __name__ == "__main__":
    run_command(main)
