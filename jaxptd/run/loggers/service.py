"""The parts of a logger whose rows go to a service, which keeps what an earlier process sent."""

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path

from jaxptd.atomic_files import write_whole
from jaxptd.run.loggers.logger import Start
from jaxptd.run.metrics import Row


class Sent:
    """Remembers the run of a service, and the last step that it has, in the run directory.

    A run that is killed resumes from a checkpoint, and logs some steps again that a service has
    already. The rows of these steps are not sent.

    Args:
        start: its rows are those of the checkpoint and before.
        service: its name.
    """

    def __init__(self, start: Start, service: str) -> None:
        self._path = start.path / f"{service}.json"
        self.id, self._last = _read(self._path)

    def open(self, run: str) -> None:
        """Notes the service's name of the run, once it is known."""
        self.id = run
        self._write()

    def is_new(self, row: Row) -> bool:
        """True for a row that the service does not have; it has it from now on."""
        if row["step"] <= self._last:
            return False
        self._last = row["step"]
        self._write()
        return True

    def _write(self) -> None:
        text = json.dumps({"run": self.id, "step": self._last}) + "\n"
        write_whole({self._path: text.encode()}, lambda _: contextlib.nullcontext())


def _read(path: Path) -> tuple[str | None, int]:
    """The name and the last step of a service's run; None and 0 without a file that says so."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found["run"], str) and isinstance(found["step"], int):
            return found["run"], found["step"]
    return None, 0


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a row, except its step and those that were not finite."""
    return {name: x for name, x in row.items() if name != "step" and x is not None}


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Inside, an error of a service's package is an OSError, as `Logger.log` promises."""
    try:
        yield
    except OSError as error:
        raise OSError(errno.EIO, error.strerror or str(error)) from error
    except Exception as error:  # each package has errors of its own
        raise OSError(errno.EIO, " ".join(str(error).split())[:300]) from error
