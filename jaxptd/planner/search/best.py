"""The best layouts: a search of the most promising first, which proves that none is better.

Items wait in a heap by the least time that they can take: first axes by the time of their products
alone, then each with its schedule and ZeRO stage, then with what its devices send each other, and
then with the exact prediction. What leaves the heap with an exact time is better than all that is
left.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster
from jaxptd.planner.cost import StepTime
from jaxptd.planner.own.compiled import Compiled
from jaxptd.planner.own.memory import Memory, memory_of
from jaxptd.planner.own.step import OwnStep
from jaxptd.planner.search.bounds import Bound, Bounds
from jaxptd.planner.search.space import Axes, Choice, Pipe, Space
from jaxptd.planner.search.units import Units

WHOLE = "whole"  # axes whose schedules are bounded with what layers send


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Args:
        config: with it.
        axes: sizes of its axes.
        step: its predicted time.
        memory: its predicted bytes.
        compiled: what the compiler says of it; None if it was not compiled.
    """

    config: Config
    axes: Axes
    step: StepTime
    memory: Memory
    compiled: Compiled | None = None

    @property
    def seconds(self) -> float:
        """Its time, as compiled if it was."""
        return self.compiled.step.seconds if self.compiled else self.step.seconds


class Search:
    """Finds the best layouts of a space.

    Args:
        space: of the layouts.
        cluster: the devices.
        limit: bytes of a device that a step may use.
    """

    def __init__(self, space: Space, cluster: Cluster, limit: float) -> None:
        self.space, self.cluster, self.limit = space, cluster, limit
        self.units = Units(space, cluster)
        self.counted = 0  # candidates whose time was predicted exactly

    def __iter__(self) -> Iterator[Candidate]:
        """Yields the fastest layout, then the fastest with other axes, and so on."""
        order = itertools.count()
        heap: list[tuple[float, int, Axes, Any]] = []
        for axes in self.space.axes():
            if cost := self.units.bare(axes.unit, axes.micro_batches > 1):
                bounds = Bounds(cost, axes, self.space, self.cluster, self.limit)
                layers = cost.layers(bounds.quickest)
                seconds = axes.micro_batches * (layers + cost.ends) / axes.pp
                heapq.heappush(heap, (seconds, next(order), axes, None))
        done: set[tuple[int, ...]] = set()
        while heap:
            _, _, axes, what = heapq.heappop(heap)
            if axes.sizes in done:
                continue
            if isinstance(what, Candidate):
                done.add(axes.sizes)
                yield what
                continue
            for seconds, found in self._further(axes, what):
                heapq.heappush(heap, (seconds, next(order), axes, found))

    def _further(self, axes: Axes, what: Any) -> Iterator[tuple[float, Any]]:
        """Yields the items that an item of the heap stands for."""
        first, *others = self.space.choices
        if what is None or what is WHOLE:
            found = list(self._least(axes, whole=what is WHOLE))
            if what is WHOLE:
                yield from found
            elif found:
                yield min(seconds for seconds, _ in found), WHOLE
        elif isinstance(what, Pipe):
            bounds = self._bounds(axes)
            fits = bounds and bounds.of(what, first)
            yield from self._items(bounds, what, [first, *self._quick(bounds)] if fits else others)
        elif candidate := self.evaluate(axes, *what):
            yield candidate.step.seconds, candidate
        elif what[1].choice == first:
            yield from self._items(self._bounds(axes), what[0], others)

    def _quick(self, bounds: Bounds | None) -> list[Choice]:
        """Choices that may be faster than the first where that fits; the host keeps nothing."""
        first, *others = self.space.choices
        quickest = bounds and bounds.quickest
        return [c for c in others if c.remat == quickest and c.offload == first.offload]

    def _least(self, axes: Axes, *, whole: bool) -> Iterator[tuple[float, Pipe]]:
        """Schedules and ZeRO stages that may fit, with the least seconds."""
        if bounds := self._bounds(axes, whole=whole):
            for pipe in self.space.pipes(axes, bounds.worth):
                seconds = bounds.least(pipe)
                if seconds is not None:
                    yield seconds, pipe

    def _items(
        self, bounds: Bounds | None, pipe: Pipe, choices: Sequence[Choice]
    ) -> Iterator[tuple[float, Any]]:
        for choice in choices:
            if found := bounds and bounds.of(pipe, choice):
                yield found.seconds, (pipe, found)

    def _bounds(self, axes: Axes, *, whole: bool = True) -> Bounds | None:
        """The bounds of layouts with these axes; whole: with what layers send."""
        many, units = axes.micro_batches > 1, self.units
        cost = units.whole(axes.unit, many, axes.pp > 1) if whole else units.bare(axes.unit, many)
        return Bounds(cost, axes, self.space, self.cluster, self.limit) if cost else None

    def evaluate(self, axes: Axes, pipe: Pipe, bound: Bound) -> Candidate | None:
        """The candidate with as few layers computed again as fit, or all; None if none fits."""
        self.counted += 1
        try:
            found = self._fitting(axes, pipe, bound)
            made = [Candidate(s.config, axes, self.units.predict(s), memory) for s, memory in found]
            return min(made, key=lambda each: each.step.seconds, default=None)
        except UserError:
            return None

    def _fitting(self, axes: Axes, pipe: Pipe, bound: Bound) -> list[tuple[OwnStep, Memory]]:
        """The steps with all layers computed again, and with as few as fit, and their memory."""
        whole = OwnStep(self.space.config_of(axes, pipe, bound.choice))
        every = found = whole, memory_of(whole)
        if found[1].total > self.limit:
            return []
        if bound.choice.remat == "none" or "model.remat_layers" in self.space.pins:
            return [found]
        high = self.space.cut(axes, pipe).depth
        low = max(1, int(bound.share * high))
        middle = low  # the bound is often what fits
        while low < high:  # fewer layers need more memory
            step = OwnStep(self.space.config_of(axes, pipe, bound.choice, middle))
            memory = memory_of(step)
            if memory.total <= self.limit:
                found, high = (step, memory), middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return [found, every]
