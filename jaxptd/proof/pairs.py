"""Pairs of values of two fields: which of them have met in a case."""

import itertools
import random
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from jaxptd.proof.values import DRAWN, Values

Level = tuple[str, Any]  # a field and its value
Pair = tuple[Level, Level]


class Pairs:
    """The pairs of values that have met, and those that no config has.

    Args:
        draw: orders the pairs that are looked for.
    """

    def __init__(self, draw: random.Random) -> None:
        self.open = _all_pairs()
        draw.shuffle(self.open)
        self.met: set[Pair] = set()
        self.refused: set[Pair] = set()

    @cached_property
    def number(self) -> int:
        """The number of all pairs."""
        return len(_all_pairs())

    def counts(self) -> dict[str, int]:
        """Pairs that have met, of how many, and those beside them that no config was found for."""
        refused = len(self.refused)
        return {"met": len(self.met), "of": self.number - refused, "refused": refused}

    def new(self, values: Values) -> int:
        """The number of pairs of a case that have not met yet."""
        return sum(pair not in self.met for pair in pairs_of(values))

    def add(self, values: Values) -> None:
        """Counts the pairs of a case."""
        self.met.update(pairs_of(values))
        self.refused -= self.met

    def next(self, kept: Values) -> Pair | None:
        """A pair that has not met and contradicts no value of `kept`; None if there is none."""
        self.open = [pair for pair in self.open if pair not in self.met]
        for pair in self.open:
            if pair not in self.refused and all(kept.get(n, v) == v for n, v in pair):
                return pair
        return None


def pairs_of(values: Values) -> Iterator[Pair]:
    """Every pair of two values of a case, in the order of `DRAWN`."""
    return itertools.combinations([(name, values[name]) for name in DRAWN], 2)


def _all_pairs() -> list[Pair]:
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(DRAWN, 2)
        for x in DRAWN[a]
        for y in DRAWN[b]
    ]
