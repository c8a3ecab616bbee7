"""The best layouts: a search that looks at the most promising first, and proves that none is better.

Items wait in a heap by the least time that they can take: first axes by the time of their products
alone, then each with its schedule and ZeRO stage, then with what its devices send each other, and
then with the exact prediction. What leaves the heap with an exact time is better than all that is
left.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster
from jaxptd.planner.cost import StepTime
from jaxptd.planner.own.memory import Memory, memory_of
from jaxptd.planner.own.step import OwnStep
from jaxptd.planner.search.bounds import Bound, Sent, UnitCost, bounds, sent_by
from jaxptd.planner.search.space import Axes, Choice, Pipe, Space
from jaxptd.planner.search.units import Units


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Args:
        config: with it.
        axes: sizes of its axes.
        step: its predicted time.
        memory: its predicted bytes.
    """

    config: Config
    axes: Axes
    step: StepTime
    memory: Memory


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
        self._sent = functools.lru_cache(64)(self._sent_by)  # of the latest axes
        self.counted = 0  # candidates whose time was predicted exactly

    def __iter__(self) -> Iterator[Candidate]:
        """Yields the fastest layout, then the fastest with other axes, and so on."""
        order = itertools.count()
        heap: list[tuple[float, int, Axes, Any]] = []
        for axes in self.space.axes():
            if cost := self.units.bare(axes.unit):
                seconds = axes.micro_batches * (cost.layers("none") + cost.ends) / axes.pp
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
        """What an item of the heap stands for."""
        if what is None:
            cost = self.units.bare(axes.unit)
            for pipe in self.space.pipes(axes):
                if found := self._bounds(cost, axes, pipe):
                    yield min(each.seconds for each in found), pipe
        elif isinstance(what, Pipe):
            cost = self.units.whole(axes.unit)
            yield from self._items(self._bounds(cost, axes, what), what)
        else:
            pipe, bound = what
            if candidate := self.evaluate(axes, pipe, bound):
                yield candidate.step.seconds, candidate
            elif bound.choice == self.space.choices[0]:
                cost = self.units.whole(axes.unit)
                others = self._bounds(cost, axes, pipe, self.space.choices[1:])
                yield from self._items(others, pipe)

    def _sent_by(self, axes: Axes, zero: int) -> Sent:
        cost = self.units.bare(axes.unit)
        return sent_by(zero, cost, axes, self.cluster) if cost else Sent()

    def _items(self, found: Sequence[Bound], pipe: Pipe) -> Iterator[tuple[float, Any]]:
        for bound in found:
            yield bound.seconds, (pipe, bound)

    def _bounds(
        self, cost: UnitCost | None, axes: Axes, pipe: Pipe, choices: Sequence[Choice] = ()
    ) -> list[Bound]:
        """The bounds of choices that may fit; by default the first alone if it may."""
        if cost is None:
            return []
        sent = self._sent(axes, pipe.zero)
        if choices:
            return list(bounds(cost, axes, pipe, choices, sent, self.limit))
        first, *others = self.space.choices
        found = list(bounds(cost, axes, pipe, [first], sent, self.limit))
        return found or list(bounds(cost, axes, pipe, others, sent, self.limit))

    def evaluate(self, axes: Axes, pipe: Pipe, bound: Bound) -> Candidate | None:
        """The candidate with as few layers computed again as fit; None if none does."""
        self.counted += 1
        try:
            found = self._fitting(axes, pipe, bound)
            return found and Candidate(found[0].config, axes, self.units.predict(found[0]), found[1])
        except UserError:
            return None

    def _fitting(self, axes: Axes, pipe: Pipe, bound: Bound) -> tuple[OwnStep, Memory] | None:
        """The step with as few layers computed again as fit, and its memory."""
        whole = OwnStep(self.space.config_of(axes, pipe, bound.choice))
        found = whole, memory_of(whole)
        if found[1].total > self.limit:
            return None
        if bound.choice.remat == "none" or "model.remat_layers" in self.space.pins:
            return found
        high = self.space.depth(axes, pipe)
        low = max(1, int(bound.share * high))
        while low < high:  # fewer layers need more memory
            middle = (low + high) // 2
            step = OwnStep(self.space.config_of(axes, pipe, bound.choice, middle))
            memory = memory_of(step)
            if memory.total <= self.limit:
                found, high = (step, memory), middle
            else:
                low = middle + 1
        return found
