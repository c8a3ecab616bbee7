"""A page: verdicts, checks that fail or hang, and no names of users or their homes."""

import json
import threading

import pytest

from jaxptd.doctor.page import Page, Row, Verdict, judged, note, problem, rows_of, without_names
from jaxptd.errors import UserError

PAGE = Page(
    "today, jaxptd 1",
    {
        "system": [Row("Python", "3.12"), note("memory", "1 GiB", "get more")],
        "files": [problem("locks", "a|b", "use a disk")],
        "nothing": [],
    },
)


def test_a_page_begins_with_what_is_wrong_and_its_remedy() -> None:
    lines = PAGE.markdown().splitlines()
    assert lines[:6] == [
        "# jaxptd doctor",
        "",
        "today, jaxptd 1: 1 problem and 1 note",
        "",
        "- **problem** files, locks: a|b; use a disk",
        "- **note** system, memory: 1 GiB; get more",
    ]
    assert "| locks | a/b     | problem |" in lines  # a bar would end the cell
    assert "## nothing" not in lines
    assert PAGE.has_problem
    assert not Page("", {"system": PAGE.sections["system"]}).has_problem
    assert Page("x", {}).summary() == "no problems and no notes"


def test_a_page_as_json() -> None:
    found = json.loads(json.dumps(PAGE.as_dict()))
    assert found["problem"] is True
    assert found["sections"]["files"] == [
        {"name": "locks", "finding": "a|b", "verdict": "problem", "remedy": "use a disk"}
    ]


def test_the_worse_verdict_counts() -> None:
    assert judged("a", "b", bad="x", remark="y") == Row("a", "b", Verdict.PROBLEM, "x")
    assert judged("a", "b", remark="y") == Row("a", "b", Verdict.NOTE, "y")
    assert judged("a", "b") == Row("a", "b")


def test_a_check_that_fails_is_a_row() -> None:
    def refuse() -> list[Row]:
        raise UserError("no such thing; use another")

    assert rows_of("x", lambda: [Row("a", "b")]) == [Row("a", "b")]
    assert rows_of("x", refuse) == [problem("x", "refused", "no such thing; use another")]
    (row,) = rows_of("x", lambda: [][0])  # type: ignore[misc]
    assert row == note("x", "could not be checked (IndexError: list index out of range)")


def test_a_check_that_hangs_is_a_row() -> None:
    going = threading.Event()
    (row,) = rows_of("disk", lambda: [Row("a", str(going.wait()))], seconds=0.05)
    going.set()
    assert (row.verdict, row.finding) == (Verdict.PROBLEM, "no answer in 0.05 s")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/run and /home/alice", "~/run and ~"),
        ("/home/bob/run", "/home/<user>/run"),
        ("/scratch/alice/x, alice@host", "/scratch/<user>/x, <user>@host"),
        ("malice, alice-2, alices", "malice, alice-2, alices"),
        ("/home/alice.old", "/home/<user>"),
        ("/homes", "/homes"),
    ],
)
def test_a_page_has_no_names_of_users(text: str, shown: str, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("USER", "alice")
    assert without_names(text) == shown
    page = Page(text, {"files": [note(text, text, text)]})
    assert "alice/" not in page.markdown() + page.worst() + json.dumps(page.as_dict())


def test_accounts_that_many_share_are_no_names(monkeypatch) -> None:
    monkeypatch.setenv("USER", "ubuntu")
    assert without_names("ubuntu 24.04") == "ubuntu 24.04"
