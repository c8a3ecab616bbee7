"""Predicted times of the 2D paper's layouts, and where a grid is faster than 1D. Runs nothing.

Steps are this library's, predicted for RTX 4090 by `jaxptd.planner` with shares that are estimates
(`rtx4090.yaml`): nothing of the paper was fitted. Collectives count as exposed, except pieces that
run beside products.
"""

import dataclasses
import functools

from benchmarks.paper import published
from benchmarks.paper.grid_rows import Column, Found, Row, gpu
from jaxptd.analysis.report import table
from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, Remat
from jaxptd.hardware import Accelerator, Cluster, find_accelerator
from jaxptd.mesh import Layout
from jaxptd.models.families import architecture_of
from jaxptd.planner.cost import StepTime
from jaxptd.planner.planning import MAX_MEMORY
from jaxptd.planner.search.best import Search
from jaxptd.planner.search.space import Space
from jaxptd.planner.steps.step import ConfigStep, memory_of, predict

NO_ROOM = "no room"
PREDICTED = (
    "*Predicted*: seconds of a step of this library on RTX 4090 by the cost model "
    "(`docs/planning.md`), with 16 lanes of PCI Express 4.0 as links, and the fastest policy whose "
    "compiled peak has room. Nothing was fitted to the paper, shares of the limits are estimates, "
    "and collectives are exposed. The paper's steps take minutes, if its hours are of the 300 "
    "iterations that it names, and the predicted ones seconds: compare ratios, not times."
)

# ---- the paper's layouts ------------------------------------------------------------------------


@functools.cache
def step_of(row: Row, remat: Remat) -> StepTime:
    """The predicted step of a layout on the paper's GPUs."""
    return predict(row.config(remat), Cluster(gpu()))


def fastest(found: Found) -> tuple[Remat, StepTime] | None:
    """The fastest step that has room, and what it keeps; None: none has."""
    steps = ((remat, step_of(found.row, remat)) for remat in found.fitting)
    return min(steps, key=lambda step: step[1].seconds, default=None)


def rate(found: Found) -> float | None:
    """FLOP/s of the model on each GPU, predicted; None: no room."""
    best = fastest(found)
    if best is None:
        return None
    flops = architecture_of(found.row.config().model).flops * found.row.sequences
    return flops / best[1].seconds / found.row.gpus


def throughput(found: Found) -> float | None:
    """Sequences a second, predicted; None: no room."""
    best = fastest(found)
    return best and found.row.sequences / best[1].seconds


def columns_of_table_2(found: list[Found]) -> tuple[Column, ...]:
    """Time and throughput, published and predicted, for a table of these rows."""
    (base,) = (throughput(each) for each in found if each.row.name == "TP=4")

    def ratio(each: Found) -> str:
        here = throughput(each)
        return NO_ROOM if here is None or base is None else f"{here / base:.2f}"

    return (
        Column("s/step, predicted", lambda each: _seconds(fastest(each))),
        Column("throughput over TP=4, predicted", ratio),
        Column("published", lambda each: _published_ratio(each.row.name)),
    )


def columns_of_figure_7(found: list[Found]) -> tuple[Column, ...]:
    """The predicted efficiency: FLOP/s of a GPU over those of the first row."""
    base = rate(found[0])

    def efficiency(each: Found) -> str:
        here = rate(each)
        if each is found[0]:
            return "the base"
        return NO_ROOM if here is None or base is None else f"{here / base:.0%}"

    return (
        Column("efficiency, predicted", efficiency),
        Column("s/step, predicted", lambda each: _seconds(fastest(each))),
    )


def columns_of_figure_11() -> tuple[Column, ...]:
    """The predicted share of communication, and seconds of it."""

    def share(each: Found) -> str:
        best = fastest(each)
        return NO_ROOM if best is None else f"{best[1].exposed:.1%}"

    def sent(each: Found) -> str:
        best = fastest(each)
        return NO_ROOM if best is None else f"{best[1].exposed * best[1].seconds:.2f}"

    return (
        Column("share, predicted", share),
        Column("s of communication, predicted", sent),
        Column("published", lambda each: f"{_published_seconds(each.row.name):.0f}"),
        Column("s/step, predicted", lambda each: _seconds(fastest(each))),
    )


def _seconds(best: tuple[Remat, StepTime] | None) -> str:
    return NO_ROOM if best is None else f"{best[1].seconds:.2f} (`{best[0]}`)"


def _published_ratio(name: str) -> str:
    """Hours of TP=4 over those of a row: each is the time of the same training."""
    base, hours = published.measured("TP=4", "time"), published.measured(name, "time")
    return "cannot be trained" if hours is None or base is None else f"{base / hours:.2f}"


def _published_seconds(name: str) -> float:
    """Seconds of communication in an iteration, if the hours are of all that are named."""
    return published.communication(name) * published.iteration("GPT", name)


