"""Renamed locals and another layout break no row, and leave every mutated program what it was."""

import ast
import random
import subprocess
import sys
import textwrap
from collections import defaultdict
from functools import cache

import pytest

from benchmarks.mutations.matching import Code
from benchmarks.mutations.names import FUNCTION, IDENTIFIER, Key
from benchmarks.mutations.table import ROOT, Mutation, mutations

ROWS: dict[str, list[Mutation]] = defaultdict(list)  # by file
for each in mutations():
    if each.file.endswith(".py"):
        ROWS[each.file].append(each)
FUNCTIONS = sorted({(row.file, row.changes[0].where) for rows in ROWS.values() for row in rows})
TWENTY = 20
NARROW = "60"  # columns


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def differences(file: str) -> list:
    return [row.difference(source(file)) for row in ROWS[file]]


def check(file: str, text: str) -> None:
    """Every row of the file is applied to the text, and makes of it what it makes of the file."""
    assert text != source(file)
    for row, difference in zip(ROWS[file], differences(file), strict=True):
        assert row.difference(text) == difference, row.name


def local_names(code: Code, functions: list[ast.AST]) -> list[Key]:
    """The locals of functions, without parameters, definitions and what is nonlocal."""
    inside = {node for function in functions for node in ast.walk(function)}
    fixed = {key for node, key in code.owned.items() if isinstance(node, (*FUNCTION, ast.arg))}
    shared = [node.names for node in ast.walk(code.tree) if isinstance(node, ast.Nonlocal)]
    outer = {"_", *(name for names in shared for name in names)}
    keys = dict.fromkeys(key for node, key in code.owned.items() if node in inside)
    return [key for key in keys if key not in fixed and key[1] not in outer]


def renamed(code: Code, keys: list[Key]) -> str:
    """The text with other names for these."""
    numbers = {key: number for number, key in enumerate(keys)}
    for node, key in code.owned.items():
        if key in numbers:
            setattr(node, IDENTIFIER[type(node)], f"renamed_{numbers[key]}")
    return ast.unparse(code.tree)


def test_twenty_renamed_locals_break_no_row() -> None:
    draw, done = random.Random(0), 0
    for file, where in draw.sample(FUNCTIONS, len(FUNCTIONS)):
        code = Code(source(file))
        if keys := local_names(code, code.definitions[where] if where else []):
            check(file, renamed(code, [draw.choice(keys)]))
            done += 1
        if done == TWENTY:
            return
    pytest.fail("there are no twenty functions with locals")


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(ROWS))
def test_all_locals_are_renamed(file: str) -> None:
    code = Code(source(file))
    keys = local_names(
        code, [node for name, nodes in code.definitions.items() if name for node in nodes]
    )
    check(file, renamed(code, keys))


def test_twenty_functions_laid_out_anew_break_no_row() -> None:
    done = 0
    for file, where in random.Random(0).sample(FUNCTIONS, len(FUNCTIONS)):
        (node, *_), lines = Code(source(file)).definitions[where], source(file).splitlines()
        if isinstance(node, FUNCTION):
            own = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            new = textwrap.indent(laid_out(textwrap.dedent(own)), " " * node.col_offset)
            if new != own + "\n":
                check(file, "\n".join([*lines[: node.lineno - 1], new, *lines[node.end_lineno :]]))
                done += 1
        if done == TWENTY:
            return
    pytest.fail("there are no twenty functions to lay out anew")


def laid_out(text: str) -> str:
    command = ["ruff", "format", "--isolated", "--line-length", NARROW, "-"]
    command = [sys.executable, "-m", *command]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
