"""The search over a framework's layouts: those that fit in memory, fastest first."""

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from jaxptd.costs.program import Parallelism
from jaxptd.costs.terms import scaled
from jaxptd.planner.cost import StepDescription, StepTime, step_time
from jaxptd.planner.cost.layer import layer_terms
from jaxptd.planner.cost.step import (
    Kind,
    Layers,
    by_place,
    end_terms,
    layer_passes,
    put_together,
)
from jaxptd.planner.frameworks.framework import Framework, Setup, Workload, divisors
from jaxptd.planner.frameworks.memory import memory_of

LARGEST = 16  # most sequences in a micro-batch
Axes = tuple[int, ...]


# ---- the time of one layout ----------------------------------------------------------------------


def describe(framework: Framework, workload: Workload, setup: Setup) -> StepDescription:
    """The step of a layout."""
    parallelism = setup.parallelism
    record = framework.implementation(workload, parallelism)
    return StepDescription(workload.architecture, parallelism, record, workload.cluster)


def time_of(framework: Framework, description: StepDescription, setup: Setup) -> StepTime:
    """Predicts a framework's step: the one place where it meets the cost model."""
    collectives = framework.collectives(description)
    share = framework.again(setup)
    if not share:
        return step_time(description, collectives)
    places = by_place(collectives)
    kinds = {kind for stage in description.stages for kind in stage}
    layers = _with_products(description, layer_passes(description, kinds, places), share)
    once = places.get("step", ())
    return put_together(description, layers, end_terms(description, places), once)


def _with_products(description: StepDescription, layers: Layers, share: float) -> Layers:
    """Adds a share of forward's matmuls to backward of the layers that recompute."""
    stacks = {stack.name: stack for stack in description.model.stacks}
    return {
        (name, remat): passes
        if remat == "none"
        else passes.and_backward(
            [
                term.named(f"{term.name} again")
                for term in scaled(layer_terms(description, stacks[name]).products, share)
            ]
        )
        for (name, remat), passes in layers.items()
    }


# ---- all layouts ---------------------------------------------------------------------------------


