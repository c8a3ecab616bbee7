"""What a reader has to know never grows, and the counts count what they should."""

import ast
import json
from functools import partial

import pytest

from benchmarks.structure import __main__ as structure
from benchmarks.structure import paths
from jaxptd.errors import UserError

CEILINGS = {
    "files from read_batch to the update": 32,
    "functions from read_batch to the update": 160,
    "files of one dense block on tp=2": 11,
    "functions of one dense block on tp=2": 48,
    "files that handle a gradient under ZeRO 2": 12,
    "functions that handle a gradient under ZeRO 2": 83,
    "places that ask what a part is, outside its file": 0,
    "comparisons with the name of a ring": 0,
    "definitions of 2 F columns if gated": 0,
    "files of at most 60 lines": 49,
    "files over 600 lines": 0,
    "functions over 60 lines": 0,
    "files": 368,
    "lines": 75_000,
}


def test_measures_only_fall(capsys: pytest.CaptureFixture[str]) -> None:
    assert structure.main(["--json"]) == 0
    found = {name: each["now"] for name, each in json.loads(capsys.readouterr().out).items()}
    assert found.keys() == CEILINGS.keys()
    assert {name: n for name, n in found.items() if n > CEILINGS[name]} == {}
    # A broken counter would find fewer: these are half of what is known to be there.
    assert found["functions of one dense block on tp=2"] > 25
    assert found["functions from read_batch to the update"] > 75


def test_path_whose_function_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "first_step", lambda *_: paths.jaxptd.__dir__)
    with pytest.raises(UserError, match=r"no step calls Run\.read_batch; name another function"):
        paths.entered(paths.ROUTES["from read_batch to the update"])


ASKS = partial(structure.asks, classes={"MLP"})


@pytest.mark.parametrize(
    ("is_meant", "source", "lines"),
    [
        (ASKS, "isinstance(x, parts.MLP | A)\nisinstance(x, A)\ntype(x) is MLP\nMLP(x)", [1, 3]),
        (ASKS, "match x:\n case MLP():\n  pass\n case A(): pass", [2]),
        (structure.compares_ring, "x == 'rsa'\ny = 'rsa'\nx not in ('rsa', z)\n{'rsa': 1}", [1, 3]),
        (
            structure.compares_ring,
            "a.ring == 'gather'\nmatmul2d == 'gather'\nring.kind == 'gather'",
            [1, 3],
        ),
        (structure.counts_gate, "2 if a.gated else 1\n3 if gated else 2\n1 + gated\n1 + x", [1, 3]),
        (structure.counts_gate, "(2,) if gated else ()", [1]),
        (structure.is_long, "def f():\n" + " x\n" * 60 + "def g():\n" + " x\n" * 59, [1]),
    ],
)
def test_finders(is_meant: structure.Finder, source: str, lines: list[int]) -> None:
    nodes = {"a.py": [*ast.walk(ast.parse(source))]}
    assert sorted(structure.places(nodes, is_meant)) == [f"a.py:{n}" for n in lines]


def test_class_that_is_asked_in_its_own_file_or_from_elsewhere_is_no_question() -> None:
    sources = {
        "parts/mlp.py": "class MLP: pass\nisinstance(x, MLP)",
        "analysis/a.py": "from jaxptd.parts import MLP\nisinstance(x, MLP)",
        "display.py": "from rich import MLP\nisinstance(x, MLP)",
    }
    nodes = {file: [*ast.walk(ast.parse(source))] for file, source in sources.items()}
    assert structure.questions(nodes) == ["analysis/a.py:2"]
