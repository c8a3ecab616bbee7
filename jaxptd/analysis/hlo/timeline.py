"""Estimates how long a scheduled GPU program takes, from its text.

Kernels run one after the other, as the text has them; collectives run beside them, one at a time on
each link, from their start to their done. If a collective has not ended when its result is asked
for, the kernels wait: for so long it is *exposed*. A loop takes the time of its body at each trip.

A product takes the time of its FLOPs or that of its bytes, whichever is longer, other kernels that
of their bytes, and a collective that of the bytes a device sends. Launches and latencies take none,
and no kernel slows another down: an estimate from below, to compare programs with.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping

from jaxptd.analysis.collective import REDUCE_SCATTER, Collective
from jaxptd.analysis.hlo.collectives import axes_of, kind_of_collective, payload
from jaxptd.analysis.hlo.kernels import ATTENTION, PRODUCT, is_kernel, kind_of, moved_bytes
from jaxptd.analysis.hlo.products import flops_of, head_size, in_8_bits
from jaxptd.analysis.hlo.text import WHOLE, Computations, Instruction, Pipeline, parse

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of a GPU.

    Args:
        flops: of products.
        flops_8_bits: of products of 8-bit numbers.
        attention: FLOP/s for each number of a head: it takes as long per score for larger heads.
        memory: bytes that kernels read and write.
        link: of the axes of a collective, the link's name and the bytes that a device sends on it.
    """

    flops: float
    flops_8_bits: float
    attention: float
    memory: float
    link: Callable[[Axes], tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one device; of a pipeline's stages the mean counts.

    Args:
        kernels: by kind (`kernels.KINDS`).
        sent: of collectives, by axes.
        exposed: for which kernels wait for collectives, by axes.
    """

    kernels: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    sent: dict[Axes, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    exposed: dict[Axes, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        return sum(self.kernels.values()) + sum(self.exposed.values())

    @property
    def hidden(self) -> float:
        """The share of the collectives' time in which kernels run; 1 without collectives."""
        sent = sum(self.sent.values())
        return 1 - sum(self.exposed.values()) / sent if sent else 1.0

    def add(self, other: "Times", runs: float) -> None:
        """Adds so many runs of other work."""
        for mine, more in zip(self._tables, other._tables, strict=True):
            for key, seconds in more.items():
                mine[key] += runs * seconds

    @property
    def _tables(self) -> tuple[dict, ...]:
        return self.kernels, self.sent, self.exposed


def estimate(
    text: str, rates: Rates, sizes: Mapping[str, int], pipeline: Pipeline = WHOLE
) -> Times:
    """The times of a scheduled program.

    Args:
        text: `compiled.as_text()`.
        rates: of the GPU.
        sizes: of the mesh axes, in mesh order.
        pipeline: its stages, of whose executions the mean counts.
    """
    computations, entry = parse(text)
    return _Reader(computations, rates, sizes, pipeline).times(entry, pipeline.stages)


@dataclasses.dataclass
class _Reader:
    """Reads the computations of one program."""

    computations: Computations
    rates: Rates
    sizes: Mapping[str, int]
    pipeline: Pipeline

    def times(self, name: str, executions: int) -> Times:
        """One execution of a computation that is executed so often, added up over the stages."""
        found, clock = Times(), 0.0
        free: dict[str, float] = {}  # when each link is free again
        ends: dict[str, tuple[float, Axes]] = {}  # of collectives under way
        scope = {each.name: each for each in self.computations[name]}
        for each in scope.values():
            if kind_of_collective(each):
                if not each.kind.endswith("-done"):
                    ends[each.name] = self._send(each, clock, free, found)
                if not each.kind.endswith("-start"):
                    begun = each.operands[0] if each.kind.endswith("-done") else each.name
                    end, axes = ends.pop(begun)
                    found.exposed[axes] += max(end - clock, 0.0)
                    clock = max(end, clock)
                continue
            before = found.total
            if runs := self._runs(each, executions):
                for body, number in runs:
                    found.add(self.times(body, number), number / executions)
            elif is_kernel(each):
                found.kernels[kind_of(each, self.computations)] += self._seconds(each, scope)
            clock += found.total - before
        return found

    def _runs(self, each: Instruction, executions: int) -> list[tuple[str, int]]:
        """The computations that an instruction runs; of a conditional's branches all."""
        found = self.pipeline.runs(each, executions, self.computations)
        return [(body, number) for body, number in found if number]

    def _send(
        self, each: Instruction, clock: float, free: dict[str, float], found: Times
    ) -> tuple[float, Axes]:
        """Puts a collective on its link; returns when it ends, and its axes."""
        kind, axes = kind_of_collective(each), axes_of(each, self.sizes)
        operand = math.prod(self.sizes[a] for a in axes) if kind == REDUCE_SCATTER else 1
        sent = Collective(kind, axes, 1, payload(each) * operand).wire_bytes(self.sizes)
        link, rate = self.rates.link(axes)
        seconds = sent / rate if axes else 0.0
        found.sent[axes] += seconds
        free[link] = max(free.get(link, 0.0), clock) + seconds
        return free[link], axes

    def _seconds(self, each: Instruction, scope: Mapping[str, Instruction]) -> float:
        """The seconds of one execution of a kernel."""
        moved = moved_bytes(each, scope, self.computations) / self.rates.memory
        kind = kind_of(each, self.computations)
        if kind not in (PRODUCT, ATTENTION):
            return moved
        if kind == ATTENTION:
            rate = self.rates.attention * head_size(each)
        else:
            rate = self.rates.flops_8_bits if in_8_bits(each) else self.rates.flops
        return max(moved, flops_of(each, scope, self.computations) / rate)
