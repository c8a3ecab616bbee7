"""Selects the cases to run: choices alternate over layouts instead of meeting each of them."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A slow case of a parametrized test: `pytest.param` with the mark."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def latin(rows: Sequence[Any], columns: Sequence[Any], symbols: Sequence[Any]) -> list[Any]:
    """A Latin square: (row, column, symbol) for every row and column, with alternating symbols.

    Any two choices of different kinds meet in one case, so few cases suffice.

    Args:
        rows: choices, at least as many as symbols.
        columns: choices, at least as many as symbols.
        symbols: choices that alternate.
    """
    assert len(symbols) <= min(len(rows), len(columns))
    return [
        (row, column, symbols[(i + j) % len(symbols)])
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def by_turns(layouts: Sequence[Any], choices: Sequence[Any], first: int = 0) -> list[Any]:
    """Pairs (layout, choice) as test parameters: by default one choice per layout.

    The first layout takes choice number `first`, each later layout the next choice. Slow tests add
    two layouts for each choice. All pairs would take a day; drawn configs (`verify --random`) meet
    the others.
    """
    return [
        (layout, choice) if j == (i + first) % len(choices) else slow(layout, choice)
        for i, layout in enumerate(layouts)
        for j, choice in enumerate(choices)
        if j == (i + first) % len(choices) or (j - i) % len(layouts) < 2
    ]
