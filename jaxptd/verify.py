"""Verifies that a layout computes what one device computes, in one training step of the real model.

`python -m jaxptd.verify --config F [overrides]` runs the step in float64 and in float32 on the
layout and on one device, and compares every gradient and every updated parameter. If the config
computes in bfloat16, the layout also runs in bfloat16, with the attention kernel that it trains
with, and is compared with float32 on one device. Products are native, even if the config trains in
fp8. Exit code 0: equal; 1: not equal, and the first wrong tensor in the order of backward is named.
"""

from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from jaxptd.analysis import verification
from jaxptd.analysis.comparison import Row
from jaxptd.analysis.verification import REFERENCE_DTYPE, Report
from jaxptd.config import Config, Dtype
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.display import callable_module
from jaxptd.errors import run_command
from jaxptd.layers.attention import choose_kernel
from jaxptd.run.devices import prepare, ready

__all__ = ["Report", "Row", "main", "verify"]


def verify(config: Config, *, dtype: Dtype = "float64") -> Report:
    """Compares one training step of a config on its layout with the same step on one device.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--layout.tp=2", "--model.num_layers=1"])
    >>> jaxptd.verify(config, dtype="float32").equal
    True

    Args:
        config: of a run; its data is not read.
        dtype: that both compute in: float64 finds mistakes, float32 also sums that are made in a
            lower precision; bfloat16 is compared with float32.

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
    """Proves that a layout computes what one device computes: exit code 0 equal, 1 not."""
    parser = make_parser("python -m jaxptd.verify", main.__doc__ or "")
    parser.add_argument("--quiet", action="store_true", help="print the verdicts only")
    config, options = parse(parser, argv)
    config = with_vocabulary(config)
    console = Console()
    console.print(f"verify {config.layout} on {prepare(config, double=True)}", highlight=False)
    choose_kernel(config, jax.devices()[0])  # now: bfloat16, which may be refused, is verified last
    equal = True
    precisions: tuple[Dtype, ...] = ("float64", "float32")
    if config.model.dtype in REFERENCE_DTYPE:
        precisions += (config.model.dtype,)
    for dtype in precisions:
        report = verify(config, dtype=dtype)
        if not options["quiet"] or report.wrong:
            console.print(_table(report))
        style = "bold red" if report.wrong else "green"
        console.print(report.verdict, highlight=False, style=style)
        equal &= not report.wrong
    return 0 if equal else 1


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
