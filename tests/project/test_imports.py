"""No module imports another module of the package out of import-linter's sight."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "jaxptd"
CONTRACTS = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
# Exceptions, with reasons. All others import at the top of the file, or from `commands.table`.
ALLOWED = {
    "__init__.py": "names that are imported when they are used",
    "context_parallel.py": "strategies, layers and models, which plans know without JAX",
    "commands/table.py": "commands, and what only some of their options need",
    "data/parquet.py": "pyarrow, an optional extra",
    "mesh.py": "`python -m jaxptd.mesh`, whose command is in a folder above",
    "plot/__init__.py": "figures, which need matplotlib, an optional extra",
}
HIDDEN = {"import_module", "__import__", "run_module", "run_path", "reload"}


def hidden_imports(source: str) -> Iterator[str]:
    """Names of functions that a file calls to import a module by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in HIDDEN:
                yield name
        if isinstance(node, ast.ImportFrom):
            yield from HIDDEN & {alias.name for alias in node.names}


def test_only_a_few_files_import_by_name() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {name for name, path in files.items() if [*hidden_imports(path.read_text("utf-8"))]}
    assert found == {*ALLOWED}


def test_every_way_is_found() -> None:
    for line in (
        "importlib.import_module('jaxptd.run')",
        "from importlib import import_module",
        "__import__('jaxptd.run')",
        "runpy.run_module('jaxptd.run')",
    ):
        assert [*hidden_imports(line)]
    assert not [*hidden_imports("from jaxptd.run import folder")]


def test_folders_without_a_place_of_their_own_have_one_for_each_module() -> None:
    """`exhaustive` covers only the top level; an `__init__` without imports needs no layer."""
    (order,) = (each for each in CONTRACTS["contracts"] if each["type"] == "layers")
    placed = {name for layer in order["layers"] for name in re.findall(r"[\w.]+", layer)}
    for folder in order["exhaustive_ignores"]:
        files = (PACKAGE / folder).glob("[!_]*.py"), (PACKAGE / folder).glob("*/__init__.py")
        modules = {path.stem for path in files[0]} | {path.parent.name for path in files[1]}
        assert {name for name in placed if name.startswith(f"{folder}.")} == {
            f"{folder}.{name}" for name in modules
        }
        face = ast.parse((PACKAGE / folder / "__init__.py").read_text("utf-8"))
        assert not [
            node for node in ast.walk(face) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
