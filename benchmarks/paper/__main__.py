"""Table 4 and figure 10 of the paper of 2D tensor parallelism, for the models of this library.

`python -m benchmarks.paper --table 4 [--models GPT BERT --out DIR]` compiles the 2.5 B models for
four H200s, without having any: `table4.py`.
`python -m benchmarks.paper --figure 10 [--models GPT BERT --steps 300 --out DIR]` trains small
models on simulated devices: `figure10.py`; it needs the viz extra.

Pages are printed, or written to DIR. Published numbers are in `published.csv`, and pages say so.
Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.lib.measure import write
from benchmarks.paper import table4
from benchmarks.paper.models import MODELS, PaperModel, chosen
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.plot import drawing

STEPS, MOST_STEPS = 300, 100_000
FIGURE10 = "benchmarks.paper.figure10"  # imported when it is needed, as it needs matplotlib


def main(argv: Sequence[str] | None = None) -> int:
    """Makes table 4 or figure 10 of the paper, with published numbers beside."""
    options = _parser().parse_args(argv)
    if (options.table is None) == (options.figure is None):
        raise UserError("give one of --table 4 and --figure 10")
    if options.table and options.steps:
        raise UserError("--steps has no effect with --table, whose steps are only compiled")
    if not 2 <= (options.steps or STEPS) <= MOST_STEPS:
        raise UserError(f"--steps {options.steps}: use 2 to {MOST_STEPS}")
    models = chosen(options.models)
    words = shlex.join(sys.argv[1:] if argv is None else argv)
    by = f"Made by `python -m benchmarks.paper {words}`.\n\n"
    (_table4 if options.table else _figure10)(options, models, by)
    return 0


def _table4(options: argparse.Namespace, models: Sequence[PaperModel], by: str) -> None:
    jax.config.update("jax_platforms", "cpu")  # the steps are only compiled for GPUs
    text = table4.page(table4.compiled_steps(models), models)
    _put(options.out, "paper_table4.md", f"# Table 4: speedup of TP2D over TP\n\n{by}{text}")


def _figure10(options: argparse.Namespace, models: Sequence[PaperModel], by: str) -> None:
    figure10 = drawing(FIGURE10)
    found = figure10.trained(models, options.steps or STEPS)
    if options.out:
        figure10.draw(found, options.out)
    text = figure10.page(found, models)
    _put(options.out, "paper_figure10.md", f"# Figure 10: losses of each model\n\n{by}{text}")


def _put(folder: Path | None, name: str, text: str) -> None:
    """Writes a page into a folder, or prints it."""
    if folder:
        write(folder / name, text)
    else:
        print(text)


def _parser() -> Parser:
    made = Parser(prog="python -m benchmarks.paper", description=main.__doc__)
    made.add_argument("--table", type=int, choices=(4,), help="of the paper")
    made.add_argument("--figure", type=int, choices=(10,), help="of the paper")
    names = [model.name for model in MODELS]
    made.add_argument("--models", nargs="+", choices=names, default=[], help="default: all")
    made.add_argument("--steps", type=int, help=f"of each training; default: {STEPS}")
    made.add_argument("--out", type=Path, help="folder to write the page into")
    return made


if __name__ == "__main__":
    run_command(main)
