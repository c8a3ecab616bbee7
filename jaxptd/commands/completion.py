"""Prints a completion script for bash, zsh or fish, made from the options of every command.

A script has the options as they are now: write it again after an update.
"""

import argparse
import re
from collections.abc import Sequence

from jaxptd.commands.help import first_words, is_shown
from jaxptd.commands.shells import SCRIPTS, Choices, Completed, Option
from jaxptd.commands.table import COMMANDS
from jaxptd.config.packaged import packaged_configs
from jaxptd.errors import Parser, run_command

LITERAL = re.compile(r"\{([^{}]+)\}")  # the values of an option, as jsonargparse shows them


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a script that completes commands and options in a shell."""
    print(completion_script(parser().parse_args(argv).shell), end="")


def completion_script(shell: str) -> str:
    """The script for a shell, one of `SCRIPTS`."""
    found = [
        Completed(command.name, command.summary, *_options_and_words(command.load().parser()))
        for command in COMMANDS
    ]
    return SCRIPTS[shell](found)


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd completion bash > ~/.local/share/bash-completion/completions/jaxptd",
        "jaxptd completion zsh > ~/.zfunc/_jaxptd          (a folder of $fpath)",
        "jaxptd completion fish > ~/.config/fish/completions/jaxptd.fish",
    )
    made = Parser(prog="jaxptd completion", description=main.__doc__, examples=examples)
    made.add_argument("shell", choices=tuple(SCRIPTS), help="the shell")
    return made


def _options_and_words(parser: argparse.ArgumentParser) -> tuple[list[Option], Choices]:
    """The options that a parser's help shows, and the words that it takes without one."""
    options = [
        Option(
            name=name,
            help=first_words(action.help or ""),
            takes_value=action.nargs not in (0, "?"),
            choices=_choices(action),
            files=not _choices(action) or action.dest == "config",
        )
        for action in filter(is_shown, parser._actions)
        for name in action.option_strings
        if name.startswith("--") and not name.endswith("+")
    ]
    words = [_choices(action) for action in parser._actions if not action.option_strings]
    return options, sum(words, ())


def _choices(action: argparse.Action) -> Choices:
    """The values of an option that can be listed; for `--config` the packaged configs."""
    if action.dest == "config":
        return tuple(packaged_configs())
    if action.choices:
        return tuple(map(str, action.choices))
    names = LITERAL.fullmatch(str(action.metavar))
    return tuple(names[1].split(",")) if names else ()


if __name__ == "__main__":
    run_command(main)
