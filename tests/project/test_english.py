"""Pages, docstrings, comments and messages avoid phrases that read as translated."""

import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTATIONS = ROOT / "benchmarks" / "results" / "mutations.md"  # lists the names of rows
FOLDERS = ("jaxptd", "examples", "notebooks", "benchmarks")
PAGES = (
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(page for page in (ROOT / "benchmarks").rglob("*.md") if page != MUTATIONS),
)
CODE = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
F_STRING = getattr(tokenize, "FSTRING_MIDDLE", None)  # from Python 3.12 on
# Phrase -> its pattern, how often it is allowed (where it is right), and what to write instead.
PHRASES = {
    "5.1 GiB for 4.9": (
        r"\d(?: ?(?:%|s|ms|GiB|MiB|GB|TB/s))? for \d[\d.,]*\b(?! (?:x |GPUs|devices|pixels|rows))",
        2,
        "5.1 GiB, up from 4.9",
    ),
    "Of ten layers two": (r"(?:^|[.:!?] |\n\n)Of (?!course)", 3, "two of ten layers"),
    "that are not there": (r"\b(?:that|which) (?:are|is) not (?:there|here)\b", 0, "absent"),
    ", too": (r", too\b(?! (?:many|much|few|long|large|small|big|little))", 3, "also"),
    "by turns": (
        r"\b(?:(?:by|in) turns|again and again|in vain|anyhow)\b",
        0,
        "alternately, over and over, for nothing, anyway",
    ),
    "has 2.5 TB/s": (
        r"\b(?:has|have|had) (?:about |some )?\d[\d.,]* ?(?:[TGMK]i?B/s|T?FLOPS?|tokens/s|GB/s)",
        0,
        "reaches 2.5 TB/s",
    ),
    "7 ms a step": (
        r"\b(?:ms|us|s|[TGMK]i?B(?:/s)?|TFLOP/s) an? (?:GPU|step|device|second|layer|token|node)\b",
        0,
        "7 ms per step",
    ),
    "a loop of one trip": (
        r"\b(?:one|two|several|each|first|last|loop's) trips?\b",
        0,
        "one iteration",
    ),
    "kept for backward": (r"\b(?:keeps?|kept) for backward\b", 0, "saved for backward"),
    "a command whose head says": (r"\bwhose head\b", 0, "its docstring says"),
    "beside PyTorch": (
        r"\bbeside (?:PyTorch|Megatron's|plain|one device|(?:its|the) (?:pee|pape)rs?)\b",
        0,
        "compared with PyTorch",
    ),
    "on so many GPUs": (r"\bso many (?![\w-]+ that\b)", 1, "on this many GPUs"),
    "no GPU has room": (r"\b(?:has|have|had) (?:no )?room\b", 0, "it does not fit"),
}


@functools.cache
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
        elif token.type == F_STRING:
            words.append("\n\n" + token.string)
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
