"""Metrics as a table of comma-separated values."""

import csv
import io
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from jaxptd.atomic_files import append_whole, write_whole
from jaxptd.run.loggers.logger import Start
from jaxptd.run.metrics import Row


class CommaSeparated:
    """Writes `metrics.csv`: a line for each row, a column for each number that a row has had.

    A row with a new number, as the first evaluation has, rewrites the file.

    Args:
        start: the file begins with its rows.
    """

    def __init__(self, start: Start) -> None:
        self.where = start.path / "metrics.csv"
        self._columns: list[str] = []
        self._waiting: list[Row] = []
        self._rewrite(["step"], start.rows)

    def log(self, row: Row) -> None:
        """Appends a row, after those that an earlier call could not write."""
        self._waiting.append(row)
        if any(name not in self._columns for name in _names(self._waiting)):
            with self.where.open(newline="", encoding="utf-8") as file:
                written = list(csv.DictReader(file))
            self._rewrite(self._columns, [*written, *self._waiting])
        else:
            append_whole(self.where, _lines(self._columns, self._waiting).encode())
        self._waiting.clear()

    def close(self) -> None:
        """Does nothing: every row is in the file."""

    def _rewrite(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Writes the file anew, with these columns and those that rows have besides."""
        wider = list(dict.fromkeys([*columns, *_names(rows)]))
        text = ",".join(wider) + "\n" + _lines(wider, rows)
        write_whole({self.where: text.encode()}, lambda _: nullcontext())
        self._columns = wider  # only now, since the file may not be written


def _lines(columns: Sequence[str], rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writerows(rows)  # None, and a number that a row lacks, is an empty cell
    return text.getvalue()


def _names(rows: Iterable[Row]) -> list[str]:
    return [name for row in rows for name in row]
