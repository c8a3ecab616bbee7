"""Verifies that a layout computes what one device computes, in one training step of the real model.

`python -m jaxptd.verify --config F [overrides]` runs the step in float64 and in float32 on the
layout and on one device, and compares every gradient and every updated parameter. If the config
trains in bfloat16 or float16, the layout also runs in that precision, with the attention kernel it
trains with, and is compared with float32 on one device; the same goes for fp8 matmuls. The exit
code is 0 if all are equal, else 1, with the first wrong tensor in the order of backward named.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxptd.analysis import verification
from jaxptd.analysis.comparison import Row
from jaxptd.analysis.verification import REFERENCE_DTYPE, Precision, Report
from jaxptd.commands.command_line import ConfigParser
from jaxptd.commands.run_options import read_run, run_parser
from jaxptd.common_options import add_words
from jaxptd.config import Config
from jaxptd.display import callable_module
from jaxptd.errors import run_command
from jaxptd.fields import checked
from jaxptd.layers.attention import choose_kernel
from jaxptd.models.families import family_of, with_vocabulary
from jaxptd.proof.run import add_options, refuse_without_random, run_random
from jaxptd.run.devices import prepare, ready
from jaxptd.step.resolved import choose_kernels

__all__ = ["Report", "Row", "main", "verify"]


@checked("jaxptd.verify")
def verify(config: Config, *, dtype: Precision = "float64") -> Report:
    """Compares one training step of a config on its layout with the same step on one device.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--layout.tp=2", "--model.num_layers=1"])
    >>> jaxptd.verify(config, dtype="float32").equal
    True

    Args:
        config: what to compare; its data is not read.
        dtype: precision of both: float64 finds mistakes, float32 also reductions in a
            lower precision; bfloat16, float16 and fp8 matmuls are compared with float32.

    Raises:
        UserError: too few devices.
    """
    config, _ = ready(config)
    with jax.enable_x64(dtype == "float64" or bool(jax.config.read("jax_enable_x64"))):
        return verification.verify(config, dtype=dtype)


def _table(report: Report) -> Table:
    title = f"{report.layout}, {report.dtype}, against one device"
    table = Table("tensor", "what", "difference", "allowed", "", title=title)
    for row in report.rows:
        mark = "" if row.equal else "[red]WRONG[/red]"
        table.add_row(row.name, row.what, f"{row.error:.2e}", f"{row.allowed:.2e}", mark)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Proves that a layout computes what one device computes; exit code 0 if equal, 1 if not."""
    config, options = read_run(parser(), argv)
    if options["random"] is not None:
        return run_random(config, options)
    refuse_without_random(options)
    config = with_vocabulary(config)
    console = Console(quiet=options["json"])
    where = prepare(config, double=True)
    if not options["quiet"]:
        console.print(f"verify {config.layout} on {where}", highlight=False)
    # Check this now: low precisions are verified last, and may be refused.
    documents = family_of(config.model).has_documents(config)
    choose_kernel(config, jax.devices()[0], documents=documents)
    choose_kernels(config, jax.devices()[0])
    reports = []
    for dtype in _precisions(config):
        reports.append(verify(config, dtype=dtype))
        _print(console, reports[-1], quiet=options["quiet"])
    equal = not any(report.wrong for report in reports)
    if options["json"]:
        plain = [_as_dict(report) for report in reports]
        line = {"layout": str(config.layout), "devices": where, "equal": equal, "reports": plain}
        print(json.dumps(line))
    return 0 if equal else 1


@functools.cache
def parser() -> ConfigParser:
    """Makes the parser of this command."""
    examples = (
        "--config test-tiny --layout.tp 4 --layout.sequence_parallel true",
        "--config test-tiny --layout.row 2 --layout.col 2 --layout.matmul2d cannon",
        "--run-dir runs/quickstart --layout.dp 4 --layout.zero 3 --quiet",
        "--random 100 --seed 1 --minutes 10",
    )
    parser = run_parser("verify", main.__doc__ or "", examples=examples)
    add_options(parser)
    add_words(parser, json="all comparisons", quiet="print only the verdicts")
    return parser


def _precisions(config: Config) -> list[Precision]:
    model = config.model
    precisions: list[Precision] = ["float64", "float32"]
    precisions += [model.dtype] if model.dtype in REFERENCE_DTYPE else []
    return precisions + (["fp8"] if model.products == "fp8" else [])


def _print(console: Console, report: Report, *, quiet: bool) -> None:
    if not quiet or report.wrong:
        console.print(_table(report))
    style = "bold red" if report.wrong else "green"
    console.print(report.verdict, highlight=False, style=style)


def _as_dict(report: Report) -> dict[str, Any]:
    rows = [dataclasses.asdict(row) | {"equal": row.equal} for row in report.rows]
    return {"dtype": report.dtype, "verdict": report.verdict, "rows": rows}


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
