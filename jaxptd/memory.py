"""Prints the memory of a training step per device: published, by formula, counted, and compiled.

`python -m jaxptd.memory --config F [overrides] [--json]` prints the bytes per device four times:
by the formulas of the literature, by this library's formula (`analysis/memory_model.py`), as the
step's jaxpr saves for backward, and as the compiled program allocates. It runs nothing and makes
no parameters. `--explain` prints instead what the step does with each group of parameters, and why:
where they live, when they are gathered, and how their gradients are reduced (`zero/plan.py`).
From Python: `jaxptd.memory(config)`, `jaxptd.memory.explain(config)`; for one program
`memory.counted(program)`.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from jaxptd import plot
from jaxptd.analysis.memory_report import MemoryReport, counted, report
from jaxptd.analysis.param_plans import ParamPlans, explain
from jaxptd.commands.command_line import ConfigParser
from jaxptd.commands.run_options import read_run, run_parser
from jaxptd.common_options import add_compiled, add_words, picture_path
from jaxptd.config import Config
from jaxptd.display import callable_module
from jaxptd.errors import UserError, run_command
from jaxptd.fields import checked
from jaxptd.run.devices import ready

__all__ = ["MemoryReport", "ParamPlans", "counted", "explain", "main", "memory", "report"]


@checked("jaxptd.memory")
def memory(config: Config, *, compiled: bool = True) -> MemoryReport:
    """Predicts what a device holds during a training step, and compiles the step to compare.

    Nothing is run, and no parameter is made.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--model.num_layers=1"])
    >>> jaxptd.memory(config).rows[0]
    {'part': 'parameters', 'published': 30720, 'formula': 30720}

    Args:
        config: what to predict; its data is not read.
        compiled: also compile the step, which takes most of the time.

    Raises:
        UserError: too few devices.
    """
    config, where = ready(config)
    return MemoryReport(config.layout, where, report(config, compiled=compiled))


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts the memory that a training step needs on each device, and compiles it to compare."""
    config, options = read_run(parser(), argv)
    if options["explain"]:
        return _explain(config, options)
    if options["quiet"] and not options["compiled"]:
        raise UserError(
            "--quiet prints only the compiled step's memory; leave out --compiled false"
        )
    picture = picture_path(options["picture"])
    report = memory(config, compiled=options["compiled"])
    if picture:
        plot.save(plot.memory(report), picture)
    if options["json"]:
        print(json.dumps(report.as_dict()))
        return 0
    console = Console()
    if not options["quiet"]:
        console.print(f"{config.layout} on {report.devices}", highlight=False)
    console.print(_compiled(report).table() if options["quiet"] else report.table())
    return 0


@functools.cache
def parser() -> ConfigParser:
    """Makes the parser of this command."""
    examples = (
        "--config quickstart",
        "--config quickstart --layout.zero 3 --model.remat full --compiled false",
        "--run-dir runs/quickstart --json",
        "--config quickstart --layout.dp 4 --layout.zero 3 --explain",
    )
    parser = run_parser("memory", main.__doc__ or "", examples=examples)
    quiet = "print only the compiled step's memory"
    add_words(parser, json="the table", quiet=quiet, picture="the bytes of each part")
    add_compiled(parser)
    explained = (
        "explain instead what ZeRO, offloading and accumulation do with each group of parameters, "
        "and why; compiles nothing and needs no devices"
    )
    parser.add_argument("--explain", action="store_true", help=explained)
    return parser


def _explain(config: Config, options: Mapping[str, Any]) -> int:
    for option, what in (("quiet", "the compiled step's memory"), ("picture", "bytes")):
        if options[option] not in (None, False):
            raise UserError(
                f"--{option} shows {what}, which --explain leaves out; use one of the two"
            )
    found = explain(config)
    print(json.dumps(found.as_dict()) if options["json"] else found)
    return 0


def _compiled(report: MemoryReport) -> MemoryReport:
    rows = [row for row in report.rows if "compiled" in row]
    return dataclasses.replace(report, rows=rows)


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
