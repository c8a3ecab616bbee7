"""Options that mean the same in every command, and the paths that options name."""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jaxptd.atomic_files import explained
from jaxptd.errors import UserError, quoted
from jaxptd.fields.values import ImpossibleError, Rules, convert
from jaxptd.plot import drawing, format_of
from jaxptd.stores import Place, place

T = TypeVar("T")


def add_words(parser: Any, *, quiet: str, json: str = "", picture: str = "") -> None:
    """Adds `--json`, `--quiet` and `--picture F` to a parser.

    Args:
        parser: of a command.
        quiet: help of `--quiet`.
        json: what `--json` prints. Empty leaves the option out.
        picture: what `--picture` draws. Empty leaves the option out.
    """
    if json:
        parser.add_argument("--json", action="store_true", help=f"print {json} as JSON")
    parser.add_argument("--quiet", action="store_true", help=quiet)
    if picture:
        help_text = f"draw {picture} into a .png or .svg file"
        parser.add_argument("--picture", metavar="F", help=help_text)


def add_compiled(parser: Any) -> None:
    """Adds `--compiled BOOL` to the parser of a command that compiles a step only to read it."""
    help_text = "also compile the step, which takes most of the time"
    parser.add_argument("--compiled", type=bool, default=True, help=help_text)


def picture_path(option: str | None) -> Path | None:
    """The file that `--picture` names, checked; None without the option.

    Raises:
        UserError: no picture can be written there.
    """
    if option is None:
        return None
    path = as_path(option, "--picture")
    format_of(path)
    if not os.path.isdir(path.parent) or not os.access(path.parent, os.W_OK):
        raise UserError(
            f"--picture {path}: cannot write in {path.parent}; name a file in a folder that exists "
            "and is writable"
        )
    drawing("jaxptd.plot.style")
    return path


def check_out(path: Path, *, overwrite: bool) -> None:
    """Raises UserError for a file that exists or cannot be written."""
    shown = quoted(str(path), 255)
    if os.path.isdir(path) or (os.path.lexists(path) and not os.path.isfile(path)):
        raise UserError(f"--out {shown}: not a regular file; name another")
    if os.path.lexists(path) and not overwrite:
        raise UserError(f"--out {shown}: exists; name another file, or add --overwrite")
    with explained(f"--out {shown}", "name a file in a writable folder"):
        probe = path.with_name(f".{path.name}.partial")
        probe.unlink(missing_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # another process of the run may have removed it


def path_option(text: str) -> Path:
    """Reads a path on disk for argparse: the `type` of an option."""
    return Path(_for_argparse(as_path, text))


def place_option(text: str) -> Place:
    """Reads a path on disk or a URL in a store for argparse: the `type` of an option."""
    return _for_argparse(as_place, text)


def pattern_option(text: str) -> str:
    """Reads a path, a glob or a URL for argparse, as text: the `type` of an option."""
    return _for_argparse(partial(_path_text, stores=True), text)


def _for_argparse(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def as_path(text: str, option: str = "") -> Path:
    """Reads a path that an option names; `~` is the home directory.

    Args:
        text: the path.
        option: its name, for the message.

    Raises:
        UserError: no file can have such a path.
    """
    return Path(_path_text(text, option))


def as_place(text: str, option: str = "") -> Place:
    """Reads a path as `as_path`, or a URL in a store."""
    return place(_path_text(text, option, stores=True), field=option)


def _path_text(text: str, option: str = "", *, stores: bool = False) -> str:
    try:
        if path := convert(text, str, Rules(stores=stores)):
            return str(path)
    except ImpossibleError as error:
        raise UserError(f"{option} {quoted(repr(text))}: {error}".strip()) from error
    raise UserError(f"{option} '' is not a path; name a file or directory".strip())
