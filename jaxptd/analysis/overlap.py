"""What lies over what in a scheduled GPU program: work between a collective's start and its done.

A scheduled program says where a collective starts and where its result is waited for. What stands
between the two runs while it is under way. Read here: every collective, in loops too, with the
attention kernels (cuDNN's) and the other matrix products between its two ends, and how often it
runs. Not read: time. A collective is hidden as far as that work lasts.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from jaxptd.analysis import hlo, kernels
from jaxptd.analysis.collective import PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.kernels import Computations, Instruction

_KIND = re.compile(f"({'|'.join(hlo.KINDS)})(-start|-done)?")


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
    """One collective of the program's text, and what it lies over.

    Args:
        name: of its last instruction.
        of: forward, forward again or backward.
        bytes: of its result on each device.
        count: executions.
        over: the work while it is under way.
        kind: which collective.
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
    def lies_over(self) -> str:
        if self.over.attention:
            return "attention"
        return "products" if self.over.products else "nothing"

    def sent(self, sizes: Mapping[str, int]) -> int:
        """Bytes that each device sends in a step, if it runs as a ring."""
        operand = math.prod(sizes[a] for a in self.axes) if self.kind == REDUCE_SCATTER else 1
        whole = self.count * self.bytes * operand
        return Collective(self.kind, self.axes, self.count, whole).wire_bytes(sizes)


def moves(text: str, sizes: Mapping[str, int] | None = None) -> list[Move]:
    """Every collective of a scheduled program that runs, and moves something.

    Args:
        text: `compiled.as_text()`.
        sizes: of the mesh axes, in mesh order; None: axes are not told.
    """
    computations, entry = kernels.parse(text)
    found = _moves(computations, entry, 1, sizes)
    return [each for each in found if each.count and (each.axes or not sizes)]


def _moves(
    computations: Computations, name: str, times: int, sizes: Mapping[str, int] | None
) -> Iterator[Move]:
    under_way: dict[str, tuple[Instruction, Work]] = {}
    for each in computations[name]:
        known = _KIND.fullmatch(each.kind)
        kind, end = known.groups() if known else (None, None)
        if end == "-start":
            under_way[each.name] = each, Work()
        elif kind:
            start, over = under_way.pop(each.operands[0]) if end else (each, Work())
            axes = hlo._axes(start.rest, sizes) if sizes else ()
            yield Move(each.name, pass_of(each), each.size, times, over, kind, axes)
        for body, trips in inside(each):
            yield from _moves(computations, body, times * trips, sizes)
        if under_way:
            done = work(each, computations)
            under_way = {name: (start, over + done) for name, (start, over) in under_way.items()}


def inside(each: Instruction) -> list[tuple[str, int]]:
    """The computations that an instruction runs, and how often."""
    if each.kind == "while":
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', each.rest)
        return [(each.called("body") or "", int(trips[1]) if trips else 1)]
    if each.kind in ("call", "async-start"):
        return [(each.called("(?:to_apply|calls)") or "", 1)]
    if each.kind == "conditional":
        listed = re.search(r"branch_computations=\{(.*?)\}", each.rest)
        named = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", each.rest)
        return [(name, 1) for name in re.findall(r"[\w.\-]+", listed[1] if listed else "") or named]
    return []


def work(each: Instruction, computations: Computations) -> Work:
    """Of one instruction; of a conditional its heaviest branch."""
    bodies = [
        sum((work(x, computations) for x in computations[name]), Work()) * trips
        for name, trips in inside(each)
    ]
    if bodies:
        return max(bodies, key=lambda work: (work.attention, work.products))
    if "__cudnn$fmha" in each.rest:
        return Work(attention=1)
    return Work(products=int(kernels._is_product(each, computations)))


def pass_of(each: Instruction) -> str:
    """Which pass of the step an instruction belongs to, from the name that JAX gave it."""
    if "transpose(" not in each.op_name:
        return "forward"
    return "forward again" if "rematted_computation" in each.op_name else "backward"
