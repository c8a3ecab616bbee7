"""Where the time of a training step goes, measured by JAX's profiler on the devices at hand.

`python -m jaxptd.profile --config configs/gpt2-124m.yaml [--steps 5] [--picture step.svg]`

Prints milliseconds of a step by part (`step_parts.py`): a scope of the model, and products,
attention kernel, other kernels or collectives. Times of devices that run at once are averaged;
where kernels lie over each other on one device, each counts in full. The trace itself, which
Perfetto and XProf open, stays where `--trace DIR` says. Random tokens, no data.
"""

import importlib
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxptd.analysis.profiling.profiler import measure
from jaxptd.analysis.profiling.step_parts import Times, lines
from jaxptd.analysis.report import table, versions
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import UserError, run_command
from jaxptd.run.devices import prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Measures where the time of a training step goes."""
    parser = make_parser("python -m jaxptd.profile", main.__doc__ or "")
    parser.add_argument("--steps", type=int, default=5, help="in the trace, after two")
    parser.add_argument("--picture", default="", help="SVG file to draw")
    parser.add_argument("--trace", default="", help="directory that keeps the trace")
    config, options = parse(parser, argv)
    if options["steps"] < 1:
        raise UserError(f"--steps={options['steps']} must be at least 1")
    trace, drawn = (options[name] and Path(options[name]) for name in ("trace", "picture"))
    if trace and trace.exists():
        raise UserError(f"--trace={trace}: is there already; name a new directory")
    if drawn and drawn.suffix != ".svg":
        raise UserError(f"--picture={drawn}: name a file that ends in .svg")
    if drawn:
        _pictures()
    for option, directory in (("trace", trace), ("picture", drawn and drawn.parent)):
        _make(option, directory)
    config = with_vocabulary(config)
    console = Console()
    where = prepare(config)
    console.print(f"profiling {config.layout} on {where}", highlight=False)
    with tempfile.TemporaryDirectory() as aside:
        times = measure(config, options["steps"], Path(trace or aside))
    print(versions())
    print(table([("part", "kernels", "ms a step", "share"), *lines(times)]))
    if drawn:
        draw(drawn, f"{config.layout}, {where}", times)
    return 0


def _pictures() -> Any:
    """Raises UserError: there is nothing to draw with."""
    try:
        return importlib.import_module("jaxptd.analysis.profiling.step_picture")
    except ModuleNotFoundError as error:
        raise UserError(
            f"--picture: {error.name} is not installed; pip install -e '.[viz]'"
        ) from error


def draw(path: Path, title: str, times: Times) -> None:
    """Writes the picture of one step."""
    pictures = _pictures()
    make = partial(pictures.picture, {title: times}, "ms a step, measured")
    pictures.svg.save({path.name: make}, path.parent, pictures.STYLE)


def _make(option: str, directory: Path | str) -> None:
    """Before anything runs. Raises UserError: it cannot be made."""
    try:
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--{option}: {error.strerror}: {directory}") from error


if __name__ == "__main__":
    run_command(main)
