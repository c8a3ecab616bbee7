"""Runs a command: its exit code, and one line for what can go wrong with a person's input."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from jaxptd.errors.messages import BAD_INPUT, INTERRUPTED, QUOTED, UserError, quoted
from jaxptd.errors.signals import ending_at_once

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})  # of a write


def print_error(message: object) -> None:
    """Writes one line to stderr, with one call, so that processes' lines do not mix."""
    _print_line(f"error: {message}")


def run_command(main: Callable[[], int | None]) -> None:
    """Runs `main` as a command and exits with its result; a `UserError` is one line and exit 2.

    SIGINT (Ctrl-C) ends it within seconds, also while it is inside JAX.
    """
    _open_missing_streams()
    try:
        with ending_at_once(_stopped):
            code = main()
            sys.stdout.flush()
    except UserError as error:
        print_error(error)
        code = BAD_INPUT
    except ValueError as error:
        if not (line := of_environment(error)):
            raise
        print_error(line)
        code = BAD_INPUT
    except KeyboardInterrupt:
        code = _stopped()
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


def say_errors_of_imports() -> None:
    """Makes what is wrong in the environment one line in `python -m jaxptd.NAME` too.

    JAX reads its variables when it is imported, and such a module imports it before `run_command`.
    """
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        line = of_environment(error) if isinstance(error, ValueError) else ""
        if not line:
            shown(kind, error, where)
            return
        print_error(line)
        sys.exit(BAD_INPUT)

    sys.excepthook = show


def of_environment(error: ValueError) -> str:
    """A line for JAX's error at its import about one of its variables; empty for any other."""
    words = str(error).lower()
    names = [name for name in os.environ if name.startswith("JAX_") and name.lower() in words]
    if not names:
        return ""
    name = max(names, key=len)  # JAX_PLATFORM is in JAX_PLATFORMS, say
    value = f"{name}={quoted(os.environ[name])}"
    return f"the environment has {value}: {quoted(str(error), 2 * QUOTED)}; unset it, or mend it"


def _stopped() -> int:
    _print_line("stopped")
    return INTERRUPTED


def discard(stream: TextIO) -> None:
    """Discards all further output of a stream that cannot be written.

    Python flushes once more at exit; if that fails, the exit code would be 120.
    """
    with contextlib.suppress(OSError, ValueError):  # a stream of no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _print_line(line: str) -> None:
    try:
        sys.stderr.write(f"{' '.join(line.split())}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody can read it
        discard(sys.stderr)


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
