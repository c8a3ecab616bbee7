"""Prints what a device holds in a training step: published, by formula, counted, and compiled.

`python -m jaxptd.memory --config F [overrides] [--json]` prints, for one device, the bytes that the
literature gives, this library's formula (`analysis/memory_model.py`), the bytes that the jaxpr of
the step keeps, and those of the compiled program. Nothing is run, and no parameter is made.
From Python: `jaxptd.memory(config)`; of one program `memory.counted(program)`.
"""

import json
from collections.abc import Sequence

from rich.console import Console

from jaxptd.analysis.memory_report import MemoryReport, counted, report
from jaxptd.config import Config
from jaxptd.config.command_line import make_parser, parse
from jaxptd.display import callable_module
from jaxptd.errors import run_command
from jaxptd.run.devices import ready

__all__ = ["MemoryReport", "counted", "main", "memory", "report"]


def memory(config: Config) -> MemoryReport:
    """Predicts what a device holds in a config's training step, and compiles it to compare.

    Nothing is run, and no parameter is made.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--model.num_layers=1"])
    >>> jaxptd.memory(config).rows[0]
    {'part': 'parameters', 'published': 30720, 'formula': 30720}

    Raises:
        UserError: too few devices.
    """
    config, where = ready(config)
    return MemoryReport(config.layout, where, report(config))


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts what one training step holds on each device, and compiles it to compare."""
    parser = make_parser("python -m jaxptd.memory", main.__doc__ or "")
    parser.add_argument("--json", action="store_true", help="print JSON")
    config, options = parse(parser, argv)
    found = memory(config)
    if options["json"]:
        print(json.dumps(found.as_dict()))
        return 0
    console = Console()
    console.print(f"{config.layout} on {found.devices}", highlight=False)
    console.print(found.table())
    return 0


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
