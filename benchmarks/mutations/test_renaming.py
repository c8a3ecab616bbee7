"""Renaming locals and reformatting break no row, and leave every mutated program the same."""

import ast
import random
from collections import defaultdict

import pytest

from benchmarks.mutations.matching import Code
from benchmarks.mutations.names import FUNCTION, IDENTIFIER, Key
from benchmarks.mutations.table import ROOT, Mutation, mutations

ROWS: dict[str, list[Mutation]] = defaultdict(list)  # by file
for each in mutations():
    if each.file.endswith(".py"):
        ROWS[each.file].append(each)
TEN = random.Random(0).sample(sorted(ROWS), 10)


def local_names(code: Code) -> list[Key]:
    """The locals of functions, without parameters, definitions and nonlocal names."""
    nodes = [node for name, nodes in code.definitions.items() if name for node in nodes]
    inside = {node for function in nodes for node in ast.walk(function)}
    fixed = {key for node, key in code.owned.items() if isinstance(node, (*FUNCTION, ast.arg))}
    shared = [node.names for node in ast.walk(code.tree) if isinstance(node, ast.Nonlocal)]
    outer = {"_", *(name for names in shared for name in names)}
    keys = dict.fromkeys(key for node, key in code.owned.items() if node in inside)
    return [key for key in keys if key not in fixed and key[1] not in outer]


@pytest.mark.parametrize(
    "file", [x if x in TEN else pytest.param(x, marks=pytest.mark.slow) for x in sorted(ROWS)]
)
def test_renamed_locals_and_another_layout_break_no_row(file: str) -> None:
    """Every row applies to the new text, and gives the same result as for the file."""
    old = (ROOT / file).read_text()
    code = Code(old)
    numbers = {key: number for number, key in enumerate(local_names(code))}
    for node, key in code.owned.items():
        if key in numbers:
            setattr(node, IDENTIFIER[type(node)], f"renamed_{numbers[key]}")
    new = ast.unparse(code.tree)  # without comments, with other lines and quotes
    assert new != old
    for row in ROWS[file]:
        assert row.difference(new) == row.difference(old), row.name
