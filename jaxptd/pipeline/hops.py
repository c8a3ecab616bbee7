"""How results go from stage to stage: the permutes that a schedule's ticks need.

A permute waits for every device it joins. In 1F1B, at each tick only the stages of every second
pair of neighbours have something for each other, an activation one way and a gradient the other: a
permute within these pairs keeps nobody else waiting, so that stages that run forward wait for none
that run backward, which takes twice as long. Where the pairs do not suffice a hop goes to the next
stage, or to the one before, or one each way.
"""

import dataclasses
import itertools
from functools import cached_property

import numpy as np

Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Hops:
    """The hops of a schedule.

    Args:
        stages: p.
        ticks: of the schedule.
        moved: (tick, source stage, target stage) of every result that is used again.
    """

    stages: int
    ticks: int
    moved: tuple[tuple[int, int, int], ...]

    @cached_property
    def pairs(self) -> dict[str, Pairs]:
        """(source, target) stages of each hop that is taken at some tick."""
        used = {hop for hops in self._at.values() for hop in hops}
        return {name: pairs for name, pairs in self._known.items() if name in used}

    @cached_property
    def taken(self) -> dict[str, np.ndarray]:
        """int32 `[ticks]` of each hop: 1 where it is taken."""
        return {
            name: np.array([name in self.at(tick) for tick in range(self.ticks)], np.int32)
            for name in self.pairs
        }

    def at(self, tick: int) -> tuple[str, ...]:
        """The hops taken at the end of a tick."""
        return self._at.get(tick, ())

    def column(self, tick: int, source: int, target: int) -> str:
        """Where a plan says what becomes of a result: it is kept, or arrives by a hop."""
        if source == target:
            return "keep"
        hop = next(hop for hop in self.at(tick) if (source, target) in self._known[hop])
        return f"in_{hop}"

    @cached_property
    def _at(self) -> dict[int, tuple[str, ...]]:
        moved: dict[int, set[tuple[int, int]]] = {}
        for tick, source, target in self.moved:
            if source != target:
                moved.setdefault(tick, set()).add((source, target))
        return {tick: self._choose(pairs) for tick, pairs in moved.items()}

    def _choose(self, pairs: set[tuple[int, int]]) -> tuple[str, ...]:
        """As few hops as bring something over all of these pairs."""
        known = self._known
        one, two = ((name,) for name in known), itertools.combinations(known, 2)
        return next(
            names
            for names in itertools.chain(one, two)
            if pairs <= {pair for name in names for pair in known[name]}
        )

    @cached_property
    def _known(self) -> dict[str, Pairs]:
        """Of all hops, those within pairs first."""
        p = self.stages
        closed = p > 2 and any({source, to} == {0, p - 1} for _, source, to in self.moved)
        onward = tuple((s, (s + 1) % p) for s in range(p if closed else p - 1))
        back = tuple((to, s) for s, to in onward)
        both = list(zip(onward, back, strict=True))
        even = tuple(itertools.chain(*both[0 : p - p % 2 : 2]))
        odd = tuple(itertools.chain(*both[1::2]))
        return {"even": even, "odd": odd, "onward": onward, "back": back}
