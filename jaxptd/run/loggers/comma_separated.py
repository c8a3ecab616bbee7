"""Metrics as a table of comma-separated values."""

import csv
import io
from collections.abc import Iterable
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
        self._columns = list(dict.fromkeys(["step", *_names(start.rows)]))
        self._waiting: list[Row] = []
        self._rewrite(start.rows)

    def log(self, row: Row) -> None:
        """Appends a row, after those that an earlier call could not write."""
        self._waiting.append(row)
        new = dict.fromkeys(name for name in _names(self._waiting) if name not in self._columns)
        if new:
            with self.where.open(newline="", encoding="utf-8") as file:
                written = list(csv.DictReader(file))
            self._columns += new
            self._rewrite([*written, *self._waiting])
        else:
            append_whole(self.where, self._lines(self._waiting).encode())
        self._waiting.clear()

    def close(self) -> None:
        """Does nothing: every row is in the file."""

    def _rewrite(self, rows: Iterable[Row]) -> None:
        text = ",".join(self._columns) + "\n" + self._lines(rows)
        write_whole({self.where: text.encode()}, lambda _: nullcontext())

    def _lines(self, rows: Iterable[Row]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writerows(rows)  # None, and a number that a row lacks, is an empty cell
        return text.getvalue()


def _names(rows: Iterable[Row]) -> list[str]:
    return [name for row in rows for name in row]
