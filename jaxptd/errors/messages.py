"""Bad input, in one line; the exit codes of commands."""

BUG = 1
BAD_INPUT = 2
LOST = 3  # a process of the run is dead or stuck
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
TERMINATED = 143  # 128 + SIGTERM
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
