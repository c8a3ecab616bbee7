"""Every shard_map of the package is called with a literal `check_vma=True`.

With False, a forgotten psum silently gives wrong numbers; with True, tracing raises an error.
"""

import ast
from pathlib import Path

import pytest

import jaxptd

# Files that must disable the check: path in the package, and the kernel that forces it.
EXCEPTIONS: dict[str, str] = {}

PACKAGE = Path(jaxptd.__file__).parent


def is_shard_map(node: ast.AST) -> bool:
    """True for `shard_map` or an attribute `.shard_map`."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name == "shard_map"


def says_true(call: ast.Call) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg == "check_vma"]
    return [getattr(value, "value", None) for value in values] == [True]


def unchecked(source: str) -> list[int]:
    """Lines that pass check_vma a value other than True, or call shard_map without it."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    checked = {
        part
        for call in calls
        if says_true(call)
        for part in [call.func, *call.args[:1]]
        if is_shard_map(part)
    }
    used = {node for node in ast.walk(tree) if is_shard_map(node)}
    other = {call for call in calls if any(k.arg == "check_vma" for k in call.keywords)}
    other -= {call for call in other if says_true(call)}
    return sorted({node.lineno for node in (used - checked) | other})


@pytest.mark.parametrize(
    "source",
    [
        "jax.shard_map(f, mesh=m, check_vma=True)",
        "shard_map(f, mesh=m, check_vma=True)",
        "partial(jax.shard_map, mesh=m, check_vma=True)(f)",
        "@jax.shard_map(mesh=m, check_vma=True)\ndef f(x): return x",
        "from jax import shard_map",
        "'shard_map(f)'",
    ],
)
def test_the_finder_accepts(source):
    assert unchecked(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "jax.shard_map(f, mesh=m)",
        "jax.shard_map(f, mesh=m, check_vma=False)",
        "shard_map(f, mesh=m, check_vma=1 == 1)",
        "shard_map(f, **options)",
        "partial(jax.shard_map, mesh=m)(f)",
        "@jax.shard_map\ndef f(x): return x",
        "wrap = jax.shard_map",
        "spread(f, check_vma=False)",
        "spread(f, check_vma=not strict)",
    ],
)
def test_the_finder_finds(source):
    assert unchecked(source) == [1]


def test_no_file_switches_the_check_off():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 5
    found = {str(file.relative_to(PACKAGE)): unchecked(file.read_text("utf-8")) for file in files}
    assert {name for name, lines in found.items() if lines} == set(EXCEPTIONS), found
