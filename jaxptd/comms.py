"""Prints the collectives of a training step by kind, axes, bytes and executions.

`python -m jaxptd.comms --config F [overrides] [--json]` traces the step, counts every collective of
its jaxpr and of the compiled HLO, and compares both with the formula. Nothing is run, and no
parameter is made.

`count.py` says what counts as bytes. `wire_bytes` is what a ring of g devices sends from each:
(g-1)/g of them, twice that for an all-reduce, all of them for a permute or a broadcast.
From Python: `comms.count(program)`, `comms.formula(program)`, ...
"""

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from jaxptd.analysis.collective import Collective, add_up, subtract
from jaxptd.analysis.count import collectives_of, count, count_compiled, formula, per_layer
from jaxptd.config import Config
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.mesh import make_mesh
from jaxptd.run.devices import prepare
from jaxptd.step import Program

__all__ = [
    "add_up",
    "collectives_of",
    "count",
    "count_compiled",
    "formula",
    "main",
    "per_layer",
    "report",
    "subtract",
]

TITLES = {
    "jaxpr": "one training step, from the jaxpr",
    "compiled": "one training step, from the compiled HLO",
    "formula": "one training step, by the formula",
    "per_layer": "of which one layer, forward and backward, all micro-batches",
}


def report(config: Config) -> dict[str, list[Collective]]:
    """The collectives of a config's training step by each of `TITLES`."""
    program = Program(config, make_mesh(config.layout))
    return {
        "jaxpr": count(program),
        "compiled": count_compiled(program),
        "formula": formula(program),
        "per_layer": per_layer(program),
    }


def _table(title: str, rows: Sequence[Collective], sizes: Mapping[str, int]) -> Table:
    table = Table("collective", "axes", "executions", "bytes", "ring bytes sent", title=title)
    for row in rows:
        table.add_row(
            row.kind,
            " x ".join(row.axes),
            f"{row.count:,}",
            f"{row.bytes:,}",
            f"{row.wire_bytes(sizes):,}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Counts what one training step moves between devices, and compares it with the formula."""
    parser = make_parser("python -m jaxptd.comms", main.__doc__ or "")
    parser.add_argument("--json", action="store_true", help="print JSON")
    config, options = parse(parser, argv)
    config = with_vocabulary(config)
    where = prepare(config)
    sizes = {str(axis): size for axis, size in config.layout.sizes.items()}
    found = report(config)
    if options["json"]:
        plain = {name: [row.as_dict(sizes) for row in each] for name, each in found.items()}
        print(json.dumps({"mesh": sizes, **plain}))
        return 0
    console = Console()
    console.print(f"{config.layout} on {where}", highlight=False)
    for name, rows in found.items():
        console.print(_table(TITLES[name], rows, sizes))
    same = subtract(found["jaxpr"], found["formula"]) == []
    console.print(f"the jaxpr {'moves' if same else 'does NOT move'} what the formula says")
    return 0


if __name__ == "__main__":
    run_command(main)
