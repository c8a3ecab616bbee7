"""Counts what a reader has to know: files and functions on three paths, and repeated knowledge.

`python -m benchmarks.structure [--verbose] [--json] [--out FILE]`

Prints each count next to its target. `--verbose` adds the functions of each path by file, and the
places that are counted. `paths.py` says what is on a path. The following are counted in the syntax:

- code that asks what a part of a model is: `isinstance`, `type(x) is` or a `case` with a class that
  describes a part or its sizes (a class of `HOMES`), outside the file of that class;
- comparisons with the name of a kind of ring, such as `ring == "zigzag"`;
- definitions of the number of columns of a gated MLP's first matmul: `2 if gated else 1`, `(2,) if
  gated else ()` and `1 + gated`.
"""

import ast
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from benchmarks.lib.pages import append, head, joined, parser
from benchmarks.structure.paths import PACKAGE, ROUTES, entered
from jaxptd.analysis.report import table
from jaxptd.config import Config, TrainConfig
from jaxptd.errors import run_command
from jaxptd.layout import Layout, Matmul2D, RingKind
from jaxptd.run.devices import prepare

HOMES = ("parts/", "vision/architecture")  # of parts
SHORT, LONG, LONG_FUNCTION = 60, 600, 60  # lines
HEAD = ("measure", "now", "target, at most", "where")
Finder = Callable[[Any], bool]
Nodes = dict[str, list[Any]]  # the nodes of each file of the package
Measure = tuple[int, int, list[str]]  # the count, its target, and where


def questions(nodes: Nodes) -> list[str]:
    """Lists the code that asks what a part is, outside the part's own file."""
    homes = [f"jaxptd.{file[:-3].replace('/', '.')}" for file in nodes if file.startswith(HOMES)]
    every = [x for file in nodes if file.startswith(HOMES) for x in nodes[file]]
    classes = {x.name for x in every if isinstance(x, ast.ClassDef)}
    found = []
    for file, inside in nodes.items():
        imports = (x for x in inside if isinstance(x, ast.ImportFrom) and x.module)
        ours = (x for x in imports if any(home.startswith(x.module) for home in homes))
        known = classes & {alias.name for each in ours for alias in each.names}
        found += places({file: inside}, partial(asks, classes=known))
    return found


def asks(node: ast.AST, classes: set[str]) -> bool:
    """True if an expression or pattern asks whether something is one of the classes."""
    match node:
        case ast.Call(ast.Name("isinstance" | "issubclass"), [_, kind]) | ast.MatchClass(kind):
            kinds = [kind]
        case ast.Compare(ast.Call(ast.Name("type")), _, kinds):
            pass
        case _:
            return False
    return any(last_name(each) in classes for kind in kinds for each in ast.walk(kind))


def compares_ring(node: ast.AST) -> bool:
    """True for a comparison with the name of a kind of ring.

    A name that a matmul on a grid has as well counts where it is compared with a ring's.
    """
    if not isinstance(node, ast.Compare | ast.MatchValue):
        return False
    rings = isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(("ring", "ring.kind"))
    names = set(get_args(RingKind)) - (set() if rings else set(get_args(Matmul2D)))
    return any(getattr(x, "value", None) in names for x in ast.walk(node))


def counts_gate(node: ast.AST) -> bool:
    """True for an expression that says how many matrices an MLP's first matmul has."""
    match node:
        case ast.IfExp(gate, ast.Constant(2) | ast.Tuple([ast.Constant(2)])):
            return last_name(gate) == "gated"
        case ast.BinOp(ast.Constant(1), ast.Add(), gate):
            return last_name(gate) == "gated"
    return False


def is_long(node: Any) -> bool:
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return function and node.end_lineno - node.lineno >= LONG_FUNCTION


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def places(nodes: Nodes, is_meant: Finder) -> list[str]:
    """Lists the nodes for which a function is true, as `file:line`."""
    return [f"{file}:{x.lineno}" for file, inside in nodes.items() for x in inside if is_meant(x)]


def in_code() -> dict[str, Measure]:
    """The counts from the syntax, and from the lengths of files and functions."""
    paths = {x.relative_to(PACKAGE).as_posix(): x.read_bytes() for x in PACKAGE.rglob("*.py")}
    nodes = {file: [*ast.walk(ast.parse(text))] for file, text in sorted(paths.items())}
    lines = {file: paths[file].count(b"\n") for file in nodes}
    found = {
        "places that ask what a part is, outside its file": (0, questions(nodes)),
        "comparisons with the name of a ring": (0, places(nodes, compares_ring)),
        "definitions of 2 F columns if gated": (1, places(nodes, counts_gate)),
        f"files of at most {SHORT} lines": (40, [x for x, n in lines.items() if n <= SHORT]),
        f"files over {LONG} lines": (0, [x for x, n in lines.items() if n > LONG]),
        f"functions over {LONG_FUNCTION} lines": (0, places(nodes, is_long)),
    }
    measures = {name: (len(where), wanted, where) for name, (wanted, where) in found.items()}
    return {**measures, "files": (len(lines), 250, []), "lines": (sum(lines.values()), 42_000, [])}


def on_paths() -> dict[str, Measure]:
    """The counts of the paths, two for each."""
    measures: dict[str, Measure] = {}
    for name, route in ROUTES.items():
        found, (files, functions) = entered(route), route.wanted
        where = sorted((f"{len(x):3} {file}: {', '.join(x)}" for file, x in found.items()))[::-1]
        measures[f"files {name}"] = len(found), files, []
        measures[f"functions {name}"] = sum(map(len, found.values())), functions, where
    return measures


def main(argv: Sequence[str] | None = None) -> int:
    """Counts the files and functions that a reader of the package has to know."""
    made = parser("structure", main)
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    made.add_argument("--verbose", action="store_true", help="print what is counted, and where")
    options = made.parse_args(argv)
    prepare(Config(layout=Layout(dp=2), train=TrainConfig(global_batch_size=2, platform="cpu")))
    found = on_paths() | in_code()
    text = table([HEAD[:3], *([name, f"{x[0]:,}", f"{x[1]:,}"] for name, x in found.items())])
    if options.json:
        each = {name: dict(zip(HEAD[1:], x, strict=True)) for name, x in found.items()}
        print(json.dumps(each, indent=1))
    elif options.verbose:
        sections = (f"## {name}\n\n" + "\n".join(x[2]) for name, x in found.items() if x[2])
        print(joined(text, *sections), end="")
    else:
        print(text)
    append(options.out, head("What a reader has to know", "structure"), joined(text))
    return 0


if __name__ == "__main__":
    run_command(main)
