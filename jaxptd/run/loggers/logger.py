"""`Logger`, the interface of everything that takes the rows of a run."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from jaxptd.config import Config
from jaxptd.run.metrics import Row


@dataclasses.dataclass(frozen=True)
class Start:
    """The run that a logger is opened for.

    Args:
        path: of the run directory.
        config: of the run.
        step: rows of later steps follow.
        rows: of the steps so far.
    """

    path: Path
    config: Config
    step: int = 0
    rows: Sequence[Row] = ()


class Logger(Protocol):
    """Takes the rows of a run, in its first process."""

    @property
    def where(self) -> Path | str:
        """The place of the rows, for messages."""

    def log(self, row: Row) -> None:
        """Takes the row of a step. Raises OSError if it cannot."""

    def close(self) -> None:
        """Ends the log, after the last row. Raises OSError if it cannot."""


class Loggers:
    """Passes each row to all loggers; one that fails is named once, and the run continues.

    Args:
        loggers: which take the rows, in this order.
        say: prints a line.
    """

    def __init__(self, loggers: Sequence[Logger], say: Callable[[str], None]) -> None:
        self._loggers, self._say = tuple(loggers), say
        self._reported = set[Path | str]()

    def log(self, row: Row) -> None:
        for logger in self._loggers:
            self._try(logger.where, partial(logger.log, row))

    def close(self) -> None:
        for logger in self._loggers:
            self._try(logger.where, logger.close)

    def _try(self, where: Path | str, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            if where not in self._reported:
                self._reported.add(where)
                self._say(f"warning: cannot write {where}: {error.strerror}; the run goes on")
