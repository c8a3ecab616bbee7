"""Table 4: what TP and TP2D of the 2.5 B models move, hold and compute, compiled for four H200s.

Nothing is run. Every step is compiled whole, down to kernels and schedule; counted are its peak
memory, the bytes that a GPU sends if collectives run as rings, those of them that are under way
during a product or an attention kernel, FLOPs, and bytes of all other kernels. Predicted is the
time that these take at the H200's limits: products and attention at 989.5 TFLOP/s, other kernels at
4.3 TB/s, and what no work overlaps with at NVLink's 450 GB/s. Work that overlaps is taken to hide
all of a message, so a step takes longer than that.
"""

import dataclasses
import textwrap
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import get_args

from benchmarks.context.formulas import LINKS
from benchmarks.grid.gpu import Compiled, compiled, laid_out, on_h200s
from benchmarks.lib.compiler import UNTRIED
from benchmarks.lib.measure import gib
from benchmarks.paper import published
from benchmarks.paper.models import PaperModel, omitted
from jaxptd.analysis.hardware import BANDWIDTH, PEAK_FLOPS
from jaxptd.analysis.jaxprs import attention_flops, executed, flops
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import load_config
from jaxptd.compiling import PLUGINS
from jaxptd.config import Config
from jaxptd.mesh import Layout, Matmul2D

LINK = next(iter(LINKS.values()))  # bytes/s of NVLink, one direction
BASE = "TP=4"  # what speedups are over
HEAD = ("layout", "heads", "peak GiB", "GiB sent, by collective", "in all", "beside work")
HEAD += ("products, attention, ms", "other kernels, ms", "all sent, ms", "predicted, ms")
HEAD += ("TP=4 over it", "nothing hidden")
SUMMARY = ("model", "published hours, TP", "TP2D", "published speedup")
SUMMARY += ("predicted, H200s: TP=4 with sequence parallelism", "fastest TP2D")
SUMMARY += ("that, nothing hidden", "with any links")
GPUS, WIDTH = 4, 100
INTRODUCTION = """\
All figures are of one H200 of four and of one step. Nothing was run or timed: the steps are
compiled, and `benchmarks/paper/table4.py` says what is counted. *Beside work*: the share of the
bytes sent that is under way during a product or an attention kernel. *All sent*: the time of all
messages at NVLink's 450 GB/s. *Predicted*: products and attention at 989.5 TFLOP/s, other kernels
at 4.3 TB/s, and the messages beside no work; a step takes longer. *Nothing hidden*: the same with
all messages. *With any links*: the two ends of that speedup, infinitely slow and infinitely fast
links. Where tp does not divide the heads there are fewer and wider ones. The paper has sizes of GPT
only; the other models' are made alike. *Published*: measured by the paper's authors on four RTX
4090, with other software."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One layout's step of a model, of one GPU.

    Args:
        model: its name.
        compiled: memory, collectives, and bytes of kernels.
        flop: of products and attention.
    """

    model: str
    compiled: Compiled
    flop: int

    @property
    def is_grid(self) -> bool:
        return self.compiled.config.layout.has_grid

    @cached_property
    def sent(self) -> int:
        """Bytes that it sends in all collectives."""
        return self.compiled.sent()

    @cached_property
    def alone(self) -> int:
        """Bytes that it sends while no product or attention kernel runs."""
        return self.compiled.sent(over="nothing")

    @property
    def multiplying(self) -> float:
        """Seconds of products and attention."""
        return self.flop / PEAK_FLOPS["H200"]

    @property
    def computing(self) -> float:
        """Seconds of all kernels."""
        return self.multiplying + self.compiled.others / BANDWIDTH

    @property
    def seconds(self) -> float:
        """Predicted, of a step."""
        return self.computing + self.alone / LINK

    @property
    def unhidden(self) -> float:
        """Predicted, of a step whose messages overlap with nothing."""
        return self.computing + self.sent / LINK

    def over(self, base: "Step") -> float:
        """The predicted speedup over `base`."""
        return base.seconds / self.seconds

    def row(self, base: "Step") -> list[str]:
        """Its row of the model's table; base: the step that speedups are over."""
        found, config = self.compiled, self.compiled.config
        kinds = sorted({each.kind for each in found.moves})
        by_kind = ((kind, found.sent(kind=kind)) for kind in kinds)
        by = ", ".join(f"{kind} {gib(sent)}" for kind, sent in by_kind if sent >= 2**20)
        times = (self.multiplying, found.others / BANDWIDTH, self.sent / LINK, self.seconds)
        return [
            str(config.layout),
            str(config.model.num_heads),
            gib(found.peak),
            by,
            gib(self.sent),
            f"{1 - self.alone / self.sent:.0%}",
            *(f"{1e3 * each:.1f}" for each in times),
            f"{self.over(base):.2f}",
            f"{base.unhidden / self.unhidden:.2f}",
        ]

    def any_links(self, base: "Step") -> list[float]:
        """The least and the largest speedup over `base` that any speed of links can give.

        If nothing is hidden, a ratio (a + b / speed) / (c + d / speed) is between a / c and b / d.
        """
        return sorted((base.computing / self.computing, base.sent / self.sent))


