"""Which cases run by default: choices take turns over layouts; slow tests meet every pair."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A slow case of a parametrized test: `pytest.param` with the mark."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def by_turns(layouts: Sequence[Any], choices: Sequence[Any], first: int = 0) -> list[Any]:
    """Every (layout, choice) as test parameters: one choice a layout by default, the rest slow.

    The first layout takes choice number `first`, each layout after it the next choice.
    """
    return [
        (layout, choice) if j == i % len(choices) else slow(layout, choice)
        for i, layout in enumerate(layouts, first)
        for j, choice in enumerate(choices)
    ]
