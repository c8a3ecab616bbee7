"""A page of findings: text that is also Markdown, and JSON; without names of users and their homes.

A check is a function that returns rows. One that raises or does not answer is a row as well, so
that a page is always complete.
"""

import contextlib
import dataclasses
import enum
import getpass
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxptd.errors import UserError, quoted

PATIENCE = 120.0  # seconds for a check: devices and network file systems can hang
LONGEST = 300  # characters of an error in a row
HIDDEN = "<user>"
# Where other users' homes are: only the name after it is hidden.
HOMES = re.compile(r"(/(?:home|Users|root/home|mnt/home)/)([^/\s'\":,;|)]+)")
SHARED = frozenset({"root", "user", "ubuntu"})  # accounts that tell nothing of a person


class Verdict(enum.StrEnum):
    """A verdict on one finding, mildest first."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclasses.dataclass(frozen=True)
class Row:
    """One finding.

    Args:
        name: what was looked at.
        finding: what was found.
        verdict: ok, note or problem.
        remedy: what to do, in one sentence. Empty if there is nothing to do.
    """

    name: str
    finding: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""


def note(name: str, finding: str, remedy: str = "") -> Row:
    """A finding that is worth knowing, and that no run fails for."""
    return Row(name, finding, Verdict.NOTE, remedy)


def problem(name: str, finding: str, remedy: str) -> Row:
    """A finding that makes runs fail, go wrong or crawl."""
    return Row(name, finding, Verdict.PROBLEM, remedy)


def failed(name: str, error: RuntimeError) -> Row:
    """A finding that XLA has raised: out of memory, or a device or link that fails."""
    words = quoted(" ".join(str(error).split()), LONGEST)
    return problem(name, words, "find out why before a run meets the same")


def judged(name: str, finding: str, *, bad: str = "", remark: str = "") -> Row:
    """A finding with its verdict: a problem with the remedy `bad`, a note with `remark`, or ok."""
    if bad:
        return problem(name, finding, bad)
    return note(name, finding, remark) if remark else Row(name, finding)


Check = Callable[[], Sequence[Row]]


def rows_of(name: str, check: Check, *, seconds: float = PATIENCE) -> list[Row]:
    """The rows of a check; a row that says why, if it fails or does not end in time.

    The check runs in a thread, because nothing can interrupt a call that hangs in the system.
    """
    found: list[Row] = []

    def run() -> None:
        try:
            found.extend(check())
        except UserError as error:
            found.append(problem(name, "refused", str(error)))
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            found.append(note(name, f"could not be checked ({quoted(reason, LONGEST)})"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        remedy = "find out what hangs there: runs will hang in the same place"
        return [problem(name, f"no answer in {seconds:g} s", remedy)]
    return found


@dataclasses.dataclass(frozen=True)
class Page:
    """All findings, in sections.

    Args:
        title: date and version, in a line.
        sections: rows by the name of their section.
    """

    title: str
    sections: Mapping[str, Sequence[Row]]

    def rows(self, *verdicts: Verdict) -> Iterator[tuple[str, Row]]:
        """The rows that have one of the verdicts, each with its section."""
        for section, rows in self.sections.items():
            yield from ((section, row) for row in rows if row.verdict in verdicts)

    @property
    def has_problem(self) -> bool:
        return any(True for _ in self.rows(Verdict.PROBLEM))

    def summary(self) -> str:
        """The number of problems and notes, in words."""
        counts = {each: len(list(self.rows(each))) for each in (Verdict.PROBLEM, Verdict.NOTE)}
        words = [f"{n or 'no'} {name}{'s' * (n != 1)}" for name, n in counts.items()]
        return " and ".join(words)

    def worst(self) -> str:
        """A line for each problem, then for each note."""
        lines = [
            f"- **{verdict}** {section}, {row.name}: {row.finding}"
            + (f"; {row.remedy}" if row.remedy else "")
            for verdict in (Verdict.PROBLEM, Verdict.NOTE)
            for section, row in self.rows(verdict)
        ]
        return without_names("\n".join([f"{self.title}: {self.summary()}", "", *lines]).strip())

    def markdown(self) -> str:
        """The whole page: problems and notes with their remedies, then a table for each section."""
        tables = [f"## {name}\n\n{_table(rows)}" for name, rows in self.sections.items() if rows]
        return without_names("\n\n".join(["# jaxptd doctor", self.worst(), *tables]))

    def as_dict(self) -> dict[str, Any]:
        """The whole page, for JSON."""
        rows = {
            name: [{k: without_names(str(v)) for k, v in vars(row).items()} for row in rows]
            for name, rows in self.sections.items()
        }
        return {"title": without_names(self.title), "problem": self.has_problem, "sections": rows}


def _table(rows: Sequence[Row]) -> str:
    """A table that reads well as text, and that Markdown shows as a table."""
    cells = [("check", "finding", "verdict"), *((r.name, r.finding, str(r.verdict)) for r in rows)]
    clean = [[" ".join(cell.split()).replace("|", "/") for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    clean.insert(1, ["-" * width for width in widths])
    padded = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in clean)
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


# ---- names that a page leaves out ----------------------------------------------------------------


def without_names(text: str) -> str:
    """Shortens the home directory to `~`, and hides names of users wherever they stand alone."""
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = HOMES.sub(rf"\g<1>{HIDDEN}", text)
    for name in _users():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", HIDDEN, text)
    return text


def _users() -> set[str]:
    """Names of this user that could stand in a path or in an address."""
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    with contextlib.suppress(OSError, KeyError):  # a container's user without a name
        names.add(getpass.getuser())
    return {name for name in names if len(name) > 1} - SHARED
