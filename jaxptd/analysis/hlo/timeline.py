"""Estimates how long a scheduled GPU program takes, from its text.

Kernels run one after another in the text's order. Collectives overlap them, one at a time on each
link, from their start to their done. If a collective has not ended when its result is needed, the
kernels wait: that time is *exposed*. A loop takes its body's time per iteration.

A matmul takes the time of its FLOPs or of its bytes, whichever is longer, other kernels that of
their bytes, and a collective that of the bytes that a device sends. Launches and latencies are
free, and no kernel slows another down. So this is a lower bound, for comparing programs.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from jaxptd.analysis.hlo.collectives import axes_of, kind_of_collective, payload
from jaxptd.analysis.hlo.kernels import (
    ATTENTION,
    PRODUCT,
    flops_of,
    head_size,
    in_8_bits,
    is_grouped,
    is_kernel,
    kind_of,
    moved_bytes,
)
from jaxptd.analysis.hlo.text import WHOLE, Computations, Instruction, Pipeline, parse
from jaxptd.costs.collective import KINDS, PERMUTE, REDUCE_SCATTER, Collective

AxisNames = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of a GPU.

    Args:
        flops: FLOP/s of matmuls.
        flops_8_bits: FLOP/s of 8-bit matmuls.
        attention: FLOP/s per element of a head, as the time per score does not depend on head size.
        memory: bytes/s that kernels read and write.
        link: maps a collective's axes to the link's name and the bytes/s that a device sends on it.
        grouped: FLOP/s of matmuls of rows in groups, in 16 bits; None: as `flops`.
    """

    flops: float
    flops_8_bits: float
    attention: float
    memory: float
    link: Callable[[AxisNames], tuple[str, float]]
    grouped: float | None = None


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one device; a pipeline's stages are averaged.

    Args:
        kernels: by kind (`kernels.KINDS`).
        sent: of collectives, by axes.
        exposed: while kernels wait for collectives, by axes.
    """

    kernels: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    sent: dict[AxisNames, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    exposed: dict[AxisNames, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        return sum(self.kernels.values()) + sum(self.exposed.values())

    @property
    def hidden(self) -> float:
        """The share of collectives' time that kernels overlap; 1 without collectives."""
        sent = sum(self.sent.values())
        return 1 - sum(self.exposed.values()) / sent if sent else 1.0

    def add(self, other: "Times", runs: float) -> None:
        """Adds `runs` runs of other work."""
        for mine, more in zip(self._tables, other._tables, strict=True):
            for key, seconds in more.items():
                mine[key] += runs * seconds

    @property
    def _tables(self) -> tuple[dict, ...]:
        return self.kernels, self.sent, self.exposed


def estimate(
    text: str, rates: Rates, sizes: Mapping[str, int], pipeline: Pipeline = WHOLE
) -> Times:
    """Estimates the times of a scheduled program.

    Args:
        text: `compiled.as_text()`.
        rates: the GPU's.
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
        """Times of one of a computation's `executions` (a total over stages)."""
        times, clock = Times(), 0.0
        free: dict[str, float] = {}  # when each link becomes free
        ends: dict[str, tuple[float, AxisNames]] = {}  # of collectives in flight
        scope = {each.name: each for each in self.computations[name]}
        for each in scope.values():
            if kind_of_collective(each):
                if not each.kind.endswith("-done"):
                    ends[each.name] = self._send(each, clock, free, times)
                if not each.kind.endswith("-start"):
                    begun = each.operands[0] if each.kind.endswith("-done") else each.name
                    end, axes = ends.pop(begun)
                    times.exposed[axes] += max(end - clock, 0.0)
                    clock = max(end, clock)
                continue
            before = times.total
            if runs := self._runs(each, executions):
                for body, number in runs:
                    times.add(self.times(body, number), number / executions)
            elif is_kernel(each):
                times.kernels[kind_of(each, self.computations)] += self._seconds(each, scope)
            clock += times.total - before
        return times

    def _runs(self, each: Instruction, executions: int) -> list[tuple[str, int]]:
        """The computations that an instruction runs; for a conditional, all branches."""
        runs = self.pipeline.runs(each, executions, self.computations)
        return [(body, number) for body, number in runs if number]

    def _send(
        self, each: Instruction, clock: float, free: dict[str, float], times: Times
    ) -> tuple[float, AxisNames]:
        """Puts a collective on its link; returns when it ends, and its axes."""
        kind, axes = kind_of_collective(each), axes_of(each, self.sizes)
        operand = math.prod(self.sizes[a] for a in axes) if kind == REDUCE_SCATTER else 1
        sent = Collective(kind, axes, 1, payload(each) * operand).wire_bytes(self.sizes)
        link, rate = self.rates.link(axes)
        seconds = sent / rate if axes else 0.0
        times.sent[axes] += seconds
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
            if is_grouped(each) and self.rates.grouped:
                rate *= self.rates.grouped / self.rates.flops
        return max(moved, flops_of(each, scope, self.computations) / rate)


