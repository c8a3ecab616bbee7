"""Runs one of the commands: `jaxptd NAME ...`, or `python -m jaxptd NAME ...`."""

import importlib.metadata
import platform
import sys
from collections.abc import Sequence

import jaxptd
from jaxptd.commands.table import COMMANDS, find_command
from jaxptd.errors import run_command


def main(argv: Sequence[str] | None = None) -> int | None:
    """Runs the command that the first argument names, with the other arguments."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "--help-all", "help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        print(_version())
        return 0
    code: int | None = find_command(name).load().main(rest)
    return code


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: jaxptd COMMAND [options]",
            "",
            "Trains transformers on many devices, and shows, proves and compares their layouts.",
            "",
            "commands:",
            *lines,
            "",
            "jaxptd COMMAND --help has a command's options and examples; jaxptd --version.",
        ]
    )


def _version() -> str:
    jax = importlib.metadata.version("jax")
    return f"jaxptd {jaxptd.__version__} (jax {jax}, Python {platform.python_version()})"


def run() -> None:
    """Runs `main` as the console script does."""
    run_command(main)


if __name__ == "__main__":
    run()
