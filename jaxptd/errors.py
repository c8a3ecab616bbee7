"""Errors that a user can fix, and how a command reports them: in one line, with the remedy."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

BUG = 1
BAD_INPUT = 2
LOST = 3  # a process of the run is dead or stuck
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
QUOTED = 80  # characters of a value in a message


class UserError(ValueError):
    """Bad input. The message is one line that gives the error, its numbers and the remedy."""


def quoted(value: object, longest: int = QUOTED) -> str:
    """Shows a value in a message: on one line, cut to `longest` characters, without control codes.

    A text is shown without quotes; pass its `repr` to have them.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # more digits than Python writes, or too deeply nested
        text = f"<{type(value).__name__}>"
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


class Parser(argparse.ArgumentParser):
    """argparse's parser. Raises bad arguments as `UserError` and knows no abbreviated options."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        words = " ".join(map(quoted, message.split()))
        raise UserError(f"{quoted(words, 4 * QUOTED)}; see --help")


def print_error(message: object) -> None:
    """Writes one line to stderr, with one call, so that processes' lines do not mix."""
    sys.stderr.write(f"error: {' '.join(str(message).split())}\n")
    sys.stderr.flush()


def run_command(main: Callable[[], int | None]) -> None:
    """Runs `main` as a command and exits with its result; a `UserError` is one line and exit 2."""
    try:
        code = main()
        sys.stdout.flush()
    except UserError as error:
        print_error(error)
        code = BAD_INPUT
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of the output (`| head`) has ended, and Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
