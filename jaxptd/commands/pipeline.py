"""`jaxptd pipeline`: prints a schedule and its costs, and writes it to files."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxptd.commands.run_options import add_config, named_config
from jaxptd.common_options import add_words, path_option, picture_path
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.pipeline import picture, statistics
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import SCHEDULES, Schedule, make_schedule, to_csv
from jaxptd.pipeline.statistics import Durations, makespan

MOST = 2**17  # for stages * chunks * (stages + micro-batches * chunks): seconds of work


def report(schedule: Schedule, durations: Durations) -> dict[str, Any]:
    """The costs of a schedule, counted and simulated, and by formula where there is one.

    Times are in the unit of the durations, held activations in micro-batches. In `time`, stages
    wait only for their inputs; in `time_as_run`, stages that exchange values at a tick also wait
    for each other, as they do in the executor.
    """
    timing = statistics.simulate(schedule, durations)
    expected = statistics.expected_peak(schedule)
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "virtual_stages": schedule.chunks,
        "placement": schedule.placement,
        "ticks": schedule.ticks,
        "time": timing.makespan,
        "time_as_run": makespan(Plan(schedule, {"layers": (1,) * schedule.parts}), durations),
        "bubble": timing.bubble,
        "bubble_formula": statistics.expected_bubble(schedule, durations),
        "idle": timing.idle,
        "held": statistics.peak(schedule).tolist(),
        "held_formula": None if expected is None else expected.tolist(),
        "messages": statistics.messages(schedule),
    }


def _numbers(values: Sequence[float] | None) -> str:
    return "-" if values is None else " ".join(f"{value:g}" for value in values)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _summary(row: dict[str, Any]) -> Table:
    table = Table("", "counted", "by formula")
    table.add_row("ticks", str(row["ticks"]))
    table.add_row("time of a step", f"{row['time']:g}")
    table.add_row("as run, with waiting at hops", f"{row['time_as_run']:g}")
    table.add_row("bubble", _share(row["bubble"]), _share(row["bubble_formula"]))
    table.add_row("idle, with start and end", _share(row["idle"]))
    table.add_row("held by each stage", _numbers(row["held"]), _numbers(row["held_formula"]))
    table.add_row("messages", str(row["messages"]))
    return table


def _comparison(rows: Sequence[dict[str, Any]]) -> Table:
    names = ("schedule", "chunks", "ticks", "time", "run", "bubble", "formula", "held", "sent")
    first = rows[0]
    sizes = f"stages={first['stages']}, micro_batches={first['micro_batches']}"
    table = Table(*names, title=f"schedules of {sizes}")
    for row in sorted(rows, key=lambda row: [*SCHEDULES, row["schedule"]].index(row["schedule"])):
        table.add_row(
            row["schedule"],
            str(row["virtual_stages"]),
            str(row["ticks"]),
            f"{row['time']:g}",
            f"{row['time_as_run']:g}",
            _share(row["bubble"]),
            _share(row["bubble_formula"]),
            f"{np.max(row['held']):g}",
            str(row["messages"]),
        )
    return table


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd pipeline --schedule zb-h1 --stages 4 --micro-batches 8 --picture zb-h1.svg",
        "jaxptd pipeline --stages 8 --micro-batches 32 --compare",
        "jaxptd pipeline --config quickstart --layout.pp 2 --train.micro_batches 4",
    )
    parser = Parser(prog="jaxptd pipeline", description=main.__doc__, examples=examples)
    add = parser.add_argument
    known = f"{', '.join(SCHEDULES)}, or a .csv file"
    add("--schedule", "--layout.schedule", metavar="S", help=f"{known}; default: 1f1b")
    add("--stages", "--layout.pp", type=int, metavar="P", help="pipeline stages")
    names = ("--micro-batches", "--train.micro_batches")
    add(*names, type=int, metavar="M", help="micro-batches of a step")
    names = ("--virtual-stages", "--layout.virtual_stages")
    add(*names, type=int, metavar="V", help="chunks per stage, for interleaved")
    add_config(parser)
    times = "durations of a stage's forward, input gradient and weight gradients; default: 1 1 1"
    letters, equal = ("F", "B", "W"), list(statistics.EQUAL)
    add("--durations", type=float, nargs=3, metavar=letters, default=equal, help=times)
    add("--compare", action="store_true", help="compare all schedules in a table")
    add_words(parser, json="the numbers", quiet="print the numbers only", picture="the schedule")
    add("--trace", type=path_option, metavar="F", help="write a .json trace for ui.perfetto.dev")
    help_text = "write the schedule as a table, to edit and pass to --schedule"
    add("--csv", type=path_option, metavar="F", help=help_text)
    return parser


def _filled_in(args: argparse.Namespace) -> argparse.Namespace:
    """The options; a config fills in those that are left out."""
    config = named_config(args)
    known: dict[str, Any] = {"schedule": "1f1b"}
    if config:
        layout, micro_batches = config.layout, config.train.micro_batches
        known = {"stages": layout.pp, "micro_batches": micro_batches, "schedule": layout.schedule}
        if args.schedule is None:
            known["virtual_stages"] = layout.virtual_stages
    for option in ("stages", "micro_batches", "schedule", "virtual_stages"):
        if getattr(args, option) is None:
            setattr(args, option, known.get(option))
    for option in ("stages", "micro_batches"):
        if getattr(args, option) is None:
            name = option.replace("_", "-")
            raise UserError(
                f"--{name} is required; or name a config with --config F or --run-dir D"
            )
    return args


def _schedules(args: argparse.Namespace) -> list[Schedule]:
    """The chosen schedule, followed by all others with `--compare`."""
    sizes = {"stages": args.stages, "micro_batches": args.micro_batches}
    _check_size(**sizes, chunks=args.virtual_stages or 1)
    schedules = [make_schedule(args.schedule, **sizes, virtual_stages=args.virtual_stages)]
    if args.compare:
        others = (name for name in SCHEDULES if name != args.schedule)
        schedules += [make_schedule(name, **sizes) for name in others]
    for schedule in schedules:
        _check_size(schedule.stages, schedule.micro_batches, schedule.chunks)
    return schedules


def _check_size(stages: int, micro_batches: int, chunks: int) -> None:
    """Raises UserError for a table that would take minutes to build and to simulate."""
    if stages * chunks * (stages + micro_batches * chunks) > MOST:
        raise UserError(
            f"--stages {stages} x --micro-batches {micro_batches} with {chunks} chunks per stage: "
            "such a table takes minutes; use fewer (to shrink the bubble, add micro-batches: a "
            "stage's memory stays the same)"
        )


def _files(args: argparse.Namespace, schedule: Schedule, durations: Durations) -> dict[Path, bytes]:
    """The bytes to write, by path."""
    paths = [path for path in (args.picture, args.trace, args.csv) if path]
    if len(set(paths)) < len(paths):
        raise UserError("--picture, --trace and --csv name the same file; give each its own")
    files = {}
    if args.picture:
        files[args.picture] = picture.render(schedule, args.picture)
    if args.trace:
        files[args.trace] = json.dumps(picture.as_trace(schedule, durations)).encode()
    if args.csv:
        files[args.csv] = to_csv(schedule).encode()
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a pipeline schedule with its bubble, memory and messages, counted and by formula."""
    args = _filled_in(parser().parse_args(argv))
    args.picture = picture_path(args.picture)
    durations = Durations(*args.durations)
    schedules = _schedules(args)
    rows = [report(schedule, durations) for schedule in schedules]
    picture.write(_files(args, schedules[0], durations))
    for warning in filter(None, map(statistics.longer_than_needed, schedules)):
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(rows if args.compare else rows[0]))
        return 0
    console = Console(highlight=False)
    with console.capture() as captured:
        if args.compare:
            console.print(_comparison(rows))
        else:
            if not args.quiet:
                console.print(picture.as_text(schedules[0], width=console.width), soft_wrap=True)
            console.print(_summary(rows[0]))
    print(captured.get(), end="")
    return 0


if __name__ == "__main__":
    run_command(main)
