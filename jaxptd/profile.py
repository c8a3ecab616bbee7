"""Measures the time of a training step by part, with JAX's profiler on the devices at hand.

`python -m jaxptd.profile --config configs/gpt2-124m.yaml [--steps 5] [--picture step.svg]`

Prints milliseconds per step for each part of the model, split into matmuls (`products`), attention
kernel, other kernels and collectives (`analysis/profiling.py`). Times are averaged over the
devices; kernels that run concurrently on one device each count in full. `--trace DIR` keeps the
trace for Perfetto and XProf. The tokens are random; no data is read. From Python:
`jaxptd.profile(config)`.
"""

import functools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxptd import plot
from jaxptd.analysis.profiling import ProfileReport, Times, lines, measure
from jaxptd.analysis.report import table, versions
from jaxptd.atomic_files import explained
from jaxptd.commands.command_line import ConfigParser
from jaxptd.commands.run_options import read_run, run_parser
from jaxptd.common_options import add_words, as_path, picture_path
from jaxptd.config import Config
from jaxptd.display import callable_module
from jaxptd.errors import UserError, run_command
from jaxptd.fields import checked
from jaxptd.models.families import with_vocabulary
from jaxptd.run.devices import prepare, ready

MAX_STEPS = 1000  # longer traces would fill a disk


@checked("jaxptd.profile")
def profile(config: Config, *, steps: int = 5, trace: Path | None = None) -> ProfileReport:
    """Measures where a training step spends its time, on this machine's devices.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--model.num_layers=1"])
    >>> jaxptd.profile(config, steps=1).times["mlp", "products"] > 0  # doctest: +SKIP
    True

    Args:
        config: what to time; its data is not read, the tokens are random.
        steps: steps to trace, after two warm-up steps.
        trace: a new directory for the trace; None keeps none.

    Raises:
        UserError: too few devices.
    """
    _check_steps("steps", steps)
    config, where = ready(config)
    with tempfile.TemporaryDirectory() as temporary:
        times = measure(config, steps, trace or Path(temporary))
    return ProfileReport(f"{config.layout}, {where}", times)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures where the time of a training step goes, on the devices of this machine."""
    config, options = read_run(parser(), argv)
    picture, trace = picture_path(options["picture"]), _checked_trace(options)
    if trace:
        with explained(f"--trace={trace}", "name a directory that can be created"):
            trace.mkdir(parents=True)
    config = with_vocabulary(config)
    where, plain, quiet = prepare(config), options["json"], options["quiet"]
    Console(quiet=plain or quiet).print(f"profiling {config.layout} on {where}", highlight=False)
    report = profile(config, steps=options["steps"], trace=trace)
    if plain:
        line = {"layout": str(config.layout), "devices": where, "parts": _parts(report.times)}
        print(json.dumps(line))
    else:
        _print(report.times, quiet=quiet)
    if picture:
        plot.save(plot.step_time(report), picture)
    return 0


@functools.cache
def parser() -> ConfigParser:
    """Makes the parser of this command."""
    examples = (
        "--config quickstart --picture step.svg",
        "--config gpt2-124m --layout.dp 1 --steps 10 --trace trace",
    )
    parser = run_parser("profile", main.__doc__ or "", examples=examples)
    parser.add_argument(
        "--steps", type=int, default=5, help="steps to trace, after two warm-up steps"
    )
    parser.add_argument("--trace", metavar="D", help="new directory to keep the trace in")
    quiet = "print only the table"
    add_words(
        parser, json="the seconds of each part", quiet=quiet, picture="the times of the parts"
    )
    return parser


def _checked_trace(options: Mapping[str, Any]) -> Path | None:
    """The directory of the trace. Raises UserError for an impossible option."""
    _check_steps("--steps", options["steps"])
    trace = options["trace"] and as_path(options["trace"], "--trace")
    if trace and os.path.exists(trace):
        raise UserError(f"--trace={trace}: already exists; name a new directory")
    return trace


def _check_steps(name: str, steps: int) -> None:
    if not 1 <= steps <= MAX_STEPS:
        raise UserError(f"{name}={steps} must be at least 1 and at most {MAX_STEPS}")


def _parts(times: Times) -> list[dict[str, Any]]:
    """The parts of a step, longest first, with seconds per step."""
    longest = sorted(times.items(), key=lambda item: -item[1])
    return [{"scope": s, "kind": kind, "seconds": seconds} for (s, kind), seconds in longest]


def _print(times: Times, *, quiet: bool) -> None:
    if not quiet:
        print(versions())
    print(table([("part", "kernels", "ms per step", "share"), *lines(times)]))


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
