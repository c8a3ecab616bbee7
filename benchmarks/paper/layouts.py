"""Layouts of the 2D paper, compiled for absent GPUs and predicted: tables 2, 4, 5, figures 7, 11.

Nothing is run. Table 2 and figures 7, 11 and 12 use the four models of table 3 with eight sequences
of 512 tokens per GPU. The paper does not say what its program saves for backward, so every row is
compiled with several remat policies. `jaxptd.planner` predicts times for RTX 4090 with estimated
shares (`rtx4090.yaml`); nothing was fitted to the paper. Collectives count as exposed, except
pieces that overlap with matmuls.

For table 4 every step is compiled completely, down to kernels and schedule. Counted are its peak
memory, the bytes that a GPU sends if collectives run as rings, how many of them travel during a
matmul or an attention kernel, FLOPs, and the bytes of all other kernels. The prediction is the time
that these take at the H200's limits: matmuls and attention at 989.5 TFLOP/s, other kernels at 4.3
TB/s, and collectives that nothing overlaps with at NVLink's 450 GB/s. Overlapping work is assumed
to hide all of a collective.

Table 5 and figures 14 and 15 use `configs/swin-unet-cardiac.yaml`, in float32 as in Swin-Unet's
code. Every row saves what `model.remat: dots` saves, as `layout.offload: activations` moves that.

Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, sections 3.2 to 3.6.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, get_args

from benchmarks.context.costs import LINKS
from benchmarks.grid.gpu import Compiled, compiled, laid_out
from benchmarks.lib.compiler import (
    PACKAGES,
    QUICK_ON_GPUS,
    UNTRIED,
    Memory,
    compiled_memory,
    on_h200s,
)
from benchmarks.lib.pages import gib, joined, printed
from benchmarks.paper.published import (
    CONFIGS,
    PaperModel,
    communication,
    iteration,
    numbers,
    parameters,
)
from jaxptd.analysis.hardware import BANDWIDTH, PEAK_FLOPS
from jaxptd.analysis.jaxprs import attention_flops, executed, flops
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, Remat
from jaxptd.hardware import Accelerator, Cluster, find_accelerator
from jaxptd.mesh import Layout, Matmul2D
from jaxptd.models.families import architecture_of
from jaxptd.planner.cost import StepTime
from jaxptd.planner.planning import MAX_MEMORY
from jaxptd.planner.search.best import Search
from jaxptd.planner.search.space import Space
from jaxptd.planner.steps.step import ConfigStep, memory_of, predict

GPU = Path(__file__).with_name("rtx4090.yaml")
SEQUENCES = 8  # per GPU: 32 on 4 and 64 on 8
REMATS: tuple[Remat, ...] = ("full", "dots", "none")
NO_ROOM = "does not fit"


def gpu() -> Accelerator:
    """The GPU used in the paper."""
    return find_accelerator("rtx4090", GPU)


# ---- table 2, figures 7, 11 and 12 --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One layout of a model."""

    name: str  # of the layout, in the paper
    model: str  # billions of parameters in the paper
    layout: Layout

    @property
    def gpus(self) -> int:
        return self.layout.num_devices

    @property
    def sequences(self) -> int:
        return SEQUENCES * self.gpus

    def config(self, remat: Remat = "dots") -> Config:
        """Its config, with fewer and wider heads where tp does not divide them."""
        config = laid_out(load_config(CONFIGS[self.model]), self.layout)
        train = dataclasses.replace(config.train, global_batch_size=self.sequences)
        model = dataclasses.replace(config.model, remat=remat)
        return dataclasses.replace(config, model=model, train=train)

    @property
    def parameters(self) -> int:
        """The model's parameters, without padding."""
        return parameters(CONFIGS[self.model])


