"""Short `--help` for commands with many options; `--help-all` lists every option."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

LEFT, RIGHT = 36, 62  # widths of the two columns: an option with its value, and its help


class _ShortHelp(argparse._HelpAction):
    """Prints the most common options, and examples."""

    def __init__(self, usual: Sequence[str] = (), examples: Sequence[str] = (), **options: Any):
        super().__init__(**options)
        self.usual, self.examples = usual, examples

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(short_help(parser, self.usual, self.examples), end="")
        parser.exit()


def add_help(
    parser: argparse.ArgumentParser, *, usual: Sequence[str], examples: Sequence[str]
) -> None:
    """Adds a short `--help` and a complete `--help-all` to a parser that has neither.

    Args:
        parser: made with `add_help=False`.
        usual: fields of the config that `--help` shows; it always shows the command's own options.
        examples: command lines shown at the end.
    """
    parser.add_argument(
        *("-h", "--help"),
        action=_ShortHelp,
        usual=usual,
        examples=examples,
        help="show the most common options",
    )
    parser.add_argument("--help-all", action="help", help="show every option with its default")


def short_help(
    parser: argparse.ArgumentParser, usual: Sequence[str], examples: Sequence[str]
) -> str:
    """The text of `--help`: what the command does, the most common options, examples."""
    actions = [action for action in parser._actions if is_shown(action) and "." not in action.dest]
    fields = [parser._option_string_actions[name] for name in usual]
    return "\n".join(
        [
            parser.format_usage().rstrip(),
            *("", parser.description or ""),
            *("", "options:", *map(_row, actions)),
            *("", "most common config fields, with their defaults:", *map(_row, fields)),
            *("", "examples:", *(f"  {example}" for example in examples)),
            "",
        ]
    )


def _row(action: argparse.Action) -> str:
    """An option with its default or its value's name, and the first words of its help."""
    names = ", ".join(action.option_strings)
    left = f"{names} {'' if action.nargs == 0 else _value(action)}"
    return f"  {left:<{LEFT}}{first_words(action.help or '')}"


def _value(action: argparse.Action) -> str:
    default = getattr(action, "shown", action.default)  # fields have no default in argparse
    unset = default in (None, []) or default is argparse.SUPPRESS
    value = action.metavar if unset else default
    text = "" if value is None else str(value)
    return text.lower() if isinstance(value, bool) else text


def first_words(text: str) -> str:
    """A help text up to its first punctuation mark other than a comma, cut to one line."""
    first = re.split(r"[.;:](\s|$)", " ".join(text.split()), maxsplit=1)[0]
    return first if len(first) <= RIGHT else f"{first[: RIGHT - 4].rpartition(' ')[0]} ..."


def is_shown(action: argparse.Action) -> bool:
    """True for an option that help and completion show."""
    return bool(action.option_strings) and action.help != argparse.SUPPRESS
