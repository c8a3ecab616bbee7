"""Bad input, in one line; the exit codes of commands."""

import difflib
import re
from collections.abc import Iterable

BUG = 1
BAD_INPUT = 2
LOST = 3  # a process of the run is dead or stuck
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
TERMINATED = 143  # 128 + SIGTERM
QUOTED = 80  # characters of a value in a message
ALIKE = 0.65  # of difflib's ratio: heads and num_heads are alike, extra and beta2 are not
LONG_WORD = 200  # characters of a path or a number that a message shows whole


class UserError(ValueError):
    """Bad input. The message is one line that gives the error, its numbers and the remedy.

    A word of more than `LONG_WORD` characters, a path or a number that a person gave, is cut in
    its middle.
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
    """The known name that a misspelt one is most like; None if none is like it."""
    found = difflib.get_close_matches(name[:QUOTED], list(known), n=1, cutoff=ALIKE)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """The remedy for an unknown name: "did you mean X?", or what to do if none is like it."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else otherwise


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


def install(extra: str) -> str:
    """Tells how an extra of the package is installed: from its checkout, as it is not on PyPI."""
    return f"in the checkout of jaxptd, pip install -e '.[{extra}]'"