TABLE_2 = (
    Row("DP=4", "2.5", Layout(dp=4)),
    Row("TP=2, DP=2", "2.5", Layout(dp=2, tp=2)),
    Row("TP=4", "2.5", Layout(tp=4)),
    Row("TP2D=4", "2.5", Layout(row=2, col=2)),
    Row("TP=8", "2.5", Layout(tp=8)),
    Row("TP2D=4, DP=2", "2.5", Layout(dp=2, row=2, col=2)),
)
FIGURE_7 = (
    Row("one GPU", "0.54", Layout()),
    Row("TP + DP", "2.5", Layout(dp=2, tp=2)),
    Row("TP", "2.5", Layout(tp=4)),
    Row("TP2D", "2.5", Layout(row=2, col=2)),
    Row("TP + DP", "4.2", Layout(dp=2, tp=4)),
    Row("TP", "4.2", Layout(tp=8)),
    Row("TP2D", "4.2", Layout(dp=2, row=2, col=2)),
)
FIGURE_11 = FIGURE_7[2:4]


@functools.cache
def step_of(row: Row, remat: Remat) -> StepTime:
    """The predicted step of a layout on the paper's GPUs."""
    return predict(row.config(remat), Cluster(gpu()))


@dataclasses.dataclass(frozen=True)
class Found:
    """A row with the memory of its compiled steps, by remat policy."""

    row: Row
    memory: Mapping[Remat, Memory]

    @property
    def fitting(self) -> list[Remat]:
        """Policies whose peak fits on the paper's GPU."""
        return [remat for remat, each in self.memory.items() if each.fits(gpu().hbm_bytes)]

    @cached_property
    def fastest(self) -> tuple[Remat, StepTime] | None:
        """The fastest step that fits, and its remat policy; None: no step fits."""
        steps = ((remat, step_of(self.row, remat)) for remat in self.fitting)
        return min(steps, key=lambda step: step[1].seconds, default=None)

    def shown(self, figure: Callable[[StepTime], str]) -> str:
        """A figure of the fastest step."""
        return figure(self.fastest[1]) if self.fastest else NO_ROOM

    @property
    def throughput(self) -> float:
        """Predicted sequences per second; NaN: does not fit."""
        return self.row.sequences / self.fastest[1].seconds if self.fastest else float("nan")

    @property
    def rate(self) -> float:
        """FLOP/s of the model on each GPU, predicted."""
        return architecture_of(self.row.config().model).flops * self.throughput / self.row.gpus

    @property
    def seconds(self) -> str:
        kept = f" (`{self.fastest[0]}`)" if self.fastest else ""
        return self.shown(lambda step: f"{step.seconds:.2f}") + kept

    @property
    def peaks(self) -> list[str]:
        return [gib(self.memory[remat].peak) for remat in REMATS]

    @property
    def fits(self) -> str:
        return ", ".join(f"`{remat}`" for remat in self.fitting) or "nothing"


@functools.cache
def _memory(config: Config) -> Memory:
    return compiled_memory(config)


def compiled_rows(rows: Sequence[Row]) -> list[Found]:
    """Compiles every row with every policy of `REMATS`, unless another page has done so."""
    found = []
    for row in rows:
        memory = {remat: _memory(row.config(remat)) for remat in REMATS}
        found.append(Found(row, memory))
        print(f"{row.name} on {row.gpus}, peak GiB: {', '.join(found[-1].peaks)}", flush=True)
    return found


PEAKS = tuple(f"peak GiB, `{remat}`" for remat in REMATS)


def table_2(found: Sequence[Found]) -> str:
    """Table 2: memory and time of each layout as published, compiled and predicted."""
    head = ["layout", "GPUs", "batch", "heads", "published GB", "published hours", *PEAKS]
    head += ["state GiB", "fits 24 GiB with", "s/step, predicted"]
    rows = [[*head, "throughput over TP=4, predicted", "published"]]
    (base,) = (each.throughput for each in found if each.row.name == "TP=4")
    for each in found:
        row, ratio = each.row, f"{each.throughput / base:.2f}" if each.fastest else NO_ROOM
        published = ["cannot be trained"] * 3
        if hours := numbers().get(("table 2", row.name, "time")):
            memory = numbers()["table 2", row.name, "memory"]
            over = numbers()["table 2", "TP=4", "time"] / hours
            published = [f"{memory:.1f}", f"{hours:.0f}", f"{over:.2f}"]
        heads = str(row.config().model.num_heads)
        cells = [row.name, str(row.gpus), str(row.sequences), heads, *published[:2], *each.peaks]
        cells += [gib(each.memory["full"].state), each.fits, each.seconds, ratio, published[2]]
        rows.append(cells)
    return joined(versions(*PACKAGES), table(rows))


