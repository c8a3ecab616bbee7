"""Tables and figures of published papers, made again for the models of this library.

Megatron (Narayanan et al., arXiv 2104.04473), table 1:
`python -m benchmarks.paper --weak-scaling [--compile --out DIR]` counts, predicts and, with
`--compile`, compiles its ten models for 32 to 3,072 GPUs: `weak_scaling.py`;
`--weak-scaling --fresh` plans them afresh for as many H100s and H200s.

2D tensor parallelism (Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025):
`--table 2`, `--figure 7`, `--figure 11` (with 12): memory of its layouts, and predicted times:
`grid_rows.py`, `grid_times.py`;
`--table 4 [--models GPT BERT]`: speedup of the 2.5 B models: `table4.py`;
`--figure 10 [--models GPT BERT --steps 300]` trains small models on simulated devices:
`figure10.py`; it needs the viz extra.

Steps are compiled for H200s, without having any. Pages are printed, or written to DIR. Published
numbers are in `megatron.csv` and `published.csv`, and pages say so.
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from benchmarks.lib.measure import write
from benchmarks.paper import grid_pages, grid_rows, table4, weak_scaling
from benchmarks.paper.models import MODELS, chosen
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.planner.published.rows import table_1
from jaxptd.plot import drawing

STEPS, MOST_STEPS = 300, 100_000
FIGURE10 = "benchmarks.paper.figure10"  # imported when it is needed, as it needs matplotlib
PICTURE = "benchmarks.paper.weak_scaling_picture"


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of results.

    Args:
        name: of its file.
        title: its first line.
        make: writes the rest, from the options.
        reads: options that not every page reads, and it does.
    """

    name: str
    title: str
    make: Callable[[argparse.Namespace], str]
    reads: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Makes a table or figure of a paper, with published numbers beside."""
    options = _parser().parse_args(argv)
    page = _page(options)
    words = shlex.join(sys.argv[1:] if argv is None else argv)
    text = f"# {page.title}\n\nMade by `python -m benchmarks.paper {words}`.\n\n"
    text += page.make(options)
    if options.out:
        write(options.out / page.name, text)
    else:
        print(text)
    return 0


def _page(options: argparse.Namespace) -> Page:
    """The page that the options ask for.

    Raises:
        UserError: they ask for none or several, or set what it does not read.
    """
    asked = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name in ("table", "figure", "weak_scaling")
        if (value := getattr(options, name))
    ]
    if len(asked) != 1:
        raise UserError("give one of --table, --figure and --weak-scaling")
    name = asked[0] + " --fresh" * (options.fresh and options.weak_scaling)
    page = PAGES[name]
    given = {
        "models": bool(options.models),
        "steps": options.steps is not None,
        "compile": options.compile,
        "fresh": options.fresh,
    }
    for option, is_given in given.items():
        if is_given and option not in page.reads:
            raise UserError(f"--{option} has no effect with {name}; leave it out")
    return page


# ---- pages --------------------------------------------------------------------------------------


def _weak_scaling(options: argparse.Namespace) -> str:
    drawer = drawing(PICTURE) if options.out else None
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


def _figure10(options: argparse.Namespace) -> str:
    steps = STEPS if options.steps is None else options.steps
    if not 2 <= steps <= MOST_STEPS:
        raise UserError(f"--steps {steps}: use 2 to {MOST_STEPS}")
    models = chosen(options.models)
    figure10 = drawing(FIGURE10)
    found = figure10.trained(models, steps)
    if options.out:
        figure10.draw(found, options.out)
    return figure10.page(found, models)


def _only_compile() -> None:
    """Uses no accelerator of this machine: steps are only compiled for GPUs."""
    jax.config.update("jax_platforms", "cpu")


TITLE_FRESH = "Megatron's ten models, planned for H100s and H200s"
TITLE11 = "Figures 11 and 12: share of communication"
PAGES = {
    "--weak-scaling": Page(
        "paper_weak_scaling.md", "Weak scaling, Megatron's table 1", _weak_scaling, ("compile",)
    ),
    "--weak-scaling --fresh": Page("paper_fresh.md", TITLE_FRESH, _fresh, ("fresh",)),
    "--table 2": Page("paper_table2.md", "Table 2: memory of each layout", _table2),
    "--table 4": Page("paper_table4.md", "Table 4: speedup of TP2D over TP", _table4, ("models",)),
    "--figure 7": Page("paper_figure7.md", "Figure 7: weak scaling", _figure7),
    "--figure 10": Page(
        "paper_figure10.md", "Figure 10: losses of each model", _figure10, ("models", "steps")
    ),
    "--figure 11": Page("paper_figure11.md", TITLE11, _figure11),
}


def _parser() -> Parser:
    made = Parser(prog="python -m benchmarks.paper", description=main.__doc__)
    made.add_argument("--weak-scaling", action="store_true", help="Megatron's table 1")
    made.add_argument("--table", type=int, choices=(2, 4), help="of the paper of 2D parallelism")
    help_text = "of that paper; 11 is with 12"
    made.add_argument("--figure", type=int, choices=(7, 10, 11), help=help_text)
    help_text = "with --weak-scaling: memory, compiled"
    made.add_argument("--compile", action="store_true", help=help_text)
    help_text = "with --weak-scaling: planned for H100s and H200s"
    made.add_argument("--fresh", action="store_true", help=help_text)
    names = [model.name for model in MODELS]
    made.add_argument("--models", nargs="+", choices=names, default=[], help="default: all")
    made.add_argument("--steps", type=int, help=f"of each training; default: {STEPS}")
    made.add_argument("--out", type=Path, help="folder to write the page into")
    return made


if __name__ == "__main__":
    run_command(main)
