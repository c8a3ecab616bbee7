"""Selects the cases to run: choices alternate over layouts, and in slow tests over pairs."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A slow case of a parametrized test: `pytest.param` with the mark."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def latin(rows: Sequence[Any], columns: Sequence[Any], symbols: Sequence[Any]) -> list[Any]:
    """A Latin square: (row, column, symbol) for every row and column, with symbols by turns.

    So any two choices of different kinds meet, in few cases.

    Args:
        rows: at least as many as there are symbols.
        columns: likewise.
        symbols: what takes turns.
    """
    assert len(symbols) <= min(len(rows), len(columns))
    return [
        (row, column, symbols[(i + j) % len(symbols)])
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def by_turns(layouts: Sequence[Any], choices: Sequence[Any], first: int = 0) -> list[Any]:
    """Every (layout, choice) as test parameters: one choice a layout by default, the rest slow.

    The first layout takes choice number `first`, each layout after it the next choice.
    """
    return [
        (layout, choice) if j == i % len(choices) else slow(layout, choice)
        for i, layout in enumerate(layouts, first)
        for j, choice in enumerate(choices)
    ]
