"""The hops of a schedule: the permutes over pp that send results from stage to stage.

A permute synchronizes all devices that it joins. In 1F1B only every second pair of neighbours
exchanges values at a tick, an activation one way and a gradient the other. So there is a permute
within the even pairs of stages, (0, 1) (2, 3) ..., and one within the odd pairs, (1, 2) (3, 4) ...:
no stage that runs forward then waits for one that runs backward, which takes twice as long. Results
that the pairs do not cover take a hop onward, from every stage to the next, or back.
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
        ticks: the number of ticks of the schedule.
        moved: (tick, source stage, target stage) of every result that an operation reads.
    """

    stages: int
    ticks: int
    moved: tuple[tuple[int, int, int], ...]

    @cached_property
    def pairs(self) -> dict[str, Pairs]:
        """(source, target) stages of each hop that any tick takes."""
        used = {hop for hops in self._at.values() for hop in hops}
        return {name: pairs for name, pairs in self._known.items() if name in used}

    @cached_property
    def taken(self) -> dict[str, np.ndarray]:
        """int32 `[ticks]` for each hop: 1 at the ticks that take it."""
        return {
            name: np.array([name in self.at(tick) for tick in range(self.ticks)], np.int32)
            for name in self.pairs
        }

    @cached_property
    def together(self) -> list[tuple[str, ...]]:
        """The hops that some tick takes together; the first is none."""
        return sorted({(), *self._at.values()}, key=lambda hops: (len(hops), hops))

    @cached_property
    def chosen(self) -> np.ndarray:
        """int32 `[ticks]`: the number in `together` of the hops that each tick takes."""
        numbers = {hops: number for number, hops in enumerate(self.together)}
        return np.array([numbers[self.at(tick)] for tick in range(self.ticks)], np.int32)

    def at(self, tick: int) -> tuple[str, ...]:
        """The hops taken at the end of a tick, none, one or two."""
        return self._at.get(tick, ())

    def column(self, tick: int, source: int, target: int) -> str:
        """The column of the plan for a result's slot on the target stage: `keep` or `in_<hop>`."""
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
        """The fewest hops that cover all of these (source, target) pairs."""
        known = self._known
        one, two = ((name,) for name in known), itertools.combinations(known, 2)
        return next(
            names
            for names in itertools.chain(one, two)
            if pairs <= {pair for name in names for pair in known[name]}
        )

    @cached_property
    def _known(self) -> dict[str, Pairs]:
        """Every possible hop; those within pairs come first and are preferred."""
        p = self.stages
        closed = p > 2 and any({source, to} == {0, p - 1} for _, source, to in self.moved)
        onward = tuple((s, (s + 1) % p) for s in range(p if closed else p - 1))
        back = tuple((to, s) for s, to in onward)
        both = list(zip(onward, back, strict=True))
        even = tuple(itertools.chain(*both[0 : p - p % 2 : 2]))
        odd = tuple(itertools.chain(*both[1::2]))
        return {"even": even, "odd": odd, "onward": onward, "back": back}
