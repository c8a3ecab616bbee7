"""`pytest --share I/N`: shares are disjoint and cover all tests; bad input gives one line."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"


def chosen(share: str | None, items: list[str]) -> tuple[list[str], list[str]]:
    """Returns (tests that run, tests reported as deselected)."""
    spec = importlib.util.spec_from_file_location("conftest_under_test", CONFTEST)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    left, deselected = list(items), []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config = SimpleNamespace(getoption={"--share": share}.get, hook=hook)
    module.pytest_collection_modifyitems(config, left)
    return left, deselected


@pytest.mark.parametrize("count", [0, 1, 7, 9])
def test_shares_are_disjoint_and_together_all_tests(count: int) -> None:
    items = [f"test {i}" for i in range(count)]
    shares = [chosen(f"{i}/4", items) for i in range(1, 5)]
    assert sorted(test for left, _ in shares for test in left) == items
    assert all(sorted(left + deselected) == items for left, deselected in shares)
    assert max(len(left) for left, _ in shares) - min(len(left) for left, _ in shares) <= 1


def test_without_it_all_run() -> None:
    assert chosen(None, ["a", "b"]) == (["a", "b"], [])


@pytest.mark.parametrize("share", ["", "1", "0/3", "4/3", "1/0", "-1/3", "a/b", "1/3/5", "1.5/3"])
def test_another_share_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="--share .*: use I/N"):
        chosen(share, ["a", "b"])
