"""Errors in a user's input, and how commands report them: one line and an exit code."""

import argparse
import contextlib
import difflib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

# ---- bad input, exit codes -----------------------------------------------------------------------

BUG = 1
BAD_INPUT = 2
LOST = 3  # a process of the run is dead or stuck
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
QUOTED = 80  # most characters of a value in a message
ALIKE = 0.65  # difflib ratio of similar names: heads and num_heads are, extra and beta2 not
LONG_WORD = 200  # longest path or number that a message shows whole


class UserError(ValueError):
    """Raised for bad input. Its message is one line: what is wrong, the values, the remedy.

    A path or number of more than `LONG_WORD` characters is shortened in its middle.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(_LONG.sub(_cut, str(message)))

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython and Jupyter show instead of a traceback."""
        return [f"UserError: {' '.join(str(self).split())}"]


_LONG = re.compile(rf"\S{{{LONG_WORD + 1},}}")


def _cut(word: re.Match[str]) -> str:
    half = QUOTED // 2
    return f"{word[0][:half]}...{word[0][-half:]}"


class ArgumentError(UserError, TypeError):
    """An argument that a function or a config does not have, or one that is missing.

    Code that catches Python's own error for these, TypeError, catches it too.
    """


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest to a misspelt one; None if none is near."""
    matches = difflib.get_close_matches(name[:QUOTED], list(known), n=1, cutoff=ALIKE)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """The remedy for an unknown name: "did you mean X?", or what to do if none is near."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else otherwise


def quoted(value: object, longest: int = QUOTED) -> str:
    """Shows a value in a message: on one line, cut to `longest` characters, without control codes.

    Text is shown without quotes; pass its `repr` to get them.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # more digits than Python prints, or nested too deeply
        text = f"<{type(value).__name__}>"
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def install(extra: str) -> str:
    """Says how to install an extra: from the checkout, because the package is not on PyPI."""
    return f"in the checkout of jaxptd, pip install -e '.[{extra}]'"


# ---- small text files that a user names ----------------------------------------------------------

LARGEST = 10**6  # bytes


def read_small(path: str | Path, *, remedy: str, what: str = "") -> str:
    """The text of a file, without the byte order mark that spreadsheets write.

    Args:
        path: a regular file of at most `LARGEST` bytes.
        remedy: end of the error messages.
        what: word before the path in the error messages.

    Raises:
        UserError: the file is not a regular file, is unreadable, too large, or not text.
    """
    name = f"{what} {quoted(str(path), 255)}".strip()
    if os.path.exists(path) and not os.path.isfile(
        path
    ):  # reading a pipe, for example, might never end
        raise UserError(f"{name} is not a file on disk; {remedy}")
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        words = getattr(error, "strerror", None) or error
        raise UserError(f"{name}: {words}; {remedy}") from error
    if len(content) > LARGEST:
        raise UserError(f"{name} has more than {LARGEST} bytes; {remedy}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not text; {remedy}") from error


# ---- the parser of options -----------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` for bad arguments and accepts no abbreviations.

    Args:
        examples: command lines at the end of `--help`.
        options: passed to argparse.
    """

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        lines = ["examples:", *(f"  {example}" for example in examples)]
        style = argparse.RawDescriptionHelpFormatter
        defaults = {"formatter_class": style, "epilog": "\n".join(lines) if examples else None}
        super().__init__(**{"allow_abbrev": False, **defaults, **options})
        if self.add_help:  # the other commands' --help is shorter than their --help-all
            self.add_argument("--help-all", action="help", help="same as --help")

    def error(self, message: str) -> NoReturn:
        words = " ".join(map(quoted, message.split()))
        raise UserError(f"{quoted(words, 4 * QUOTED)}; {self._remedy(message)}")

    def _remedy(self, message: str) -> str:
        """Suggests the option nearest to an unknown one."""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        known = self._option_string_actions if unknown else ()
        return did_you_mean(unknown[1] if unknown else "", known, otherwise="see --help")


# ---- signals that ask a run to stop --------------------------------------------------------------

# A second signal of these ends the process at once.
INSISTING = (signal.SIGINT, signal.SIGTERM)
# These are only ever requests, however often they come. Closing a terminal sends SIGHUP, often
# twice: from the system and from the shell. Slurm's --signal and submitit send SIGUSR1 or SIGUSR2
# before the time is up, and SIGTERM when it is.
SIGNALS = (*INSISTING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# ---- signals while the main thread is inside JAX -------------------------------------------------

# A step or a compilation may take minutes, and Python runs signal handlers only between two of its
# own instructions. Its C handler runs at once, though, and writes the signal's number into the
# wakeup file descriptor, which a thread reads here.

OVER = b"\0"  # no signal has this number
ANSWER = 1.0  # seconds within which the main thread ends by itself, unless it is inside JAX


@contextlib.contextmanager
def signal_watch(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Inside, a thread calls a function with the number of each signal that Python handles.

    Only the main thread may enter it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_read, args=(reader, on_signal), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, OVER)
        thread.join()
        os.close(reader)
        os.close(writer)


def _read(reader: int, on_signal: Callable[[int], None]) -> None:
    while (number := os.read(reader, 1)) != OVER:
        on_signal(number[0])


@contextlib.contextmanager
def ending_at_once(say: Callable[[], int]) -> Iterator[None]:
    """Inside, SIGINT ends the process even if the main thread does not respond.

    Args:
        say: called then; prints the reason and returns the exit code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    answered = threading.Event()

    def end(number: int) -> None:
        if number == signal.SIGINT and not answered.wait(ANSWER):
            os._exit(say())

    with signal_watch(end):
        try:
            yield
        finally:
            answered.set()


# ---- running a command ---------------------------------------------------------------------------

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})  # of a write


def print_error(message: object) -> None:
    """Writes one line to stderr in one call, so that lines of several processes do not mix."""
    _print_line(f"error: {message}")


def run_command(main: Callable[[], int | None]) -> None:
    """Runs `main` as a command and exits with its result; a `UserError` is one line and exit 2.

    SIGINT (Ctrl-C) ends it within seconds, even inside JAX.
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
        if not (line := environment_error(error)):
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
    """Reports bad environment variables in one line for `python -m jaxptd.NAME`.

    JAX reads its variables when it is imported, which such modules do before `run_command`.
    """
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        line = environment_error(error) if isinstance(error, ValueError) else ""
        if not line:
            shown(kind, error, where)
            return
        print_error(line)
        sys.exit(BAD_INPUT)

    sys.excepthook = show


def environment_error(error: ValueError) -> str:
    """A line for an error about one of JAX's variables at its import; empty for other errors."""
    words = str(error).lower()
    names = [name for name in os.environ if name.startswith("JAX_") and name.lower() in words]
    if not names:
        return ""
    name = max(names, key=len)  # JAX_PLATFORM, for example, is in JAX_PLATFORMS
    value = f"{name}={quoted(os.environ[name])}"
    return f"the environment has {value}: {quoted(str(error), 2 * QUOTED)}; unset or fix it"


def _stopped() -> int:
    _print_line("stopped")
    return INTERRUPTED


def discard(stream: TextIO) -> None:
    """Discards all further output of a stream that cannot be written.

    Python flushes again at exit, and if that failed, the exit code would be 120.
    """
    with contextlib.suppress(OSError, ValueError):  # a stream without a file
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

    Otherwise the next opened file would get the stream's number, and with it libraries' output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
