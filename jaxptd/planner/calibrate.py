"""The options of `jaxptd plan calibrate`, read and checked before anything starts a device."""

import dataclasses
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxptd.atomic_files import explained
from jaxptd.commands.words import add_words, path_option
from jaxptd.errors import Parser, UserError, did_you_mean, quoted
from jaxptd.hardware import Figure
from jaxptd.hardware.table import PACKAGED, read_figures

SECONDS = 150.0  # that samples may take by default
LONGEST = 3600.0
NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices of a calibration.

    Args:
        out: the file to write.
        name: of the accelerator in it.
        gpu: of the accelerator whose limits the shares are of; None: found from the device.
        figures: the numbers of all that are known, by name.
        seconds: after which no other sample begins.
        overwrite: whether `out` may exist.
        json, quiet: how the result is printed.
    """

    out: Path
    name: str
    gpu: str | None
    figures: Mapping[str, Mapping[str, Figure]]
    seconds: float
    overwrite: bool
    json: bool
    quiet: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Times kernels and collectives on this machine, and writes its hardware file."""
    options = read(parser().parse_args(argv))
    # Found by its name: it imports jax, and is above the planner.
    found = importlib.import_module("jaxptd.calibration.command")
    return int(found.run(options))


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd plan calibrate --out cluster.yaml",
        "jaxptd plan calibrate --out cluster.yaml --gpu h200 --name mynode",
    )
    made = Parser(prog="jaxptd plan calibrate", description=main.__doc__, examples=examples)
    help_text = "the hardware file to write; it must not exist yet"
    made.add_argument("--out", type=path_option, metavar="F", help=help_text)
    help_text = "the accelerator's name in that file; default: the file's"
    made.add_argument("--name", metavar="N", help=help_text)
    help_text = "the accelerator whose limits to start from; default: found from the device"
    made.add_argument("--gpu", metavar="G", help=help_text)
    help_text = "a YAML file of accelerators, beside the packaged ones"
    made.add_argument("--hardware", type=path_option, metavar="F", help=help_text)
    help_text = f"after which no other program is timed; default: {SECONDS:g}"
    made.add_argument("--seconds", type=float, metavar="S", help=help_text)
    made.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    add_words(made, json="shares and times", quiet="print the shares only, no progress")
    return made


def read(args: Any) -> Options:
    """Checks the options of a calibration.

    Raises:
        UserError: one of them is wrong, or the file exists or cannot be written.
    """
    if args.out is None:
        raise UserError("calibrate writes a file; name it with --out, such as --out cluster.yaml")
    seconds = SECONDS if args.seconds is None else args.seconds
    if not 0 < seconds <= LONGEST:
        raise UserError(f"--seconds {seconds:g}: use more than 0 and at most {LONGEST:g}")
    figures = {**read_figures(PACKAGED), **(read_figures(args.hardware) if args.hardware else {})}
    if args.gpu is not None and args.gpu not in figures:
        remedy = did_you_mean(args.gpu, figures, otherwise=f"use one of {', '.join(figures)}")
        raise UserError(f"--gpu {quoted(args.gpu)}: no such accelerator; {remedy}")
    check_out(args.out, overwrite=args.overwrite)
    name = args.out.stem if args.name is None else args.name
    if not NAME.fullmatch(name):
        raise UserError(
            f"--name {quoted(repr(name))}: use letters, digits, '.', '-' and '_', a letter first, "
            "at most 64"
        )
    return Options(
        args.out, name, args.gpu, figures, seconds, args.overwrite, args.json, args.quiet
    )


def check_out(path: Path, *, overwrite: bool) -> None:
    """Raises UserError for a file that exists, or that cannot be written."""
    shown = quoted(str(path), 255)
    if os.path.isdir(path) or (os.path.lexists(path) and not os.path.isfile(path)):
        raise UserError(f"--out {shown}: is no file; name another")
    if os.path.lexists(path) and not overwrite:
        raise UserError(f"--out {shown}: exists; name another file, or give --overwrite")
    with explained(f"--out {shown}", "name a file in a folder that can be written"):
        probe = path.with_name(f".{path.name}.partial")
        probe.unlink(missing_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # another process of the run may have done it
