"""Tables and figures of published papers, made again for the models of this library.

`python -m benchmarks.paper --list` says which there are, how each comes about and where its page
is; `--all` makes every page, as many at a time as there are cores (`--jobs`), and `paper_list.md`
with the list and the seconds that each took.

Megatron (Narayanan et al., arXiv 2104.04473): `--weak-scaling [--compile]`, table 1: its ten models
counted, predicted and compiled for 32 to 3,072 GPUs, `weak_scaling.py`; `--weak-scaling --fresh`
plans them for H100s and H200s. `--groups`: process groups, `formulas/groups.py`.
Memory: `--memory` of activations (Korthikanti et al., arXiv 2205.05198), `--ring` of ring
self-attention (Li et al., arXiv 2105.13120), `formulas/`.
2D tensor parallelism (Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025): `--table` and
`--figure`, one or several: memory of its layouts, and predicted times, `grid_rows.py`,
`grid_times.py`; speedup of the 2.5 B models, `table4.py`; small models that are trained, `curves/`,
with the viz extra; its Swin-UNet, `images/`.

Steps are compiled for H200s, without having any. Pages are printed, or written to DIR. Published
numbers are in `megatron.csv` and `published.csv`, and pages say so.
"""

import argparse
import gc
import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.lib.measure import write
from benchmarks.paper.models import MODELS
from benchmarks.paper.pages import PAGES, STEPS, Page
from jaxptd.analysis.report import table
from jaxptd.errors import Parser, UserError, run_command

FLAGS = ("memory", "ring", "groups", "weak_scaling")
RESULTS = Path(__file__).parents[1] / "results"
LIST = "paper_list.md"
HEAD = ("option", "paper", "what", "how", "page")
# What `--all` asks for, where it is not a page's name alone.
ALL = {
    "--weak-scaling": "--weak-scaling --compile",
    "--table 2": "--table 2 --figure 7 11",
    "--table 5": "--table 5 --quick",
    "--figure 8": "--figure 8 --steps 100",
    "--figure 10": "--figure 10 --steps 80",
    "--figure 13": "--figure 13 --steps 100",
}
WITH = {"--figure 7": "--table 2", "--figure 11": "--table 2"}  # they have steps in common
# Begun first, the longest before the others.
LONGEST = ("--table 4", "--table 2", "--figure 10", "--table 5", "--memory", "--weak-scaling")
LONGEST += ("--figure 13", "--weak-scaling --fresh", "--ring", "--table 1")
# As for tests: tracing makes millions of objects that live on, and searching them at every 700, as
# Python does, takes a tenth of the time.
COLLECT_AFTER = 100_000, 20, 50


def main(argv: Sequence[str] | None = None) -> int:
    """Makes tables and figures of papers, with published numbers beside."""
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
            _make(PAGES[name], options, shlex.join(argv))
    return 0


def listed(seconds: dict[str, float]) -> str:
    """The table of all pages, in Markdown; seconds: that each took, by the name of its file."""
    head = (*HEAD, "s") if seconds else HEAD
    rows = []
    for name, page in PAGES.items():
        took = [f"{seconds[page.name]:.0f}" if page.name in seconds else ""] * bool(seconds)
        rows.append([f"`{name}`", page.source, page.title, page.how, f"`{page.name}`", *took])
    return table([head, *rows])


