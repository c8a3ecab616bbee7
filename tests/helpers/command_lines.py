"""Command lines: documented ones, read by the command's parser, and refused ones."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence

import pytest

from jaxptd.commands.command_line import ConfigParser
from jaxptd.commands.run_options import read_run
from jaxptd.commands.table import LATER, find_command, later
from jaxptd.errors import run_command

COMMAND = re.compile(r"^(?:\$ )?(?:jaxptd |python -m jaxptd\.)(\w+)(?: (.*))?$", re.MULTILINE)


def command_lines(shell: str) -> Iterator[tuple[str, list[str]]]:
    """The name and the options of each `jaxptd NAME ...` or `python -m jaxptd.NAME ...`."""
    for name, options in COMMAND.findall(shell.replace("\\\n", " ")):
        optional = re.sub(r"\[(?!\d)([^\]]*)\]", r"\1", options)  # but not a list of numbers
        options = re.split(r" [>|]|&&", optional)[0]
        yield name, shlex.split(options, comments=True)


def accept(name: str, options: list[str]) -> None:
    """Reads a command line as the command does. Raises UserError for a wrong one."""
    module = find_command(name).load()
    if "--" in options:  # another command, which this one starts
        split = options.index("--")
        accept(options[split + 1], options[split + 2 :])
        options = options[:split]
    if options and f"{name} {options[0]}" in LATER:
        module, options = later(f"{name} {options[0]}"), options[1:]
    parser = module.parser()
    options = [each for each in options if each not in ("--help", "--help-all", "--print_config")]
    if isinstance(parser, ConfigParser):
        for name in {"--run-dir", "--from"} & set(options):  # the directory does not exist here
            options[(at := options.index(name)) : at + 2] = []
            options += [] if "--config" in options else ["--config", "quickstart"]
        read_run(parser, options, new=True)
    else:
        parser.parse_args(options)


def refused(capsys: pytest.CaptureFixture, main: Callable, argv: Sequence[str]) -> str:
    """The one line on stderr with which a command refuses its arguments: exit code 2, no output."""
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: main(argv))
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err
