"""Reproduces tables and figures of published papers with the models of this library.

`python -m benchmarks.paper --list` lists them, with how each is made and where its page is. `--all`
makes every page, with as many processes as there are cores (`--jobs`), and `paper_list.md` with the
list and the seconds that each page took.

- Megatron (Narayanan et al., arXiv 2104.04473): `--weak-scaling [--compile]`, `--fresh`,
  `--groups`; see `megatron.py`.
- Memory: `--memory` for activations (Korthikanti et al., arXiv 2205.05198), `--ring` for ring
  self-attention (Li et al., arXiv 2105.13120); see `activations.py`.
- 2D tensor parallelism (Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025): `--table` and
  `--figure`, one or several; see `layouts.py`, and `trained.py` for small trained models.

Steps are compiled for H200s that need not be there. Tables are printed. With `--out DIR` the tables
of a page there are replaced, as is its picture (which needs the viz extra); its text stays.
Published numbers come from `megatron.csv` and `published.csv` and are marked on the pages.
"""

import argparse
import csv
import gc
import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.grid import __main__ as grid
from benchmarks.lib.compiler import PACKAGES, compile_only
from benchmarks.lib.pages import RESULTS, head, joined, printed, renew, write
from benchmarks.paper import activations, layouts, megatron, published, trained
from benchmarks.published.fit import table_1
from jaxptd.analysis.report import table, versions
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.plot import drawing

LIST, HEAD = "paper_list.md", ("option", "paper", "what", "how", "page")
PICTURES = "benchmarks.paper.pictures"  # imported only when needed, since it needs matplotlib
STEPS, MOST_STEPS = 300, 100_000
# What `--all` runs, one process each, longest first; pages that share steps share a process.
ALL = (
    *("--table 4", "--table 2 --figure 7 11", "--figure 10 --steps 80", "--table 5 --quick"),
    *("--memory", "--weak-scaling --compile", "--figure 13 --steps 100", "--weak-scaling --fresh"),
    *("--ring", "--table 1", "--figure 8 --steps 100", "--table 3", "--groups"),
)
# As in the tests: tracing makes millions of long-lived objects, and searching them after every 700
# new ones, as Python does by default, takes a tenth of the time.
COLLECT_AFTER = 100_000, 20, 50


# ---- the pages ----------------------------------------------------------------------------------


class Page(NamedTuple):
    """A row of `pages.csv`: a page, its paper, its title, and how its figures are made."""

    source: str
    title: str
    how: str
    name: str  # of its file, without a suffix


class Maker(NamedTuple):
    """What makes a page: options -> data -> tables."""

    make: Callable[[argparse.Namespace], Any]
    tables: Callable[[Any], str] = str  # with versions, in the page's order
    reads: tuple[str, ...] = ()  # those options that only some pages read
    draws: bool = False  # whether it draws a picture


