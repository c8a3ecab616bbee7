"""Prints the collectives of a training step by kind, axes, bytes and executions.

`python -m jaxptd.comms --config F [overrides] [--json]` traces the step, counts every collective of
its jaxpr and of the compiled HLO, and compares both with the formula. It runs nothing and makes no
parameters.

`count.py` defines the bytes of a collective. `wire_bytes` is what each device of a ring of g sends:
(g-1)/g of those bytes, twice that for an all-reduce, all of them for a permute or a broadcast.
From Python: `jaxptd.comms(config)`; for one program `comms.count(program)`, ...
"""

import functools
import json
from collections.abc import Sequence

from rich.console import Console

from jaxptd import plot
from jaxptd.analysis.count import collectives_of, count, count_compiled, formula, per_layer
from jaxptd.analysis.traffic.step import CommsReport
from jaxptd.commands.command_line import ConfigParser
from jaxptd.commands.run_options import read_run, run_parser
from jaxptd.common_options import add_compiled, add_words, picture_path
from jaxptd.config import Config
from jaxptd.costs.collective import add_up, subtract
from jaxptd.display import callable_module
from jaxptd.errors import run_command
from jaxptd.fields import checked
from jaxptd.mesh import make_mesh
from jaxptd.run.devices import ready
from jaxptd.step import Program

__all__ = [
    "CommsReport",
    "add_up",
    "collectives_of",
    "comms",
    "count",
    "count_compiled",
    "formula",
    "main",
    "per_layer",
    "subtract",
]


@checked("jaxptd.comms")
def comms(config: Config, *, compiled: bool = True) -> CommsReport:
    """Counts the bytes a training step sends, by collective and mesh axis. Runs nothing.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--layout.dp=2", "--model.num_layers=1"])
    >>> jaxptd.comms(config).as_formula
    True

    Args:
        config: what to count; its data is not read.
        compiled: also count the collectives of XLA's compiled program; compiling takes most of the
            time.

    Raises:
        UserError: too few devices.
    """
    config, where = ready(config)
    program = Program(config, make_mesh(config.layout))
    return CommsReport(
        layout=config.layout,
        devices=where,
        jaxpr=count(program),
        compiled=count_compiled(program) if compiled else None,
        formula=formula(program),
        per_layer=per_layer(program),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Counts the bytes a training step moves between devices, and compares with the formula."""
    config, options = read_run(parser(), argv)
    picture = picture_path(options["picture"])
    report = comms(config, compiled=options["compiled"])
    if picture:
        plot.save(plot.bytes_by_axis(report), picture)
    if options["json"]:
        print(json.dumps(report.as_dict()))
        return 0
    console = Console()
    if not options["quiet"]:
        console.print(f"{config.layout} on {report.devices}", highlight=False)
        for name in report.titles:
            console.print(report.table(name))
    console.print(report.verdict)
    return 0


@functools.cache
def parser() -> ConfigParser:
    """Makes the parser of this command."""
    examples = (
        "--config quickstart",
        "--config quickstart --layout.dp 2 --layout.cp 2 --layout.tp 1 --json",
        "--run-dir runs/quickstart --layout.zero 3 --compiled false",
    )
    parser = run_parser("comms", main.__doc__ or "", examples=examples)
    quiet = "print only whether the step moves what the formula says"
    add_words(parser, json="the counts", quiet=quiet, picture="the bytes by axis")
    add_compiled(parser)
    return parser


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
