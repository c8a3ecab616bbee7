"""Errors that a user can fix, and how a command reports them: in one line, with the remedy."""

import argparse
import contextlib
import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

BUG = 1
BAD_INPUT = 2
LOST = 3  # a process of the run is dead or stuck
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
TERMINATED = 143  # 128 + SIGTERM
QUOTED = 80  # characters of a value in a message
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})  # of a write


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
        near = difflib.get_close_matches(unknown[1], self._option_string_actions) if unknown else []
        return f"did you mean {near[0]}?" if near else "see --help"


def print_error(message: object) -> None:
    """Writes one line to stderr, with one call, so that processes' lines do not mix."""
    _print_line(f"error: {message}")


def run_command(main: Callable[[], int | None]) -> None:
    """Runs `main` as a command and exits with its result; a `UserError` is one line and exit 2."""
    _open_missing_streams()
    try:
        code = main()
        sys.stdout.flush()
    except UserError as error:
        print_error(error)
        code = BAD_INPUT
    except KeyboardInterrupt:
        _print_line("stopped")
        code = INTERRUPTED
    except BrokenPipeError:
        discard(sys.stdout)
        code = 0
    except OSError as error:
        if error.errno not in FULL:
            raise
        discard(sys.stdout)
        where = error.filename or "the output"
        print_error(f"cannot write {where}: {error.strerror}; free some space, or write elsewhere")
        code = BAD_INPUT
    sys.exit(code)


def discard(stream: TextIO) -> None:
    """Discards all further output of a stream that cannot be written.

    Python flushes once more at exit; if that fails, the exit code would be 120.
    """
    with contextlib.suppress(OSError, ValueError):  # a stream of no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _print_line(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody can read it
        sys.stderr.write(f"{' '.join(line.split())}\n")
        sys.stderr.flush()


def _open_missing_streams() -> None:
    """Opens the null device for a standard stream that is closed (`>&-`).

    Otherwise the next file to be opened gets the stream's number, and output of libraries.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
