"""Measures the time of a training step by part, with JAX's profiler on the devices at hand.

`python -m jaxptd.profile --config configs/gpt2-124m.yaml [--steps 5] [--picture step.svg]`

Prints the milliseconds of each part of a step: a scope of the model, and products, attention
kernel, other kernels or collectives (`step_parts.py`). Times are averaged over the devices; kernels
that run at once on one device each count in full. `--trace DIR` keeps the trace, which Perfetto and
XProf open. The tokens are random; no data is read. From Python: `jaxptd.profile(config)`.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxptd.analysis.profiling.profiler import measure
from jaxptd.analysis.profiling.step_parts import ProfileReport, lines
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.display import callable_module
from jaxptd.errors import UserError, run_command
from jaxptd.plot import drawing
from jaxptd.run.devices import prepare, ready


def profile(config: Config, *, steps: int = 5, trace: Path | None = None) -> ProfileReport:
    """Measures where the time of a config's training step goes, on the devices at hand.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--model.num_layers=1"])
    >>> jaxptd.profile(config, steps=1).times["mlp", "products"] > 0  # doctest: +SKIP
    True

    Args:
        config: of a run; its data is not read, the tokens are random.
        steps: in the trace, after two.
        trace: a new directory that keeps the trace; None keeps none.

    Raises:
        UserError: too few devices.
    """
    config, where = ready(config)
    with tempfile.TemporaryDirectory() as temporary:
        times = measure(config, steps, trace or Path(temporary))
    return ProfileReport(f"{config.layout}, {where}", times)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures where the time of a training step goes."""
    parser = make_parser("python -m jaxptd.profile", main.__doc__ or "")
    parser.add_argument("--steps", type=int, default=5, help="in the trace, after two")
    parser.add_argument("--picture", default="", help="SVG file to draw")
    parser.add_argument("--trace", default="", help="directory that keeps the trace")
    config, options = parse(parser, argv)
    trace, picture = _checked(options)
    pictures = drawing("jaxptd.analysis.profiling.step_picture") if picture else None
    for option, directory in (("trace", trace), ("picture", picture and picture.parent)):
        if directory:
            _make_directory(option, directory)
    config = with_vocabulary(config)
    Console().print(f"profiling {config.layout} on {prepare(config)}", highlight=False)
    found = profile(config, steps=options["steps"], trace=trace)
    print(versions())
    print(table([("part", "kernels", "ms a step", "share"), *lines(found.times)]))
    if pictures:
        pictures.draw(picture, {found.title: found.times}, "ms a step, measured")
    return 0


def _checked(options: Mapping[str, Any]) -> tuple[Path | None, Path | None]:
    """The paths of the trace and the picture.

    Raises:
        UserError: an option that cannot be.
    """
    if options["steps"] < 1:
        raise UserError(f"--steps={options['steps']} must be at least 1")
    trace, picture = (Path(options[n]) if options[n] else None for n in ("trace", "picture"))
    if trace and trace.exists():
        raise UserError(f"--trace={trace}: is there already; name a new directory")
    if picture and picture.suffix != ".svg":
        raise UserError(f"--picture={picture}: name a file that ends in .svg")
    return trace, picture


def _make_directory(option: str, directory: Path) -> None:
    """Makes the directory that an option needs, before anything runs."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--{option}: {error.strerror}: {directory}") from error


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