def figure_7(found: Sequence[Found]) -> str:
    """Figure 7: weak scaling efficiency, published and predicted (FLOP/s over the first row's)."""
    head = ["layout", "here", "GPUs", "model", "billion parameters, counted"]
    head += ["published efficiency", *PEAKS, "fits 24 GiB with", "efficiency, predicted"]
    rows = [[*head, "s/step, predicted"]]
    for each in found:
        row, published, ours = each.row, "the base", "the base"
        if each is not found[0]:
            published = f"{numbers()['figure 7', f'{row.gpus} GPUs', row.name] / 100:.0%}"
            ours = f"{each.rate / found[0].rate:.0%}" if each.fastest else NO_ROOM
        sizes = str(row.gpus), f"{float(row.model):.2f} B", f"{row.parameters / 1e9:.2f}"
        cells = [row.name, f"`{row.layout}`", *sizes, published, *each.peaks, each.fits]
        rows.append([*cells, ours, each.seconds])
    return joined(versions(*PACKAGES), table(rows))


def figure_11(found: Sequence[Found]) -> str:
    """Figures 11 and 12: the share of communication, and where a grid pays."""
    head = ["layout", "here", "GPUs", "published share", *PEAKS, "fits 24 GiB with"]
    head += ["share, predicted", "s of communication, predicted", "published"]
    rows = [[*head, "s/step, predicted"]]
    for each in found:
        name = each.row.name
        share, seconds = communication(name), iteration("GPT", name)
        cells = [name, f"`{each.row.layout}`", str(each.row.gpus), f"{share:.1%}", *each.peaks]
        cells += [each.fits, each.shown(lambda step: f"{step.exposed:.1%}")]
        cells += [each.shown(lambda step: f"{step.exposed * step.seconds:.2f}")]
        rows.append([*cells, f"{share * seconds:.0f}", each.seconds])
    return joined(versions(*PACKAGES), table(rows), table(where_grids_pay()))


# ---- where a grid pays --------------------------------------------------------------------------

HEADS = 16  # for gpt2-2.5b in this table, since 30 split over few devices only
GRIDS = {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8)}
JOINED_BY = {"NVLink": "nvlink_bandwidth", "PCI Express": "host_bandwidth"}


class Best(NamedTuple):
    """The fastest of several layouts, with predicted seconds and bytes."""

    layout: Layout
    seconds: float
    bytes: int

    @property
    def cells(self) -> list[str]:
        return [f"`{self.layout}`", f"{self.seconds:.3f}", f"{self.bytes / 2**30:.1f}"]


def one_way(gpus: int) -> list[Layout]:
    """Layouts with all devices along tp; none if there are more devices than heads."""
    if gpus > HEADS:
        return []
    sharded = Layout(tp=gpus, sequence_parallel=True)
    return [Layout(tp=gpus), sharded, dataclasses.replace(sharded, collective_matmul=True)]


def linked(name: str) -> Accelerator:
    """An H100 whose devices are joined by the named links."""
    h100 = find_accelerator("h100")
    return dataclasses.replace(h100, nvlink_bandwidth=getattr(h100, JOINED_BY[name]))


def best_of(layouts: list[Layout], accelerator: Accelerator) -> Best:
    """Predicts layouts on one node and selects the fastest."""
    cluster = Cluster(accelerator, node=max(GRIDS))
    steps = [(predict(_config(layout), cluster).seconds, layout) for layout in layouts]
    seconds, layout = min(steps, key=lambda step: step[0])
    return Best(layout, seconds, memory_of(ConfigStep(_config(layout))).total)


def best_of_all(gpus: int, accelerator: Accelerator) -> Best:
    """The planner's choice on one node."""
    space = Space(_config(Layout(dp=gpus)), gpus, {})
    limit = MAX_MEMORY * accelerator.hbm_bytes
    found = next(iter(Search(space, Cluster(accelerator, node=max(GRIDS)), limit)))
    return Best(found.config.layout, found.step.seconds, found.memory.total)


