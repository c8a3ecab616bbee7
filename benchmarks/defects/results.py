"""Findings kept in a file as they come, and the tables made of them."""

import hashlib
import json
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.breaks.__main__ import ROOT, broken
from benchmarks.defects.detectors import (
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
from benchmarks.defects.table import Defect, Kind, Reach

Findings = dict[str, Finding]  # by detector


def key(defect: Defect, detector: str) -> str:
    """A hash of all that a detector looks at, as far as the row says: the broken file and more."""
    text = broken((ROOT / defect.patch.file).read_text(), defect.patch)
    looked: tuple[Any, ...] = (defect.patch.tests, defect.patch.select)
    if detector in PROBED:
        looked = defect.cases
    if detector in TESTED:  # what is a default test is said in their text
        looked = (*looked, *_texts(defect.patch.tests))
    if detector == "reference":
        looked = _texts(REFERENCE)
    return hashlib.sha256(repr((detector, text, looked)).encode()).hexdigest()[:16]


def _texts(tests: str) -> tuple[str, ...]:
    """The text of files and of folders' files, with spaces between their paths."""
    paths = [ROOT / path for path in tests.split()]
    files = [each for path in paths for each in ([path] if path.is_file() else path.rglob("*.py"))]
    return tuple(each.read_text() for each in sorted(files))


class Results:
    """The findings in a file, by defect and detector; may be added to by several threads.

    Args:
        path: of the file, which may be missing.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        self._rows: dict[str, Findings] = {}
        if path.exists():
            self._rows = json.loads(path.read_text())["defects"]

    def missing(self, defect: Defect, detectors: Iterable[str]) -> list[str]:
        """The detectors without a finding of the code as it is."""
        found = self._rows.get(defect.name, {})
        return [
            name
            for name in detectors
            if found.get(name, {}).get("key") != key(defect, name)
            or found[name]["word"] == NO_RESULT
        ]

    def add(self, defect: Defect, findings: Findings) -> None:
        """Keeps findings with today's date, and writes the file."""
        day = datetime.now(UTC).date().isoformat()
        made = {
            name: {**each, "key": key(defect, name), "day": day} for name, each in findings.items()
        }
        with self._lock:
            self._rows.setdefault(defect.name, {}).update(made)
            self._write()

    def keep(self, defects: Iterable[Defect]) -> None:
        """Forgets other findings, of defects and detectors that are no longer in the table."""
        names = {each.name for each in defects}
        with self._lock:
            self._rows = {
                name: {each: found[each] for each in DETECTORS if each in found}
                for name, found in self._rows.items()
                if name in names
            }
            self._write()

    def _write(self) -> None:
        """A line for each defect, so that versions of the file can be compared."""
        rows = (
            f"{json.dumps(name)}: {json.dumps(self._rows[name])}" for name in sorted(self._rows)
        )
        write_text(self.path, '{"defects": {\n' + ",\n".join(rows) + "\n}}\n")

    def of(self, defect: Defect) -> Findings:
        """What was found, of the present code or of an earlier one."""
        return self._rows.get(defect.name, {})


def caught_by(findings: Mapping[str, Finding], detectors: Collection[str] = DETECTORS) -> list[str]:
    """The detectors that caught a defect."""
    return [name for name in detectors if findings.get(name, {}).get("word") == CAUGHT]


def ran(findings: Mapping[str, Finding], detector: str) -> bool:
    """True if a detector looked at a defect."""
    return findings.get(detector, {}).get("word", NOT_RUN) not in (NOT_RUN, NOT_THERE, NO_RESULT)


def write_text(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text)
    os.replace(aside, path)


def is_step(defect: Defect) -> bool:
    """True for a defect that makes a training step compute something else."""
    return defect.reach is not Reach.RUN and not defect.explained


def rates(defects: Collection[Defect], results: Results) -> list[list[str]]:
    """A row for each detector: how many it looked at and caught, its seconds, and its days."""
    rows = [["detector", "looked at", "caught", "alone", "median s", "slowest s", "run"]]
    for name in DETECTORS:
        seen = [each for each in defects if ran(results.of(each), name)]
        caught = [each for each in seen if name in caught_by(results.of(each))]
        alone = [each for each in caught if caught_by(results.of(each)) == [name]]
        seconds = sorted(results.of(each)[name]["seconds"] for each in caught) or [0.0]
        times = [f"{seconds[len(seconds) // 2]:.0f}", f"{seconds[-1]:.0f}"]
        days = sorted({results.of(each)[name]["day"] for each in seen})
        run = " to ".join(dict.fromkeys(days[:1] + days[-1:]))
        rows.append([name, *(str(len(each)) for each in (seen, caught, alone)), *times, run])
    return rows


def kinds(defects: Collection[Defect], results: Results) -> list[list[str]]:
    """A row for each kind: its defects, and how many each detector caught."""
    rows = [["kind", "defects", *DETECTORS, "any"]]
    for kind in Kind:
        own = [results.of(each) for each in defects if each.kind is kind]
        each = [sum(name in caught_by(found) for found in own) for name in DETECTORS]
        rows.append([kind.value, *map(str, (len(own), *each, sum(map(bool, map(caught_by, own)))))])
    return rows


def survivors(defects: Iterable[Defect], results: Results) -> list[Defect]:
    """The defects that neither tracing nor verify catches."""
    return [each for each in defects if not caught_by(results.of(each), ("tracing", "verify"))]