def _pages() -> dict[str, Page]:
    """Every page, by the option that selects it."""
    with Path(__file__).with_name("pages.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return {option: Page(*row) for option, *row in rows}


def _table_1(_: argparse.Namespace) -> str:
    grid.prepare_devices()
    return grid.on_cpus()


def _growth(rows: Iterable[Sequence[str]], head: Sequence[str], packages: Sequence[str]) -> str:
    return joined(versions("flax", *packages), table([head, *printed(rows)]))


def _weak_scaling(options: argparse.Namespace) -> Any:
    found = megatron.predictions()
    return megatron.models(found, compile_steps=options.compile), found


def _steps(options: argparse.Namespace) -> int:
    steps = STEPS if options.steps is None else options.steps
    if not 2 <= steps <= MOST_STEPS:
        raise UserError(f"--steps {steps}: use 2 to {MOST_STEPS}")
    return steps


def _figure_10(options: argparse.Namespace) -> list[trained.Curves]:
    return trained.trained(published.chosen(options.models), trained.DTYPES, steps=_steps(options))


PAGES = _pages()
MAKERS = {
    "paper_memory": Maker(
        lambda _: _growth(activations.rows(), activations.HEAD, PACKAGES[2:]),
    ),
    "paper_ring": Maker(
        lambda _: _growth(activations.ring_rows(), activations.RING_HEAD, ()), draws=True
    ),
    "paper_groups": Maker(lambda _: megatron.groups()),
    "paper_weak_scaling": Maker(
        _weak_scaling, lambda found: megatron.weak_scaling(*found), ("compile",), draws=True
    ),
    "paper_fresh": Maker(lambda _: megatron.fresh(table_1()), reads=("fresh",)),
    "paper_table1": Maker(_table_1),
    "paper_table2": Maker(lambda _: layouts.compiled_rows(layouts.TABLE_2), layouts.table_2),
    "paper_table3": Maker(lambda _: joined(table([published.SIZES, *published.sizes()]))),
    "paper_table4": Maker(
        lambda options: layouts.compiled_steps(published.chosen(options.models)),
        layouts.table_4,
        ("models",),
    ),
    "paper_table5": Maker(lambda options: layouts.table_5(quick=options.quick), reads=("quick",)),
    "paper_figure7": Maker(lambda _: layouts.compiled_rows(layouts.FIGURE_7), layouts.figure_7),
    "paper_figure9": Maker(
        lambda options: trained.trained(steps=_steps(options)),
        trained.figure_9,
        ("steps",),
        draws=True,
    ),
    "paper_figure10": Maker(_figure_10, trained.figure_10, ("models", "steps"), draws=True),
    "paper_figure11": Maker(lambda _: layouts.compiled_rows(layouts.FIGURE_11), layouts.figure_11),
    "paper_figure13": Maker(
        lambda options: trained.hearts(_steps(options)), trained.figure_13, ("steps",), draws=True
    ),
}


def make(page: Page, options: argparse.Namespace, words: str = "") -> None:
    """Prints the tables of a page; writes them and its picture if a folder is given."""
    maker = MAKERS[page.name]
    drawer = drawing(PICTURES) if options.out and maker.draws else None
    if "absent" in page.how or options.compile:
        compile_only()
    found = maker.make(options)
    text = maker.tables(found)
    print(text)
    if options.out:
        renew(options.out / f"{page.name}.md", head(page.title, f"paper {words}") + text)
    if drawer:
        drawer.save(page.name, found, options.out)


# ---- the command --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Reproduces tables and figures of papers next to the published numbers."""
    gc.set_threshold(*COLLECT_AFTER)
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    names = _names(options)
    if names == ["--list"]:
        print(listed({}))
    elif names == ["--all"]:
        _all(options.out or Path(os.path.relpath(RESULTS)), options.jobs or os.cpu_count() or 1)
    else:
        # Devices are simulated before JAX starts, and compiling for absent ones starts it.
        for name in sorted(names, key=lambda name: "absent" in PAGES[name].how):
            make(PAGES[name], options, shlex.join(argv))
    return 0


def listed(seconds: dict[str, float]) -> str:
    """The table of all pages, in Markdown; seconds: what each page took, by name."""
    rows = [[*HEAD, *["s"] * bool(seconds)]]
    for name, page in PAGES.items():
        took = [f"{seconds[page.name]:.0f}" if page.name in seconds else ""] * bool(seconds)
        rows.append([f"`{name}`", page.source, page.title, page.how, f"`{page.name}.md`", *took])
    return table(rows)


def _all(out: Path, jobs: int) -> None:
    """Makes every page and the list; pages with the same steps share a process.

    jobs: processes at a time.

    Raises:
        UserError: a page could not be made; the others are there.
    """
    seconds: dict[str, float] = {}
    failed, start = [], time.perf_counter()
    pool = ThreadPoolExecutor(jobs)
    made = {pool.submit(_seconds, words, out): words for words in ALL}
    try:
        for future in as_completed(made):
            words = made[future]
            if error := future.exception():
                failed.append(f"{words}: {error}")
                continue
            names = _names(_parser().parse_args(words.split()))
            seconds |= {PAGES[name].name: future.result() for name in names}
            print(f"{words}: {future.result():.0f} s", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        raise UserError("; ".join(failed))
    minutes = (time.perf_counter() - start) / 60
    total = f"\n\n{minutes:.1f} minutes in total with {jobs} processes at a time. Seconds are per "
    total += f"process; one process makes all of `{ALL[1]}`.\n"
    write(out / LIST, head("Tables and figures of papers", "paper --all") + listed(seconds) + total)


def _seconds(words: str, out: Path) -> float:
    """Makes a page in a process of its own and returns the seconds that it took.

    Raises:
        UserError: the page could not be made.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.paper", *shlex.split(words), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise UserError(lines[-1].removeprefix("error: ") if lines else f"ended, {done.returncode}")
    return time.perf_counter() - start


def _names(options: argparse.Namespace) -> list[str]:
    """What the options select: keys of `PAGES`, each page once, or only `--list` or `--all`.

    Raises:
        UserError: they select nothing, or something that must stand alone, or set an option that
            the selected pages do not read.
    """
    flags = ("--list", "--all", "--memory", "--ring", "--groups", "--weak-scaling")
    alone = [flag for flag in flags if getattr(options, flag[2:].replace("-", "_"))]
    several = [f"--{kind} {n}" for kind in ("table", "figure") for n in getattr(options, kind)]
    if len(alone) + bool(several) != 1:
        raise UserError(f"give one of {', '.join(flags)}, or tables and figures")
    names = [name + " --fresh" * (options.fresh and options.weak_scaling) for name in alone]
    names += {PAGES[name].name: name for name in several}.values()
    for name, option in itertools.product(names, ("models", "steps", *OPTIONAL, "jobs")):
        reads = MAKERS[PAGES[name].name].reads if name in PAGES else ("jobs",) * (name == "--all")
        value = getattr(options, option)
        if value is not None and value is not False and option not in reads:
            raise UserError(f"--{option} has no effect with {name}; leave it out")
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: use 1 or more")
    return names


FLAGS = {
    "list": "list all tables and figures",
    "all": "make every page",
    "memory": "memory of activations, by formula",
    "ring": "ring self-attention: memory and picture",
    "groups": "process groups and the layers of stages",
    "weak-scaling": "Megatron's table 1",
}
OPTIONAL = {
    "compile": "with --weak-scaling: compile steps and show their memory",
    "fresh": "with --weak-scaling: plan the models for H100s and H200s",
    "quick": "with --table 5: without the kernels that take XLA longest to compile",
}


def _parser() -> Parser:
    made = Parser(prog="python -m benchmarks.paper", description=main.__doc__)
    for name, words in (FLAGS | OPTIONAL).items():
        made.add_argument(f"--{name}", action="store_true", help=words)
    several: Any = {"nargs": "+", "type": int, "default": [], "metavar": "N"}
    words = "tables of the paper on 2D parallelism"
    made.add_argument("--table", choices=range(1, 6), help=words, **several)
    words = "figures of that paper; 8 comes with 9, 11 with 12, 14 and 15 with table 5"
    made.add_argument("--figure", choices=range(7, 16), help=words, **several)
    names = [model.name for model in published.MODELS]
    made.add_argument("--models", nargs="+", choices=names, help="models to include (default: all)")
    made.add_argument("--steps", type=int, help=f"steps per training run (default: {STEPS})")
    words = "with --all: processes at a time (default: the number of cores)"
    made.add_argument("--jobs", type=int, help=words)
    words = "folder of the pages (default with --all: benchmarks/results)"
    made.add_argument("--out", type=Path, help=words)
    return made


if __name__ == "__main__":
    run_command(main)
