"""Links of all pages: files and anchors exist, and external addresses are listed with a date.

Nothing is fetched. `links.csv` lists each external address once, with the day someone visited it
(empty: nobody could) and what they saw. Whoever adds a link adds its row.
"""

import csv
import datetime
import functools
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("links.csv")
FOLDERS = ("docs", "benchmarks", "examples", "notebooks", ".github")
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md")))
    if "_build" not in page.parts
)
FENCED = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^()<>\s]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^(#+) +(.+?)[ \t]*$", re.MULTILINE)
ADDRESS = re.compile(r"\bhttps?://[^\s\"'`<>()\[\]{}|]+")


def prose(text: str) -> str:
    """A page without its fenced blocks, in which `#` and brackets mean something else."""
    return FENCED.sub("", text)


def anchors(text: str, deepest: int = 6) -> set[str]:
    """Anchors of headings, as GitHub and MyST generate them."""
    found: set[str] = set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
    for marks, words in HEADING.findall(prose(text)):
        if len(marks) > deepest:
            continue
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", words)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        twins = (f"{slug}-{number}" for number in range(1, 100))
        found.add(slug if slug not in found else next(twin for twin in twins if twin not in found))
    return found


@functools.cache
def anchors_of(page: Path) -> set[str]:
    # Sphinx makes none for deeper headings: `myst_heading_anchors` in docs/conf.py
    deepest = 3 if ROOT / "docs" in page.parents else 6
    return anchors(page.read_text(encoding="utf-8"), deepest)


def broken(page: Path) -> list[str]:
    """Links of a page to missing files and anchors."""
    wrong = []
    for link in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if ADDRESS.match(link) or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page.resolve()
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            wrong.append(link)
    return wrong


def nameless(text: str) -> list[str]:
    """Links of a page without a text."""
    return re.findall(r"(?<!!)\[\s*\]\([^)]*\)", prose(text))


def addresses(text: str) -> set[str]:
    return {address.rstrip(".,;:!?*") for address in ADDRESS.findall(text)}


def well_formed(address: str) -> bool:
    parts = urlsplit(address)
    folders = parts.path.strip("/").split("/")
    if parts.hostname == "github.com" and len(folders) > 2:
        kinds = {"blob", "tree", "issues", "pull", "releases", "discussions", "commit"}
        if folders[2] not in kinds or (folders[2] in ("blob", "tree") and len(folders) < 5):
            return False
    return parts.scheme == "https" and "." in (parts.hostname or "") and "//" not in parts.path


def listed() -> list[dict[str, str]]:
    with LIST.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_anchors_that_a_page_links_are_there(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_has_a_text(page: Path) -> None:
    """Sphinx fills an empty text with the target's title; elsewhere nothing is shown."""
    assert nameless(page.read_text(encoding="utf-8")) == []


def test_addresses_elsewhere_are_well_formed_and_listed_once() -> None:
    used = {address for page in PAGES for address in addresses(page.read_text(encoding="utf-8"))}
    assert [address for address in sorted(used) if not well_formed(address)] == []
    rows = [row["address"] for row in listed()]
    assert rows == sorted(set(rows)), "links.csv: each address once, in order"
    assert sorted(used - set(rows)) == [], "add them to tests/project/links.csv"
    assert sorted(set(rows) - used) == [], "no page links them: delete them from links.csv"


def test_each_address_says_when_it_was_checked_and_how() -> None:
    for row in listed():
        assert row["how"], row
        if row["checked"]:
            date = datetime.date.fromisoformat(row["checked"])
            assert datetime.date(2026, 1, 1) <= date <= datetime.date.today(), row
        else:
            assert row["how"].startswith("not checked: "), row


# --- The finders


def test_links_without_a_text_are_found() -> None:
    text = "[](a.md) [ ](b.md#c) [d](e.md) ![](f.svg)\n```\n[](g.md)\n```\n"
    assert nameless(text) == ["[](a.md)", "[ ](b.md#c)"]


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One `two`, three\n\n## One two three\n\n```\n# no\n```\n")
    (page := tmp_path / "a.md").write_text(
        "[a](b.md) [b](b.md#one-two-three) [c](b.md#one-two-three-1) [d](#here)\n\n# Here\n"
        "[e](c.md) [f](b.md#no) [g](#there) ![h](i.png) [j](https://a.b/c)\n"
        "```\n[k](l.md)\n```\n"
    )
    assert broken(page) == ["c.md", "b.md#no", "#there", "i.png"]


@pytest.mark.parametrize(
    ("address", "good"),
    [
        ("https://github.com/a/b/blob/main/c.md", True),
        ("https://github.com/a/b", True),
        ("https://github.com/a/b/docs/c.md", False),  # neither blob nor tree
        ("https://github.com/a/b/blob/c.md", False),  # no branch
        ("http://a.b/c", False),
        ("https://localhost/c", False),
        ("https://a.b//c", False),
    ],
)
def test_addresses_that_cannot_be_right_are_found(address: str, good: bool) -> None:
    assert well_formed(address) == good


def test_addresses_end_before_punctuation() -> None:
    assert addresses("See https://a.b/c. (https://a.b/d), `https://a.b/e`; <https://a.b/f>") == {
        f"https://a.b/{letter}" for letter in "cdef"
    }
