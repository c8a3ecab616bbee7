"""The parser of a command's options, which raises what it cannot read."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxptd.errors.messages import QUOTED, UserError, did_you_mean, quoted


class Parser(argparse.ArgumentParser):
    """argparse's parser. Raises bad arguments as `UserError` and knows no abbreviated options.

    Args:
        examples: command lines that `--help` ends with.
        options: argparse's.
    """

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        lines = ["examples:", *(f"  {example}" for example in examples)]
        style = argparse.RawDescriptionHelpFormatter
        own = {"formatter_class": style, "epilog": "\n".join(lines) if examples else None}
        super().__init__(**{"allow_abbrev": False, **own, **options})
        if self.add_help:  # the other commands' --help is shorter than their --help-all
            self.add_argument("--help-all", action="help", help="the same")

    def error(self, message: str) -> NoReturn:
        words = " ".join(map(quoted, message.split()))
        raise UserError(f"{quoted(words, 4 * QUOTED)}; {self._remedy(message)}")

    def _remedy(self, message: str) -> str:
        """Names the option that is most like an unknown one."""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        known = self._option_string_actions if unknown else ()
        return did_you_mean(unknown[1] if unknown else "", known, otherwise="see --help")
