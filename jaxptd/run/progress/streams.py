"""Output that a run can do without: if it cannot be written, the run continues without it."""

import contextlib
import sys
from typing import TextIO

from jaxptd.errors import discard


class OptionalStream:
    """A text stream whose first failure is said once on stderr; from then on it drops everything.

    Nothing is said if the reader has gone (`| head`).

    Args:
        stream: to write to; None if there is none.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._try("write", text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def isatty(self) -> bool:
        return bool(self._try("isatty"))

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    def _try(self, method: str, *args: str) -> object:
        """Calls a method of the stream; None if it fails, or did before."""
        if self._stream is None:
            return None
        try:
            return getattr(self._stream, method)(*args)
        except (OSError, ValueError) as error:  # ValueError: closed
            stream, self._stream = self._stream, None
            discard(stream)
            if not isinstance(error, BrokenPipeError):
                _warn(f"warning: cannot write the output ({_reason(error)}); the run goes on")
            return None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _warn(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