def layouts(framework: Framework, workload: Workload) -> Iterator[Parallelism]:
    """Every layout that divides devices, batch and model, without what backward recomputes."""
    for tp, cp, pp, ep in _axes(framework, workload):
        dp = workload.gpus // (tp * cp * pp)
        if workload.batch % dp or not workload.allows("layout.dp", dp):
            continue
        for micro_batch in divisors(workload.batch // dp, LARGEST):
            m = workload.batch // dp // micro_batch
            if not workload.allows("train.micro_batches", m):
                continue
            base = Parallelism(
                *(workload.gpus, workload.batch, micro_batch),
                tp=tp,
                cp=cp,
                pp=pp,
                **_experts(framework, workload, tp, ep),
                sequence_parallel=tp > 1 and framework.sequence_parallel,
            )
            yield from _allowed(framework, workload, base)


def _experts(framework: Framework, workload: Workload, tp: int, ep: int) -> dict[str, Any]:
    """Fields that divide experts; none for a dense model."""
    if workload.model.moe is None:
        return {}
    slices = framework.expert_slices(tp)
    return {"experts_over": ep, "expert_tp": slices, "dispatch": "alltoall"}


def _axes(framework: Framework, workload: Workload) -> Iterator[Axes]:
    for tp in framework.tensor_sizes(workload):
        if not workload.allows("layout.tp", tp):
            continue
        for cp in framework.context_sizes(workload, tp):
            if not workload.allows("layout.cp", cp):
                continue
            for pp in framework.stage_counts(workload, tp, cp):
                if not workload.allows("layout.pp", pp):
                    continue
                dp = workload.gpus // (tp * cp * pp)
                for ep in framework.expert_sizes(workload, tp, cp, dp):
                    if workload.allows("layout.ep", ep):
                        yield tp, cp, pp, ep


def _allowed(framework: Framework, workload: Workload, base: Parallelism) -> Iterator[Parallelism]:
    for each in framework.variants(workload, base):
        chunks = workload.allows("layout.virtual_stages", each.virtual_stages)
        if chunks and workload.allows("layout.zero", each.zero):
            yield each


def setups(framework: Framework, workload: Workload) -> Iterator[list[Setup]]:
    """Layouts with what backward may recompute: lists, each from the fastest to the smallest."""
    for parallelism in layouts(framework, workload):
        for family in framework.recomputes(workload, parallelism):
            kept = [
                each for each in family if workload.allows("model.remat", each.parallelism.remat)
            ]
            if kept:
                yield kept


# ---- the search ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    """A layout that fits in memory.

    Args:
        setup: the layout.
        step: its predicted time.
        memory: bytes of the fullest device by kind.
    """

    setup: Setup
    step: StepTime
    memory: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def bytes(self) -> float:
        """Peak bytes of the fullest device."""
        return sum(self.memory.values())


class FrameworkSearch:
    """Finds the fastest layouts of a framework.

    Args:
        framework: that trains.
        workload: model, batch and devices.
        limit: bytes of a device that a step may use.
    """

    def __init__(self, framework: Framework, workload: Workload, limit: float) -> None:
        self.framework, self.workload, self.limit = framework, workload, limit
        self.counted = 0  # layouts whose time was predicted exactly
        self._seconds: dict[tuple, Mapping[Kind, float]] = {}

    def __iter__(self) -> Iterator[Found]:
        """Yields the fastest layout, then the fastest with other axis sizes, and so on.

        A family of layouts is bounded by its layers without communication, then with it; only what
        these bounds leave open is predicted.
        """
        order = itertools.count()
        heap: list[tuple[float, int, bool, list[Setup] | Found]] = [
            (self._least(family[0]), next(order), False, family) for family in self._families
        ]
        heapq.heapify(heap)
        done: set[Axes] = set()
        while heap:
            _, _, sent, item = heapq.heappop(heap)
            setup = item.setup if isinstance(item, Found) else item[0]
            if sizes_of(setup) in done:
                continue
            if isinstance(item, Found):
                done.add(sizes_of(setup))
                yield item
            elif not sent:
                least = self._least(setup, sent=True)
                heapq.heappush(heap, (least, next(order), True, item))
            elif found := self._first_fitting(item):
                heapq.heappush(heap, (found.seconds, next(order), True, found))

    @cached_property
    def _families(self) -> list[list[Setup]]:
        return list(setups(self.framework, self.workload))

    @property
    def has_layouts(self) -> bool:
        """True if there is a layout, whether it fits or not."""
        return bool(self._families)

    def _first_fitting(self, family: list[Setup]) -> Found | None:
        """The fastest of a family that fits; its members need less and less memory."""
        if sum(self._memory(family[-1]).values()) > self.limit:
            return None
        low, high = 0, len(family) - 1
        while low < high:
            middle = (low + high) // 2
            if sum(self._memory(family[middle]).values()) <= self.limit:
                high = middle
            else:
                low = middle + 1
        setup = family[low]
        self.counted += 1
        step = time_of(self.framework, describe(self.framework, self.workload, setup), setup)
        return Found(setup, step, self._memory(setup))

    def _memory(self, setup: Setup) -> dict[str, float]:
        description = describe(self.framework, self.workload, setup)
        return memory_of(self.framework, description, self.workload.model, setup)

    def _least(self, setup: Setup, *, sent: bool = False) -> float:
        """Seconds that the layers take at least, evenly on the stages; sent: what they send too."""
        parallelism = setup.parallelism
        pp, m, chunks = parallelism.pp, parallelism.micro_batches, parallelism.virtual_stages
        passes = m + (pp - 1) / chunks
        layers = self._layers(setup, sent=sent)
        seconds = 0.0
        for stack in self.workload.architecture.stacks:
            first = parallelism.remat_layers
            whole = stack.layers if first is None else min(stack.layers, first * pp)
            seconds += whole * layers[stack.name, parallelism.remat]
            seconds += (stack.layers - whole) * layers[stack.name, "none"]
        return passes * seconds / pp

    def _layers(self, setup: Setup, *, sent: bool) -> Mapping[Kind, float]:
        """Seconds of a layer of each stack, with the layout's policy and with none."""
        p = setup.parallelism
        record = self.framework.implementation(self.workload, p)
        spread = (p.pp, p.zero, p.zero_group) if sent else ()
        key = (record, p.tp, p.cp, p.expert_devices, p.micro_batch, p.remat, *spread)
        if key not in self._seconds:
            description = StepDescription(
                self.workload.architecture, p, record, self.workload.cluster
            )
            places = by_place(self.framework.collectives(description)) if sent else {}
            kinds: set[Kind] = set()
            for stack in description.model.stacks:
                kinds |= {(stack.name, p.remat), (stack.name, "none")}
            layers = layer_passes(description, kinds, places)
            layers = _with_products(description, layers, self.framework.again(setup))
            self._seconds[key] = {kind: passes.seconds for kind, passes in layers.items()}
        return self._seconds[key]


def sizes_of(setup: Setup) -> Axes:
    """Sizes of the axes; a ranking shows one layout for each."""
    p = setup.parallelism
    return p.tp, p.cp, p.expert_devices, p.pp, p.dp, p.zero, p.zero_group
