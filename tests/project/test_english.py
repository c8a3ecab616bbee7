"""Pages, docstrings, comments and messages keep clear of phrases that read as translated."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
CODE = (*(ROOT / "jaxptd").rglob("*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("notebooks/*.py"))
# A phrase: how it is found, how often it may stand (where it is right), and what to write instead.
PHRASES = {
    "5.1 GiB for 4.9": (
        r"\d(?: ?(?:%|s|ms|GiB|MiB|GB|TB/s))? for \d[\d.,]*\b(?! (?:x |GPUs|devices|pixels|rows))",
        2,
        "5.1 GiB, up from 4.9",
    ),
    "Of ten layers two": (r"(?:^|[.:!?] |\n\n)Of (?!course)", 3, "two of ten layers"),
    "that are not there": (r"\b(?:that|which) (?:are|is) not (?:there|here)\b", 0, "absent"),
    ", too": (r", too\b(?! (?:many|much|few|long|large|small|big|little))", 3, "also"),
    "by turns": (r"\b(?:by turns|in vain|anyhow)\b", 1, "alternately, for nothing, anyway"),
    "has 2.5 TB/s": (
        r"\b(?:has|have|had) (?:about |some )?\d[\d.,]* ?(?:[TGMK]i?B/s|T?FLOPS?|tokens/s|GB/s)",
        0,
        "reaches 2.5 TB/s",
    ),
}


def prose(path: Path) -> str:
    """A page without its code, or the docstrings, strings and comments of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    words = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words.append(token.string.lstrip("# "))
        elif token.type == tokenize.STRING:
            words.append("\n\n" + token.string.strip("rfb\"'"))
    return "\n".join(words)


@pytest.mark.parametrize("name", PHRASES)
def test_few_phrases_read_as_translated(name: str) -> None:
    pattern, allowed, better = PHRASES[name]
    found = [
        f"{path.relative_to(ROOT)}: ...{text[max(0, match.start() - 30) : match.end() + 30]!r}"
        for path in (*PAGES, *CODE)
        for text in [prose(path)]
        for match in re.finditer(pattern, text)
    ]
    assert len(found) <= allowed, f"write {better!r}:\n" + "\n".join(found)
