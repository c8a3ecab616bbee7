"""Tables and figures of published papers, made again for the models of this library.

`python -m benchmarks.paper --list` says which there are, how each comes about and where its page
is; `--all` makes every page, and `paper_list.md` with the list and the seconds that each took.

Megatron (Narayanan et al., arXiv 2104.04473): `--weak-scaling [--compile]`, table 1: its ten models
counted, predicted and compiled for 32 to 3,072 GPUs, `weak_scaling.py`; `--weak-scaling --fresh`
plans them for H100s and H200s. `--groups`: process groups, `formulas/groups.py`.
Memory: `--memory` of activations (Korthikanti et al., arXiv 2205.05198), `--ring` of ring
self-attention (Li et al., arXiv 2105.13120), `formulas/`.
2D tensor parallelism (Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025): `--table` and
`--figure`: memory of its layouts, and predicted times, `grid_rows.py`, `grid_times.py`; speedup of
the 2.5 B models, `table4.py`; small models that are trained, `curves/`, with the viz extra; its
Swin-UNet, `images/`.

Steps are compiled for H200s, without having any. Pages are printed, or written to DIR. Published
numbers are in `megatron.csv` and `published.csv`, and pages say so.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.measure import write
from benchmarks.paper.models import MODELS
from benchmarks.paper.pages import PAGES, STEPS, Page
from jaxptd.analysis.report import table
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.run.devices import simulate

FLAGS = ("memory", "ring", "groups", "weak_scaling")
RESULTS = Path(__file__).parents[1] / "results"
LIST = "paper_list.md"
DEVICES = 8
HEAD = ("option", "paper", "what", "how", "page")
# Options of a page under `--all`.
ALL = {
    "--weak-scaling": "--weak-scaling --compile",
    "--figure 10": "--figure 10 --steps 150",
    "--figure 13": "--figure 13 --steps 150",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Makes tables and figures of papers, with published numbers beside."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    name = _name(options)
    if name == "--list":
        print(listed({}))
    elif name == "--all":
        _all(options.out or RESULTS)
    else:
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


def _all(out: Path) -> None:
    """Makes every page, each once, and the list, on devices enough for all of them."""
    simulate(DEVICES)
    seconds: dict[str, float] = {}
    for name, page in PAGES.items():
        if page.name in seconds:
            continue
        words = ALL.get(name, name)
        options = _parser().parse_args([*shlex.split(words), "--out", str(out)])
        start = time.perf_counter()
        _make(page, options, words)
        seconds[page.name] = time.perf_counter() - start
        print(f"{name}: {seconds[page.name]:.0f} s", flush=True)
    title = "# Tables and figures of papers\n\nMade by `python -m benchmarks.paper --all`.\n\n"
    total = f"\n\n{sum(seconds.values()) / 60:.0f} minutes in all.\n"
    write(out / LIST, title + listed(seconds) + total)


def _make(page: Page, options: argparse.Namespace, words: str) -> None:
    """Writes or prints a page."""
    text = f"# {page.title}\n\nMade by `python -m benchmarks.paper {words}`.\n\n"
    text += page.make(options)
    if options.out:
        write(options.out / page.name, text)
    else:
        print(text)


def _name(options: argparse.Namespace) -> str:
    """What the options ask for: a key of `PAGES`, `--list` or `--all`.

    Raises:
        UserError: they ask for nothing or several things, or set what it does not read.
    """
    asked = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name in ("list", "all", "table", "figure", *FLAGS)
        if (value := getattr(options, name))
    ]
    if len(asked) != 1:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in FLAGS)
        raise UserError(f"give one of --list, --all, --table, --figure, {flags}")
    name = asked[0] + " --fresh" * (options.fresh and options.weak_scaling)
    reads = PAGES[name].reads if name in PAGES else ()
    given = {
        "models": bool(options.models),
        "steps": options.steps is not None,
        "compile": options.compile,
        "fresh": options.fresh,
    }
    for option, is_given in given.items():
        if is_given and option not in reads:
            raise UserError(f"--{option} has no effect with {name}; leave it out")
    return name


def _parser() -> Parser:
    made = Parser(prog="python -m benchmarks.paper", description=main.__doc__)
    made.add_argument("--list", action="store_true", help="what there is")
    made.add_argument("--all", action="store_true", help="every page")
    made.add_argument("--memory", action="store_true", help="of activations, by formula")
    made.add_argument("--ring", action="store_true", help="ring self-attention: memory, picture")
    made.add_argument("--groups", action="store_true", help="process groups, layers of stages")
    made.add_argument("--weak-scaling", action="store_true", help="Megatron's table 1")
    help_text = "of the paper of 2D parallelism"
    made.add_argument("--table", type=int, choices=range(1, 6), help=help_text)
    help_text = "of that paper; 8 is with 9, 11 with 12, 14 and 15 with table 5"
    made.add_argument("--figure", type=int, choices=range(7, 16), help=help_text)
    help_text = "with --weak-scaling: memory, compiled"
    made.add_argument("--compile", action="store_true", help=help_text)
    help_text = "with --weak-scaling: planned for H100s and H200s"
    made.add_argument("--fresh", action="store_true", help=help_text)
    names = [model.name for model in MODELS]
    made.add_argument("--models", nargs="+", choices=names, default=[], help="default: all")
    made.add_argument("--steps", type=int, help=f"of each training; default: {STEPS}")
    help_text = "folder to write into; --all: benchmarks/results if it is not given"
    made.add_argument("--out", type=Path, help=help_text)
    return made


if __name__ == "__main__":
    run_command(main)
