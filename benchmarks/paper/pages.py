"""The pages that `python -m benchmarks.paper` makes."""

import argparse
import dataclasses
from collections.abc import Callable

import jax

from benchmarks.grid import __main__ as grid_memory
from benchmarks.paper import grid_pages, grid_rows, table4, weak_scaling
from benchmarks.paper.formulas import activations, groups, ring, sizes
from benchmarks.paper.images import table5
from benchmarks.paper.models import chosen
from benchmarks.published.fit import table_1
from jaxptd.config import Config, TrainConfig
from jaxptd.errors import UserError
from jaxptd.mesh import Layout
from jaxptd.plot import drawing
from jaxptd.run.devices import prepare

STEPS, MOST_STEPS = 300, 100_000
# Imported when they are needed, as they need matplotlib.
FIGURE9, FIGURE10 = "benchmarks.paper.curves.figure9", "benchmarks.paper.curves.figure10"
FIGURE13 = "benchmarks.paper.images.figure13"
WEAK_SCALING = "benchmarks.paper.weak_scaling_picture"
RING = "benchmarks.paper.formulas.ring_picture"
MEGATRON, KORTHIKANTI, LI = "arXiv 2104.04473", "arXiv 2205.05198", "arXiv 2105.13120"
ZHU = "Zhu and Dong 2025"


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of results.

    Args:
        name: of its file.
        source: the paper.
        title: its first line.
        how: the figures come about.
        make: writes the rest, from the options.
        reads: options that not every page reads, and it does.
    """

    name: str
    source: str
    title: str
    how: str
    make: Callable[[argparse.Namespace], str]
    reads: tuple[str, ...] = ()


# ---- what makes them ----------------------------------------------------------------------------


def _weak_scaling(options: argparse.Namespace) -> str:
    drawer = drawing(WEAK_SCALING) if options.out else None
    _only_compile()
    found = weak_scaling.predictions()
    models = weak_scaling.models(found, compile_steps=options.compile)
    if drawer:
        drawer.draw(models, options.out)
    return weak_scaling.page(models, found, drawer.PICTURE if drawer else "")


def _fresh(_: argparse.Namespace) -> str:
    rows = table_1()
    return weak_scaling.fresh_page(
        {gpu: weak_scaling.planned(rows, gpu) for gpu in weak_scaling.FRESH}
    )


def _memory(_: argparse.Namespace) -> str:
    _only_compile()
    return activations.page(activations.compiled())


def _ring(options: argparse.Namespace) -> str:
    drawer = drawing(RING) if options.out else None
    if drawer:
        drawer.draw(options.out)
    return ring.page(ring.compiled(), drawer.PICTURE if drawer else "")


def _table1(_: argparse.Namespace) -> str:
    layout = Layout(dp=grid_memory.DEVICES)
    train = TrainConfig(global_batch_size=grid_memory.DEVICES, platform="cpu")
    prepare(Config(layout=layout, train=train))
    return grid_memory.on_cpus()


def _table2(_: argparse.Namespace) -> str:
    _only_compile()
    return grid_pages.table2(grid_rows.compiled(grid_rows.TABLE_2))


def _figure7(_: argparse.Namespace) -> str:
    _only_compile()
    return grid_pages.figure7(grid_rows.compiled(grid_rows.FIGURE_7))


def _figure11(_: argparse.Namespace) -> str:
    _only_compile()
    return grid_pages.figure11(grid_rows.compiled(grid_rows.FIGURE_11))


def _table4(options: argparse.Namespace) -> str:
    models = chosen(options.models)
    _only_compile()
    return table4.page(table4.compiled_steps(models), models)


def _table5(options: argparse.Namespace) -> str:
    _only_compile()
    return table5.page(table5.compiled(quick=options.quick), quick=options.quick)


def _figure9(options: argparse.Namespace) -> str:
    figure9 = drawing(FIGURE9)
    found = figure9.curves(_steps(options))
    if options.out:
        figure9.draw(found, options.out)
    return figure9.page(found)


def _figure10(options: argparse.Namespace) -> str:
    steps, models = _steps(options), chosen(options.models)
    figure10 = drawing(FIGURE10)
    found = figure10.trained(models, steps)
    if options.out:
        figure10.draw(found, options.out)
    return figure10.page(found, models)


def _figure13(options: argparse.Namespace) -> str:
    steps, figure13 = _steps(options), drawing(FIGURE13)
    found = figure13.trained(steps)
    if options.out:
        figure13.draw(found, options.out)
    return figure13.page(found)


def _steps(options: argparse.Namespace) -> int:
    steps = STEPS if options.steps is None else options.steps
    if not 2 <= steps <= MOST_STEPS:
        raise UserError(f"--steps {steps}: use 2 to {MOST_STEPS}")
    return steps


def _only_compile() -> None:
    """Uses no accelerator of this machine: steps are only compiled for GPUs."""
    jax.config.update("jax_platforms", "cpu")


# ---- the pages ----------------------------------------------------------------------------------

TITLE_RING = "Memory of ring self-attention; RingQK and RingAV"
TITLE_FRESH = "Megatron's ten models, planned for H100s and H200s"
TITLE9 = "Figures 8 and 9: loss and perplexity of both layouts"
TITLE11 = "Figures 11 and 12: share of communication"
COMPILED, TRAINED = "compiled for absent GPUs, predicted", "trained here, small"
FIGURE_9 = Page("paper_figure9.md", ZHU, TITLE9, TRAINED, _figure9, ("steps",))
FIGURE_11 = Page("paper_figure11.md", ZHU, TITLE11, COMPILED, _figure11)
TITLE5 = "Table 5, figures 14 and 15: memory of a Swin-UNet with TP2D and CPU offload"
TABLE_5 = Page("paper_table5.md", ZHU, TITLE5, "compiled for absent GPUs", _table5, ("quick",))
TITLE13 = "Figure 13: segmented hearts, with loss and Dice coefficients"

PAGES = {
    "--memory": Page(
        "paper_memory.md",
        KORTHIKANTI,
        "Memory of a layer's activations",
        "formula, compiled for absent GPUs",
        _memory,
    ),
    "--ring": Page("paper_ring.md", LI, TITLE_RING, "formula, compiled", _ring),
    "--groups": Page(
        "paper_groups.md",
        "Megatron-LM",
        "Process groups of 16 devices, and layers of stages",
        "counted",
        lambda _: groups.page(),
    ),
    "--weak-scaling": Page(
        "paper_weak_scaling.md",
        MEGATRON,
        "Weak scaling, Megatron's table 1",
        "counted, predicted; with `--compile` memory",
        _weak_scaling,
        ("compile",),
    ),
    "--weak-scaling --fresh": Page(
        "paper_fresh.md", MEGATRON, TITLE_FRESH, "predicted", _fresh, ("fresh",)
    ),
    "--table 1": Page(
        "paper_table1.md", ZHU, "Table 1: memory of each device", "compiled, simulated", _table1
    ),
    "--table 2": Page("paper_table2.md", ZHU, "Table 2: memory of each layout", COMPILED, _table2),
    "--table 3": Page(
        "paper_table3.md", ZHU, "Table 3: sizes of models", "counted", lambda _: sizes.page()
    ),
    "--table 4": Page(
        "paper_table4.md",
        ZHU,
        "Table 4: speedup of TP2D over TP",
        COMPILED,
        _table4,
        ("models",),
    ),
    "--table 5": TABLE_5,
    "--figure 7": Page("paper_figure7.md", ZHU, "Figure 7: weak scaling", COMPILED, _figure7),
    "--figure 8": FIGURE_9,
    "--figure 9": FIGURE_9,
    "--figure 10": Page(
        "paper_figure10.md",
        ZHU,
        "Figure 10: losses of each model",
        TRAINED,
        _figure10,
        ("models", "steps"),
    ),
    "--figure 11": FIGURE_11,
    "--figure 12": FIGURE_11,
    "--figure 13": Page("paper_figure13.md", ZHU, TITLE13, TRAINED, _figure13, ("steps",)),
    "--figure 14": TABLE_5,
    "--figure 15": TABLE_5,
}
