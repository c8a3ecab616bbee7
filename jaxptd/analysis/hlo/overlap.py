"""Finds what can hide a collective: work between its start and its done in a scheduled GPU program.

The text of a scheduled program says where a collective starts and where its result is awaited. The
instructions between the two run meanwhile. For every collective, in loops too, this module reads
its executions and the attention kernels (cuDNN's) and other matrix products between the two ends.
Times are not in the text: a collective is hidden for as long as that work takes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from jaxptd.analysis.collective import KINDS, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.hlo.collectives import axes_of
from jaxptd.analysis.hlo.kernels import ATTENTION, PRODUCT, kind_of
from jaxptd.analysis.hlo.text import WHOLE, Computations, Instruction, Pipeline, parse

_KIND = re.compile(f"({'|'.join(KINDS)})(-start|-done)?")


@dataclasses.dataclass(frozen=True)
class Work:
    """Executions of attention kernels and of other products."""

    attention: int = 0
    products: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.attention + other.attention, self.products + other.products)

    def __mul__(self, times: int) -> "Work":
        return Work(self.attention * times, self.products * times)


@dataclasses.dataclass(frozen=True)
class Move:
    """One collective in the text of a program, and the work that runs beside it.

    Args:
        name: of its last instruction.
        of: the pass: forward, forward again or backward.
        bytes: of its result on each device.
        count: executions.
        over: work between its start and its done.
        kind: of collective.
        axes: of the mesh.
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
        sizes: of the mesh axes, in mesh order; None leaves the axes of each move empty.
        pipeline: its stages, of whose executions the mean counts.
    """
    computations, entry = parse(text)
    every = _moves(computations, entry, pipeline.stages, sizes, pipeline)
    found = [dataclasses.replace(x, count=round(x.count / pipeline.stages)) for x in every]
    return [each for each in found if each.count and (each.axes or not sizes)]


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
    """The work of one instruction; for a conditional that of the heaviest branch."""
    bodies = [
        sum((work(x, computations) for x in computations[name]), Work()) * trips
        for name, trips in each.calls
    ]
    if bodies:
        return max(bodies, key=lambda work: (work.attention, work.products))
    kind = kind_of(each, computations)
    return Work(attention=int(kind == ATTENTION), products=int(kind == PRODUCT))


def pass_of(each: Instruction) -> str:
    """The pass of the step that an instruction belongs to, from the name that JAX gave it."""
    if "transpose(" not in each.op_name:
        return "forward"
    return "forward again" if "rematted_computation" in each.op_name else "backward"