def where_grids_pay() -> list[list[str]]:
    """The table that compares 1D with 2D by number of devices and links."""
    head = ["GPUs", "links", "fastest tp", "s/step", "GiB", "grid", "s/step", "GiB"]
    rows = [[*head, "grid over tp", "fastest of all layouts", "s/step", "GiB"]]
    for gpus, (row, col) in GRIDS.items():
        for name in JOINED_BY:
            accelerator, sides = linked(name), sorted({(row, col), (col, row)})
            grid = best_of([Layout(row=a, col=b) for a, b in sides], accelerator)
            first, ratio = ["more than heads", "", ""], ""
            if layouts := one_way(gpus):
                tp = best_of(layouts, accelerator)
                first, ratio = tp.cells, f"{tp.seconds / grid.seconds:.2f}"
            every = best_of_all(gpus, accelerator).cells
            rows.append([str(gpus), name, *first, *grid.cells, ratio, *every])
    return rows


def _config(layout: Layout) -> Config:
    config = load_config("gpt2-2.5b")
    batch = config.train.global_batch_size * layout.num_devices // config.layout.num_devices
    model = dataclasses.replace(config.model, num_heads=HEADS)
    train = dataclasses.replace(config.train, global_batch_size=batch)
    return dataclasses.replace(config, model=model, layout=layout, train=train)


# ---- table 4 ------------------------------------------------------------------------------------

LINK = next(iter(LINKS.values()))  # bytes/s of NVLink, one direction
HEAD = ("layout", "heads", "peak GiB", "GiB sent, by collective", "in all", "overlapped")
HEAD += ("matmuls, attention, ms", "other kernels, ms", "all sent, ms", "predicted, ms")
HEAD += ("TP=4 over it", "nothing hidden")
SUMMARY = ("model", "published hours, TP", "TP2D", "published speedup")
SUMMARY += ("predicted, H200s: TP=4 with sequence parallelism", "fastest TP2D")
SUMMARY += ("that, nothing hidden", "with any links")


@dataclasses.dataclass(frozen=True)
class Step:
    """One layout's step of a model, on one GPU."""

    model: str
    compiled: Compiled  # memory, collectives, and bytes of kernels
    flop: int  # of matmuls and attention

    @cached_property
    def sent(self) -> int:
        """Bytes that all its collectives send."""
        return self.compiled.sent()

    @cached_property
    def alone(self) -> int:
        """Bytes that it sends while no matmul or attention kernel runs."""
        return self.compiled.sent(over="nothing")

    @property
    def computing(self) -> float:
        """Seconds of all kernels."""
        return self.flop / PEAK_FLOPS["H200"] + self.compiled.others / BANDWIDTH

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.computing + self.alone / LINK

    @property
    def unhidden(self) -> float:
        """Predicted seconds of a step whose collectives overlap with nothing."""
        return self.computing + self.sent / LINK

    def row(self, base: "Step") -> list[str]:
        """Its row in the model's table; base: the step that speedups are relative to."""
        found, config = self.compiled, self.compiled.config
        by_kind = ((x, found.sent(kind=x)) for x in sorted({each.kind for each in found.moves}))
        by = ", ".join(f"{kind} {gib(sent)}" for kind, sent in by_kind if sent >= 2**20)
        multiplying = self.flop / PEAK_FLOPS["H200"]
        times = (multiplying, found.others / BANDWIDTH, self.sent / LINK, self.seconds)
        return [
            *(str(config.layout), str(config.model.num_heads), gib(found.peak), by),
            *(gib(self.sent), f"{1 - self.alone / self.sent:.0%}"),
            *(f"{1e3 * each:.1f}" for each in times),
            f"{base.seconds / self.seconds:.2f}",
            f"{base.unhidden / self.unhidden:.2f}",
        ]

    def any_links(self, base: "Step") -> list[float]:
        """The smallest and the largest speedup over `base` that any link speed can give.

        If nothing is hidden, (a + b / speed) / (c + d / speed) lies between a / c and b / d.
        """
        return sorted((base.computing / self.computing, base.sent / self.sent))


