"""Prints what a device holds in a training step: published, by formula, counted, and compiled.

`python -m jaxptd.memory --config F [overrides] [--json]` prints, for one device, the bytes that the
literature gives, this library's formula (`analysis/memory_model.py`), the bytes that the jaxpr of
the step keeps, and those of the compiled program. Nothing is run, and no parameter is made.
From Python: `memory.report(config)`, `memory.counted(program)`.
"""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jaxptd.analysis.memory_report import COLUMNS, Row, counted, report
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.run.devices import prepare

__all__ = ["counted", "main", "report"]


def _table(rows: Sequence[Row]) -> Table:
    table = Table("part", *COLUMNS, title="bytes of one device")
    for row in rows:
        sizes = (row.get(name) for name in COLUMNS)
        table.add_row(row["part"], *("" if size is None else f"{size:,}" for size in sizes))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts what one training step holds on each device, and compiles it to compare."""
    parser = make_parser("python -m jaxptd.memory", main.__doc__ or "")
    parser.add_argument("--json", action="store_true", help="print JSON")
    config, options = parse(parser, argv)
    config = with_vocabulary(config)
    where = prepare(config)
    rows = report(config)
    if options["json"]:
        plain = [{"part": row["part"].strip(), **{n: row.get(n) for n in COLUMNS}} for row in rows]
        print(json.dumps({"layout": str(config.layout), "rows": plain}))
        return 0
    console = Console()
    console.print(f"{config.layout} on {where}", highlight=False)
    console.print(_table(rows))
    return 0


if __name__ == "__main__":
    run_command(main)