# ---- what hides a collective ---------------------------------------------------------------------
# Finds what can hide a collective: work between its start and its done in a scheduled GPU program.
#
# A scheduled program's text shows where a collective starts and where its result is awaited; the
# instructions in between run meanwhile. For every collective, also in loops, this reads its
# executions and the attention kernels (cuDNN's) and other matmuls in between. The text gives no
# times: a collective is hidden for as long as that work takes.

_KIND = re.compile(f"({'|'.join(KINDS)})(-start|-done)?")


@dataclasses.dataclass(frozen=True)
class Work:
    """Executions of attention kernels and of other matmuls."""

    attention: int = 0
    products: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.attention + other.attention, self.products + other.products)

    def __mul__(self, times: int) -> "Work":
        return Work(self.attention * times, self.products * times)


@dataclasses.dataclass(frozen=True)
class Move:
    """One collective in a program's text, and the work that overlaps it.

    Args:
        name: its last instruction's name.
        of: the pass: forward, forward again or backward.
        bytes: size of its result on each device.
        count: number of executions.
        over: work between its start and its done.
        kind: the kind of collective.
        axes: the mesh axes.
    """

    name: str
    of: str
    bytes: int
    count: int
    over: Work
    kind: str = PERMUTE
    axes: tuple[str, ...] = ()

    @property
    def hidden_by(self) -> str:
        """The kind of work that hides the collective best."""
        if self.over.attention:
            return "attention"
        return "products" if self.over.products else "nothing"

    def sent(self, sizes: Mapping[str, int]) -> int:
        """Bytes that each device sends in a step if the collective runs as a ring."""
        operand = math.prod(sizes[a] for a in self.axes) if self.kind == REDUCE_SCATTER else 1
        whole = self.count * self.bytes * operand
        return Collective(self.kind, self.axes, self.count, whole).wire_bytes(sizes)


def moves(
    text: str, sizes: Mapping[str, int] | None = None, pipeline: Pipeline = WHOLE
) -> list[Move]:
    """Every collective of a scheduled program that runs and moves something.

    Args:
        text: `compiled.as_text()`.
        sizes: sizes of the mesh axes, in mesh order; None leaves each move's axes empty.
        pipeline: its stages, of whose executions the mean counts.
    """
    computations, entry = parse(text)
    every = _moves(computations, entry, pipeline.stages, sizes, pipeline)
    per_stage = [dataclasses.replace(x, count=round(x.count / pipeline.stages)) for x in every]
    return [each for each in per_stage if each.count and (each.axes or not sizes)]


def _moves(
    computations: Computations,
    name: str,
    times: int,
    sizes: Mapping[str, int] | None,
    pipeline: Pipeline,
) -> Iterator[Move]:
    """The collectives of one computation; times: its executions."""
    under_way: dict[str, tuple[Instruction, Work]] = {}
    for each in computations[name]:
        known = _KIND.fullmatch(each.kind)
        kind, end = known.groups() if known else (None, None)
        if end == "-start":
            under_way[each.name] = each, Work()
        elif kind:
            start, over = under_way.pop(each.operands[0]) if end else (each, Work())
            axes = axes_of(start, sizes) if sizes else ()
            yield Move(each.name, pass_of(each), each.size, times, over, kind, axes)
        for body, runs in pipeline.runs(each, times, computations):
            yield from _moves(computations, body, runs, sizes, pipeline)
        if under_way:
            done = work(each, computations)
            under_way = {name: (start, over + done) for name, (start, over) in under_way.items()}


def work(each: Instruction, computations: Computations) -> Work:
    """The work of one instruction; for a conditional, of the heaviest branch."""
    bodies = [
        sum((work(x, computations) for x in computations[name]), Work()) * trips
        for name, trips in each.calls
    ]
    if bodies:
        return max(bodies, key=lambda work: (work.attention, work.products))
    kind = kind_of(each, computations)
    return Work(attention=int(kind == ATTENTION), products=int(kind == PRODUCT))


def pass_of(each: Instruction) -> str:
    """The pass of the step that an instruction belongs to, from its JAX name."""
    if "transpose(" not in each.op_name:
        return "forward"
    return "forward again" if "rematted_computation" in each.op_name else "backward"


# ---- waits of a GPU's host for its device --------------------------------------------------------
# The condition of a loop of unknown length is computed on the device, and the host waits for it
# before each iteration and once more at the loop's end. A conditional makes it wait once. While
# waiting it launches no kernels.


def host_waits(text: str, pipeline: Pipeline = WHOLE) -> float:
    """The host's waits in one execution of a program; for a pipeline, the mean over stages.

    A loop counts as one iteration if neither XLA nor the pipeline knows its length.

    Args:
        text: `compiled.as_text()`.
        pipeline: its stages, each with its own number of loop and branch executions.
    """
    computations, entry = parse(text)
    return _waits(computations, entry, pipeline.stages, pipeline) / pipeline.stages


def _waits(computations: Computations, name: str, times: int, pipeline: Pipeline) -> int:
    """The waits of a computation that is executed `times` times."""
    waits = 0
    for each in computations[name]:
        runs = pipeline.runs(each, times, computations)
        if each.kind == "conditional":
            waits += times
        elif each.kind == "while" and each.trip_count is None:
            waits += times + sum(number for _, number in runs)
        waits += sum(_waits(computations, body, number, pipeline) for body, number in runs)
    return waits