def layouts(config: Config) -> Iterator[Layout]:
    """TP=4, the same with sequence parallelism, and the config's grid with each algorithm."""
    yield Layout(tp=config.layout.num_devices)
    yield Layout(tp=config.layout.num_devices, sequence_parallel=True)
    for algorithm in get_args(Matmul2D):
        yield dataclasses.replace(config.layout, matmul2d=algorithm)


def step(model: PaperModel, layout: Layout) -> Step:
    """Compiles a model's step in a layout."""
    program = on_h200s(laid_out(load_config(model.config), layout))
    flop = executed(program, lambda equation: flops(equation) + attention_flops(equation))
    return Step(model.name, compiled(program, options=UNTRIED), flop)


def compiled_steps(models: Sequence[PaperModel]) -> list[Step]:
    """Compiles every model in every layout; the first of each model is `BASE`."""
    found = []
    for model in models:
        for layout in layouts(load_config(model.config)):
            start = time.perf_counter()
            found.append(step(model, layout))
            seconds = time.perf_counter() - start
            print(f"{model.name} {layout}: compiled in {seconds:.0f} s", flush=True)
    return found


def page(steps: Sequence[Step], models: Sequence[PaperModel]) -> str:
    """The page of results, in Markdown."""
    by_model = [[each for each in steps if each.model == model.name] for model in models]
    tables = [
        f"## {model.name}, `configs/{model.config}.yaml`\n\n{_sizes(found[0])}\n\n"
        + table([HEAD, *(each.row(found[0]) for each in found)])
        for model, found in zip(models, by_model, strict=True)
    ]
    sections = (
        versions("flax", "optax", *PLUGINS.split()),
        INTRODUCTION,
        omitted(models),
        table([SUMMARY, *(_summary(found) for found in by_model)]),
        gains(by_model),
        *tables,
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _summary(steps: Sequence[Step]) -> list[str]:
    """A model's row of the table of speedups."""
    base, sequence_parallel = steps[:2]
    name, fastest = base.model, fastest_grid(steps)
    return [
        name,
        *(f"{published.hours(name, layout):g}" for layout in ("TP", "TP2D")),
        f"{published.speedup(name):.2f}",
        f"{sequence_parallel.over(base):.2f}",
        f"{fastest.over(base):.2f} (`{fastest.compiled.config.layout.matmul2d}`)",
        f"{base.unhidden / fastest.unhidden:.2f}",
        "{:.2f} to {:.2f}".format(*fastest.any_links(base)),
    ]


def _sizes(first: Step) -> str:
    config = first.compiled.config
    model, train = config.model, config.train
    return (
        f"{model.num_layers} layers, hidden {model.hidden_size}, sequences of {model.seq_length}, "
        f"{train.global_batch_size} in a step, {model.dtype}, remat {model.remat}, layers "
        f"{'in a loop' if model.scan_layers else 'unrolled'}."
    )


def gains(models: Sequence[Sequence[Step]]) -> str:
    """The gains that communication can and cannot bring, by published and by counted numbers.

    Args:
        models: of each model its steps; first TP=4, then the same with sequence parallelism.
    """
    paragraphs = [_shares(), *(_iteration(steps[0]) for steps in models[:1]), _bytes(models)]
    paragraphs += [_times(steps) for steps in models]
    paragraphs.append(
        "What 2 x 2 gains for certain is memory under `remat: none` (the page on grids in "
        "`docs/`), and numbers of heads that 2 divides and 4 does not. A grid sends less than TP "
        "from 8 GPUs on, with many tokens for each weight."
    )
    filled = (textwrap.fill(each, WIDTH, break_on_hyphens=False) for each in paragraphs)
    return "\n\n".join(["## What communication can gain", *filled])


def fastest_grid(steps: Sequence[Step]) -> Step:
    """The grid's step with the least predicted time."""
    return min((each for each in steps if each.is_grid), key=lambda each: each.seconds)


def _shares() -> str:
    """The published speedup against the published shares of communication."""
    tp, tp2d = published.hours("GPT", "TP"), published.hours("GPT", "TP2D")
    share, share2d = published.communication("TP"), published.communication("TP2D")
    moved, moved2d = tp * share, tp2d * share2d
    rest, rest2d = tp - moved, tp2d - moved2d
    outside = (rest - rest2d) / (tp - tp2d)
    return (
        f"By the paper's own figure 11 communication is {share:.1%} of a step of GPT with TP=4. "
        f"Without any of it a step would be {1 / (1 - share):.2f} times as fast: that is the most "
        "that another way to communicate can gain. The published speedup is "
        f"{published.speedup('GPT'):.2f}. With TP2D the share is {share2d:.1%} (figure 12). So of "
        f"{tp:g} h {moved:.1f} are communication and {rest:.1f} are not, of {tp2d:g} h "
        f"{moved2d:.1f} and {rest2d:.1f}: {outside:.0%} of what was gained is outside "
        "communication, although both layouts multiply the same matrices. It is in what the two "
        "programs did beside them."
    )


def _iteration(base: Step) -> str:
    """The published time of an iteration against its products."""
    name, seconds = base.model, published.iteration(base.model, "TP")
    total = GPUS * base.flop / 1e12
    return (
        f"An iteration of {name} took {seconds:,.0f} s, if the {published.hours(name, 'TP'):g} h "
        "are of the 300 iterations that the paper names. The products and attention of such a "
        f"step, here {total:,.0f} TFLOP on all GPUs, then ran at {total / seconds:.2f} TFLOP/s on "
        "four GPUs that reach hundreds. What bounded those runs is neither products nor links, and "
        "no count predicts it."
    )


def _bytes(models: Sequence[Sequence[Step]]) -> str:
    least = min(each.sent / steps[0].sent for steps in models for each in steps if each.is_grid)
    return (
        f"Counted, the grid of 2 x 2 sends more: at least {least:.2f} times the bytes of TP=4, "
        "with every model and algorithm, in more and smaller messages. It is predicted to be "
        "faster only where more of them run beside work, and where its other kernels move less, "
        "because each GPU has a quarter of the residual stream. Sequence parallelism gives TP=4 "
        "that too."
    )


def _times(steps: Sequence[Step]) -> str:
    """A model's predicted speedups, and their bounds."""
    base, sequence_parallel = steps[:2]
    fastest = fastest_grid(steps)
    slow, fast = fastest.any_links(base)
    return (
        f"{base.model} over TP=4: {sequence_parallel.over(base):.2f} with sequence parallelism, "
        f"{fastest.over(base):.2f} with the fastest grid. With nothing hidden "
        f"the grid has {base.unhidden / fastest.unhidden:.2f}, and between {slow:.2f} and "
        f"{fast:.2f} with links of any speed. If all of its messages were hidden and none of "
        f"TP=4's, it would have {base.unhidden / fastest.computing:.2f}: with NVLink, the most "
        f"that communication can gain here. Published: {published.speedup(base.model):.2f}."
    )
