"""Limits that keep the code easy to read: lengths of files and functions, and names.

Import cycles and the order of folders are contracts in pyproject.toml, checked by `make lint`.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("jaxptd", "tests", "benchmarks")
PACKAGE = sorted((ROOT / "jaxptd").rglob("*.py"))
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# Private words, in snake case, that standard terms replaced.
REPLACED = (
    *("lend", "lent", "lending", "lendings", "borrow", "borrowing", "sent_home", "fetched_again"),
    *("moves_alone", "moved_in", "whole_tokens", "save_behind", "onlooker", "last_words"),
    *("lifeline", "told", "settle", "settled", "had"),
)


def names(source: str) -> set[str]:
    """Identifiers of a source text, in snake case."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = {token.string for token in tokens if token.type == tokenize.NAME}
    return {re.sub(r"(?<=[a-z])(?=[A-Z0-9])", "_", name).lower() for name in found}


def replaced_words(source: str) -> set[str]:
    return {word for name in names(source) for word in REPLACED if f"_{word}_" in f"_{name}_"}


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def function_lengths(source: str) -> Iterator[int]:
    """Lines of each function, from `def` to its end."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.end_lineno - node.lineno + 1


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# --- The limits


def test_no_file_has_more_than_600_lines() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): text(path).count("\n") for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


def test_no_function_has_more_than_60_lines() -> None:
    long = [
        f"{path.relative_to(ROOT).as_posix()}: {length} lines"
        for path in PACKAGE
        for length in function_lengths(text(path))
        if length > 60
    ]
    assert long == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    vague = re.compile(r"(Of|What|How|Whether|As)\b")
    found = [doc for path in PACKAGE for doc in docstrings(text(path)) if vague.match(doc)]
    assert [doc.partition("\n")[0] for doc in found] == []


def test_identifiers_use_the_words_of_the_field() -> None:
    found = {path.relative_to(ROOT).as_posix(): replaced_words(text(path)) for path in PACKAGE}
    assert {name: words for name, words in found.items() if words} == {}


# --- The finders


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class _Lendings: pass", {"lendings"}),
        ("def fetched_again(x): return WholeTokens2D(x)", {"fetched_again", "whole_tokens"}),
        ("blend = resettled = lifelines = 'lent'  # lent", set()),
    ],
)
def test_replaced_words_are_found_in_identifiers_only(source: str, words: set[str]) -> None:
    assert replaced_words(source) == words


def test_docstrings_and_functions_are_found() -> None:
    source = 'def f(\n    x,\n):\n    """One.\n\n    Two.\n    """\n    return x\n'
    assert list(docstrings(source)) == ["", "One.\n\nTwo."]
    assert list(function_lengths(source)) == [8]
