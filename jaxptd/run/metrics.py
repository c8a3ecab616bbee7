"""metrics.jsonl: one line of JSON with the numbers of each logged step."""

import contextlib
import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.atomic_files import append_whole

Row = dict[str, Any]


class Metrics:
    """The rows of a run, in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def rows(self) -> list[Row]:
        """Every row in the order of steps; the last one where a step has several."""
        return self.read()[0]

    def read(self) -> tuple[list[Row], int]:
        """Returns the rows as `rows` does, and the number of lines that are not rows.

        A last line without its end, as a kill leaves it, does not count.
        """
        lines = self._lines()
        torn = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        rows = [row for line in lines if (row := _parse(line)) is not None]
        by_step = {row["step"]: row for row in rows}
        bad = len(lines) - len(by_step)
        if (row := _parse(torn)) is not None:
            by_step[row["step"]] = row
        return [by_step[step] for step in sorted(by_step)], bad

    @property
    def where(self) -> Path:
        """The file, as loggers name where rows go."""
        return self.path

    def log(self, row: Row) -> None:
        """Appends a row, after those that an earlier call could not write.

        Raises:
            OSError: the file cannot be written. It is unchanged, and the next call tries again.
        """
        self._waiting.append(to_line(row))
        start = b"" if _ends_in_a_line(self.path) else b"\n"
        append_whole(self.path, start + b"".join(self._waiting))
        self._waiting.clear()

    def close(self) -> None:
        """Does nothing: every row is in the file."""

    def set_aside(self) -> Path:
        """Gives the file a second name, under which it survives replacement; returns that name."""
        aside = self.path.with_name(f"{self.path.name}.aside")
        number = 1
        while os.path.lexists(aside):
            number += 1
            aside = self.path.with_name(f"{self.path.name}.aside{number}")
        try:
            os.link(self.path, aside, follow_symlinks=False)
        except OSError:  # a folder, or a file system without hard links
            self.path.rename(aside)
        return aside

    def _lines(self) -> list[bytes]:
        """The lines of the file; a single empty one for a pipe, a device or a folder."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                return [b"\n"]
            return self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []


def to_line(row: Row) -> bytes:
    return f"{json.dumps(row)}\n".encode()


def _parse(line: bytes) -> Row | None:
    """The row in a line, an object with a step and only finite numbers; None if it is not one."""
    with contextlib.suppress(ValueError, RecursionError):  # a number too long, nested too deep
        row = json.loads(line, parse_float=_finite, parse_constant=_finite)
        if isinstance(row, dict) and type(row.get("step")) is int and row["step"] > 0:
            return row if all(map(_is_number, row.values())) else None
    return None


def _is_number(value: Any) -> bool:
    """True for a number that numpy can hold, and for None, which stands for a non-finite one."""
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def _ends_in_a_line(path: Path) -> bool:
    """True if a line can be appended: there is no file, or its last line is complete."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
    except OSError:  # no file, or an empty file
        return True


def columns(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The values of all rows by name; NaN where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: list[Any]) -> np.ndarray:
    """Values as numbers; None is NaN."""
    if all(isinstance(value, int) for value in values):
        return np.array(values, np.int64)
    return np.array([math.nan if value is None else value for value in values], np.float64)