def speedup_words(found: list[Found]) -> str:
    """What the model makes of the published speedup."""
    tp, grid = (fastest(each) for each in found)
    if tp is None or grid is None:
        return ""
    share = published.communication("TP")
    sent = tp[1].exposed * tp[1].seconds
    return (
        f"Predicted, TP2D=4 has {tp[1].seconds / grid[1].seconds:.2f} times the speed of TP=4 on "
        "PCI Express: on 2 x 2 the weights move, too. Even with no communication at all TP=4 "
        f"would be {tp[1].seconds / (tp[1].seconds - sent):.2f} times as fast by the model, and "
        f"{1 / (1 - share):.2f} by the published share. If the hours are of the 300 iterations, "
        f"the published seconds of communication are {_published_seconds('TP') / sent:,.0f} times "
        "those that the links need by the model: most of them are no time of links."
    )


# ---- where a grid pays --------------------------------------------------------------------------

HEADS = 16  # of gpt2-2.5b in this table, since 30 split over few devices
GRIDS = {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8)}
LINKS = {"NVLink": "nvlink_bandwidth", "PCI Express": "host_bandwidth"}
HEAD = ("GPUs", "links", "fastest tp", "s/step", "GiB", "grid", "s/step", "GiB", "grid over tp")
HEAD += ("fastest of all layouts", "s/step", "GiB")
PAYS = (
    "Where a grid pays, by the model: gpt2-2.5b with 16 heads, `dots`, eight sequences of 512 "
    "tokens a GPU, on one node of H100s with their NVLink (450 GB/s) and with PCI Express 5.0 x16 "
    "(63 GB/s) as the links of all devices. Fastest tp is that of plain tensor parallelism, with "
    "sequence parallelism, and with products in pieces; the grid is `gather`, either way round. "
    "GiB: predicted peak, with what CUDA and NCCL hold. Fastest of all: by `jaxptd plan`, with any "
    "remat. Predicted, nothing was run."
)


@dataclasses.dataclass(frozen=True)
class Best:
    """The fastest of some layouts.

    Args:
        layout: of all devices.
        seconds: of a step, predicted.
        bytes: of a device, predicted.
    """

    layout: Layout
    seconds: float
    bytes: int

    @property
    def cells(self) -> list[str]:
        return [f"`{self.layout}`", f"{self.seconds:.3f}", f"{self.bytes / 2**30:.1f}"]


def one_way(gpus: int) -> list[Layout]:
    """Layouts with all devices along tp; none where they are more than the heads."""
    if gpus > HEADS:
        return []
    sharded = Layout(tp=gpus, sequence_parallel=True)
    return [Layout(tp=gpus), sharded, dataclasses.replace(sharded, collective_matmul=True)]


def linked(name: str) -> Accelerator:
    """An H100 whose devices are joined by links of a name."""
    h100 = find_accelerator("h100")
    return dataclasses.replace(h100, nvlink_bandwidth=getattr(h100, LINKS[name]))


def best_of(layouts: list[Layout], accelerator: Accelerator) -> Best:
    """Predicts layouts on one node and selects the fastest."""
    cluster = Cluster(accelerator, node=max(GRIDS))
    steps = [(predict(_config(layout), cluster).seconds, layout) for layout in layouts]
    seconds, layout = min(steps, key=lambda step: step[0])
    return Best(layout, seconds, memory_of(ConfigStep(_config(layout))).total)


def best_of_all(gpus: int, accelerator: Accelerator) -> Best:
    """The planner's selection on one node."""
    space = Space(_config(Layout(dp=gpus)), gpus, {})
    limit = MAX_MEMORY * accelerator.hbm_bytes
    found = next(iter(Search(space, Cluster(accelerator, node=max(GRIDS)), limit)))
    return Best(found.config.layout, found.step.seconds, found.memory.total)


def where_grids_pay() -> str:
    """The table of 1D against 2D, by the number of devices and their links."""
    return table([HEAD, *(_pays(gpus, name) for gpus in GRIDS for name in LINKS)])


def _pays(gpus: int, name: str) -> list[str]:
    """A row of that table."""
    accelerator, (row, col) = linked(name), GRIDS[gpus]
    sides = {(row, col), (col, row)}
    grid = best_of([Layout(row=a, col=b) for a, b in sorted(sides)], accelerator)
    first, ratio = ["more than heads", "", ""], ""
    if layouts := one_way(gpus):
        tp = best_of(layouts, accelerator)
        first, ratio = tp.cells, f"{tp.seconds / grid.seconds:.2f}"
    every = best_of_all(gpus, accelerator)
    return [str(gpus), name, *first, *grid.cells, ratio, *every.cells]


def _config(layout: Layout) -> Config:
    config = load_config("gpt2-2.5b")
    batch = config.train.global_batch_size * layout.num_devices // config.layout.num_devices
    model = dataclasses.replace(config.model, num_heads=HEADS)
    train = dataclasses.replace(config.train, global_batch_size=batch)
    return dataclasses.replace(config, model=model, layout=layout, train=train)