def layouts(config: Config) -> Iterator[Layout]:
    """Yields TP=4, the same with sequence parallelism, and the grid with each algorithm."""
    yield Layout(tp=config.layout.num_devices)
    yield Layout(tp=config.layout.num_devices, sequence_parallel=True)
    for algorithm in get_args(Matmul2D):
        yield dataclasses.replace(config.layout, matmul2d=algorithm)


def compiled_steps(models: Sequence[PaperModel]) -> list[list[Step]]:
    """Compiles each model in every layout, starting with TP=4."""
    found: list[list[Step]] = []
    for model in models:
        found.append([])
        config = load_config(model.config)
        for layout in layouts(config):
            program = on_h200s(laid_out(config, layout))
            flop = executed(program, lambda equation: flops(equation) + attention_flops(equation))
            found[-1].append(Step(model.name, compiled(program, options=UNTRIED), flop))
            print(f"{model.name} {layout}: compiled", flush=True)
    return found


def table_4(models: Sequence[Sequence[Step]]) -> str:
    """Table 4: the speedups of each model, and what its steps move, hold and compute."""
    tables = [table([HEAD, *(each.row(steps[0]) for each in steps)]) for steps in models]
    return joined(versions(*PACKAGES), table([SUMMARY, *map(summary, models)]), *tables)


def summary(steps: Sequence[Step]) -> list[str]:
    """A model's row in the table of speedups."""
    base, sequence_parallel = steps[:2]
    grids = (each for each in steps if each.compiled.config.layout.has_grid)
    fastest = min(grids, key=lambda each: each.seconds)
    hours = (numbers()["table 4", base.model, f"time {each}"] for each in ("TP", "TP2D"))
    return [
        *(base.model, *(f"{each:g}" for each in hours)),
        f"{numbers()['table 4', base.model, 'speedup']:.2f}",
        f"{base.seconds / sequence_parallel.seconds:.2f}",
        f"{base.seconds / fastest.seconds:.2f} (`{fastest.compiled.config.layout.matmul2d}`)",
        f"{base.unhidden / fastest.unhidden:.2f}",
        "{:.2f} to {:.2f}".format(*fastest.any_links(base)),
    ]


# ---- table 5 ------------------------------------------------------------------------------------

SWIN = "swin-unet-cardiac"
GB = 1e9  # as published
SWIN_LAYOUTS = {"TP=2": Layout(tp=2), "TP=4": Layout(tp=4), "TP2D=4": Layout(row=2, col=2)}
OFFLOAD = Layout(row=2, col=2, offload=("optimizer", "activations"))
SWIN_LAYOUTS["TP2D=4+CPU-offload"] = OFFLOAD
# Without these options XLA spends minutes on tilings of Triton kernels.
QUICK = UNTRIED | {"xla_gpu_enable_triton_gemm": False}
QUICK |= {"xla_disable_hlo_passes": "triton-softmax-rewriter"}
SWIN_HEAD = ("layout", "here", "GPUs", "published GB", "GB per GPU, compiled")
SWIN_HEAD += ("published, % of the host's memory", "host GB per GPU, compiled", "for all GPUs")


def swin_config(name: str) -> Config:
    base = load_config(SWIN)
    model = dataclasses.replace(base.model, dtype="float32", remat="dots")
    return dataclasses.replace(base, model=model, layout=SWIN_LAYOUTS[name])


def table_5(*, quick: bool) -> str:
    """Table 5: compiles every row, which takes minutes each, or half a minute with `QUICK`."""

    def rows() -> Iterator[list[str]]:
        for name, layout in SWIN_LAYOUTS.items():
            memory = compiled_memory(swin_config(name), QUICK if quick else QUICK_ON_GPUS)
            gpus = layout.num_devices
            published = [numbers()["table 5", name, each] for each in ("memory", "host memory")]
            host = f"{memory.host / GB:.2f}", f"{gpus * memory.host / GB:.2f}"
            cells = [name, f"`{layout}`", str(gpus), f"{published[0]:.1f}"]
            yield [*cells, f"{memory.device / GB:.2f}", f"{published[1]:.1f}", *host]

    return joined(versions(*PACKAGES), table([SWIN_HEAD, *printed(rows())]))