def _all(out: Path, jobs: int) -> None:
    """Makes every page once, in a process of its own or with pages of the same steps, and the list.

    jobs: processes at a time.

    Raises:
        UserError: a page was not made; the others are.
    """
    names = {page.name: name for name, page in reversed(PAGES.items())}
    asked = [name for name in names.values() if name not in WITH]
    longest_first = sorted(asked, key=(*LONGEST, *asked).index)
    seconds: dict[str, float] = {}
    failed, start = [], time.perf_counter()
    pool = ThreadPoolExecutor(jobs)
    made = {pool.submit(_seconds, ALL.get(name, name), out): name for name in longest_first}
    try:
        for future in as_completed(made):
            name = made[future]
            if error := future.exception():
                failed.append(f"{name}: {error}")
                continue
            together = [name, *(each for each, first in WITH.items() if first == name)]
            seconds |= {PAGES[each].name: future.result() for each in together}
            print(f"{', '.join(together)}: {future.result():.0f} s", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        raise UserError("; ".join(failed))
    minutes = (time.perf_counter() - start) / 60
    title = "# Tables and figures of papers\n\nMade by `python -m benchmarks.paper --all`.\n\n"
    total = f"\n\n{minutes:.1f} minutes in all, {jobs} processes at a time. Seconds are those of a "
    total += f"process; one makes all of `{ALL['--table 2']}`.\n"
    write(out / LIST, title + listed(seconds) + total)


def _seconds(words: str, out: Path) -> float:
    """Makes a page in a process of its own; returns the seconds that it took.

    Raises:
        UserError: it was not made.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.paper", *shlex.split(words), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise UserError(lines[-1].removeprefix("error: ") if lines else f"ended, {done.returncode}")
    return time.perf_counter() - start


def _make(page: Page, options: argparse.Namespace, words: str) -> None:
    """Writes or prints a page."""
    text = f"# {page.title}\n\nMade by `python -m benchmarks.paper {words}`.\n\n"
    text += page.make(options)
    if options.out:
        write(options.out / page.name, text)
    else:
        print(text)


def _names(options: argparse.Namespace) -> list[str]:
    """What the options ask for: keys of `PAGES`, each page once; or `--list` or `--all` alone.

    Raises:
        UserError: they ask for nothing or for what is made alone, or set what it does not read.
    """
    alone = [
        f"--{name.replace('_', '-')}" for name in ("list", "all", *FLAGS) if getattr(options, name)
    ]
    several = [f"--{kind} {n}" for kind in ("table", "figure") for n in getattr(options, kind)]
    if len(alone) + bool(several) != 1:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in FLAGS)
        raise UserError(f"give one of --list, --all, {flags}, or tables and figures")
    names = [name + " --fresh" * (options.fresh and options.weak_scaling) for name in alone]
    names += {PAGES[name].name: name for name in several}.values()
    given = {
        "models": bool(options.models),
        "steps": options.steps is not None,
        "compile": options.compile,
        "fresh": options.fresh,
        "quick": options.quick,
        "jobs": options.jobs is not None,
    }
    for name, option in itertools.product(names, given):
        reads = PAGES[name].reads if name in PAGES else ("jobs",) * (name == "--all")
        if given[option] and option not in reads:
            raise UserError(f"--{option} has no effect with {name}; leave it out")
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: use 1 or more")
    return names


def _parser() -> Parser:
    made = Parser(prog="python -m benchmarks.paper", description=main.__doc__)
    made.add_argument("--list", action="store_true", help="what there is")
    made.add_argument("--all", action="store_true", help="every page")
    made.add_argument("--memory", action="store_true", help="of activations, by formula")
    made.add_argument("--ring", action="store_true", help="ring self-attention: memory, picture")
    made.add_argument("--groups", action="store_true", help="process groups, layers of stages")
    made.add_argument("--weak-scaling", action="store_true", help="Megatron's table 1")
    help_text = "of the paper of 2D parallelism"
    several: Any = {"nargs": "+", "type": int, "default": [], "metavar": "N"}
    made.add_argument("--table", choices=range(1, 6), help=help_text, **several)
    help_text = "of that paper; 8 is with 9, 11 with 12, 14 and 15 with table 5"
    made.add_argument("--figure", choices=range(7, 16), help=help_text, **several)
    help_text = "with --weak-scaling: memory, compiled"
    made.add_argument("--compile", action="store_true", help=help_text)
    help_text = "with --weak-scaling: planned for H100s and H200s"
    made.add_argument("--fresh", action="store_true", help=help_text)
    names = [model.name for model in MODELS]
    made.add_argument("--models", nargs="+", choices=names, default=[], help="default: all")
    made.add_argument("--steps", type=int, help=f"of each training; default: {STEPS}")
    help_text = "with --table 5: without kernels that take XLA most of the time"
    made.add_argument("--quick", action="store_true", help=help_text)
    help_text = "with --all: processes at a time; default: the number of cores"
    made.add_argument("--jobs", type=int, help=help_text)
    help_text = "folder to write into; --all: benchmarks/results if it is not given"
    made.add_argument("--out", type=Path, help=help_text)
    return made


if __name__ == "__main__":
    run_command(main)
