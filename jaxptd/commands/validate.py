"""`jaxptd plan validate`: compares predicted training steps with measured ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxptd.common_options import add_words, path_option
from jaxptd.display import Table
from jaxptd.errors import Parser, UserError
from jaxptd.hardware import accelerators, find_accelerator
from jaxptd.planner.planning import RANGES
from jaxptd.planner.rows import read_rows
from jaxptd.planner.validation import Validation, predicted_rows, predicted_runs

MISSED = 1  # exit code


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts measured training steps and prints the errors; exit code 1 if one is too large."""
    args = parser().parse_args(argv)
    _check(args)
    if args.run_dir:
        validation = predicted_runs(args.run_dir, args.gpu, node=args.node, hardware=args.hardware)
    else:
        validation = validate(args.rows, args.hardware)
    if args.json:
        print(json.dumps(validation.as_dict()))
    else:
        print("\n".join(lines(validation)[int(args.quiet) :]))
    return MISSED if validation.missed() else 0


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd plan validate --rows measured.csv --json",
        "jaxptd plan validate --rows measured.csv --hardware cluster.yaml",
        "jaxptd plan validate --run-dir runs/gpt2-124m --gpu h200",
    )
    parser = Parser(prog="jaxptd plan validate", description=main.__doc__, examples=examples)
    help_text = "measured training steps (.csv)"
    parser.add_argument("--rows", type=path_option, metavar="F", help=help_text)
    help_text = "runs whose measured steps to predict; needs --gpu"
    parser.add_argument("--run-dir", type=path_option, nargs="+", metavar="D", help=help_text)
    parser.add_argument("--gpu", metavar="NAME", help="the accelerator that the runs used")
    help_text = "devices per node; default: as many as NVLink joins"
    parser.add_argument("--node", type=int, default=0, metavar="N", help=help_text)
    help_text = "a YAML file of accelerators, in addition to the packaged ones"
    parser.add_argument("--hardware", type=path_option, metavar="F", help=help_text)
    add_words(parser, json="rows, errors and bars", quiet="print the errors only, not the rows")
    return parser


def _check(args: Any) -> None:
    """Raises UserError for options that contradict each other, or that have no effect."""
    if bool(args.rows) == bool(args.run_dir):
        given = "both are given" if args.rows else "neither is given"
        raise UserError(f"--rows and --run-dir name the steps to predict, and {given}; use one")
    if args.run_dir and args.gpu is None:
        raise UserError(
            "--run-dir needs the accelerator of the runs; add --gpu, such as --gpu h200"
        )
    if not args.run_dir and (args.gpu is not None or args.node):
        name = "--node" if args.gpu is None else "--gpu"
        raise UserError(f"{name} has no effect without --run-dir; add it")
    least, most = RANGES["node"]
    if not least <= args.node <= most:
        raise UserError(f"--node {args.node}: use {least} to {most}")


def validate(rows: Path, hardware: Path | None) -> Validation:
    """Predicts rows of a file.

    Raises:
        UserError: a file is unreadable or has an impossible value, or an accelerator is unknown.
    """
    if hardware is not None:
        accelerators(hardware)  # also if no row needs it
    measured = read_rows(rows)
    machines = {row.hardware: find_accelerator(row.hardware, hardware) for row in measured}
    return predicted_rows(measured, machines)


def lines(validation: Validation) -> list[str]:
    """The table of predictions and their errors, and the bars they exceed."""
    columns = ("row", "program", "hardware", "GPUs", "measured s", "predicted s", "error", "bar")
    rows = [
        (
            each.row.name,
            each.row.program,
            each.row.hardware,
            each.row.gpus,
            _seconds(each.row.seconds),
            _seconds(each.seconds),
            f"{each.error:+.1%}",
            f"{each.bar:.1%}",
        )
        for each in validation.outcomes
    ]
    errors = f"mean error {validation.mean:.1%}, worst {validation.worst:.1%}"
    return [
        str(Table(validation.title, columns, rows)),
        errors,
        *(f"missed: {line}" for line in validation.missed()),
    ]


def _seconds(value: float) -> str:
    """Two decimals, or three significant digits where that shows more."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
