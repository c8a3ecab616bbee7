"""Findings, saved in a file as they come, and the tables made from them."""

import hashlib
import json
import threading
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.lib.pages import write
from benchmarks.mutations.detectors import (
    CAUGHT,
    DETECTORS,
    NO_RESULT,
    NOT_RUN,
    NOT_THERE,
    PROBED,
    REFERENCE,
    TESTED,
    Finding,
)
from benchmarks.mutations.table import ROOT, Kind, Mutation, Reach

Findings = dict[str, Finding]  # by detector


def key(row: Mutation, detector: str) -> str:
    """A hash of all that a finding depends on, such as the function before and after the mutation.

    It stays the same if the function is reformatted, or if another function changes.
    """
    looked: tuple[Any, ...] = (row.tests, row.select)
    if detector in PROBED:
        looked = row.cases
    if detector in TESTED:  # their text says which tests are default
        looked = (*looked, *_texts(row.tests))
    if detector == "reference":
        looked = _texts(REFERENCE)
    text = repr((detector, _difference(row, (ROOT / row.file).read_text()), looked))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=32)
def _difference(row: Mutation, text: str) -> list[list[str]]:
    return row.difference(text)


def _texts(tests: str) -> tuple[str, ...]:
    """The text of files and of folders' files, with spaces between their paths."""
    paths = [ROOT / path for path in tests.split()]
    files = [each for path in paths for each in ([path] if path.is_file() else path.rglob("*.py"))]
    return tuple(each.read_text() for each in sorted(files))


class Results:
    """The findings in a file, by mutation and detector; several threads may add to them.

    Args:
        path: path of the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        self._rows: dict[str, Findings] = {}
        if path.exists():
            self._rows = json.loads(path.read_text())["mutations"]

    def missing(self, row: Mutation, detectors: Collection[str]) -> list[str]:
        """The detectors of a row that have no finding for the current code."""
        found = self._rows.get(row.name, {})
        return [
            name
            for name in detectors_of(row)
            if name in detectors
            and (
                found.get(name, {}).get("key") != key(row, name) or found[name]["word"] == NO_RESULT
            )
        ]

    def add(self, row: Mutation, findings: Findings) -> None:
        """Adds findings with today's date, and writes the file."""
        day = datetime.now(UTC).date().isoformat()
        made = {
            name: {**each, "key": key(row, name), "day": day} for name, each in findings.items()
        }
        with self._lock:
            self._rows.setdefault(row.name, {}).update(made)
            self._write()

    def keep(self, rows: Iterable[Mutation]) -> None:
        """Forgets findings of rows and detectors that are no longer in the table."""
        names = {each.name for each in rows}
        with self._lock:
            self._rows = {
                name: {each: found[each] for each in DETECTORS if each in found}
                for name, found in self._rows.items()
                if name in names
            }
            self._write()

    def _write(self) -> None:
        """Writes one line per row, so that versions of the file can be compared."""
        names = sorted(self._rows)
        lines = (f"{json.dumps(name)}: {json.dumps(self._rows[name])}" for name in names)
        write(self.path, '{"mutations": {\n' + ",\n".join(lines) + "\n}}\n")

    def of(self, row: Mutation) -> Findings:
        """What was found, in the current code or an earlier version."""
        return self._rows.get(row.name, {})


def detectors_of(row: Mutation) -> tuple[str, ...]:
    """The detectors that look for a mutation."""
    return DETECTORS if row.kind else TESTED


def caught_by(findings: Mapping[str, Finding], detectors: Collection[str] = DETECTORS) -> list[str]:
    """The detectors that caught a row."""
    return [name for name in detectors if findings.get(name, {}).get("word") == CAUGHT]


def ran(findings: Mapping[str, Finding], detector: str) -> bool:
    """True if a detector looked at a row."""
    return findings.get(detector, {}).get("word", NOT_RUN) not in (NOT_RUN, NOT_THERE, NO_RESULT)


def is_step(row: Mutation) -> bool:
    """True for a row that changes what a training step computes."""
    return row.reach is not Reach.RUN and not row.explained


def rates(rows: Collection[Mutation], results: Results) -> list[list[str]]:
    """Cells for each detector: how many rows it looked at and caught, its seconds, its dates."""
    cells = [["detector", "looked at", "caught", "alone", "median s", "slowest s", "run"]]
    for name in DETECTORS:
        seen = [each for each in rows if ran(results.of(each), name)]
        caught = [each for each in seen if name in caught_by(results.of(each))]
        alone = [each for each in caught if caught_by(results.of(each)) == [name]]
        seconds = sorted(results.of(each)[name]["seconds"] for each in caught) or [0.0]
        times = [f"{seconds[len(seconds) // 2]:.0f}", f"{seconds[-1]:.0f}"]
        days = sorted({results.of(each)[name]["day"] for each in seen})
        run = " to ".join(dict.fromkeys(days[:1] + days[-1:]))
        cells.append([name, *(str(len(each)) for each in (seen, caught, alone)), *times, run])
    return cells


def kinds(rows: Collection[Mutation], results: Results) -> list[list[str]]:
    """Cells for each kind: its rows, and how many of them each detector caught."""
    cells = [["kind", "rows", *DETECTORS, "any"]]
    for kind in Kind:
        own = [results.of(each) for each in rows if each.kind is kind]
        each = [sum(name in caught_by(found) for found in own) for name in DETECTORS]
        cells.append(
            [kind.value, *map(str, (len(own), *each, sum(map(bool, map(caught_by, own)))))]
        )
    return cells


def survivors(rows: Iterable[Mutation], results: Results) -> list[Mutation]:
    """The rows that neither tracing nor verify catches."""
    return [each for each in rows if not caught_by(results.of(each), ("tracing", "verify"))]
