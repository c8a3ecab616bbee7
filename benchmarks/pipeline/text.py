"""Reads from a compiled pipeline's text what it does at each tick: loops, copies, hops.

Finds the loops over ticks by how often they run, with everything in them. A loop in them of unknown
length runs 0 times or once a tick, as the tick's row says; here it counts once, so figures are for
a tick at which all of them run. The text does not tell times.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping

from jaxptd.analysis.collective import PERMUTE
from jaxptd.analysis.hlo.text import Computations, Instruction, parse
from jaxptd.analysis.hlo.timeline import Move, moves
from jaxptd.mesh import Axis

_FUSED = ("fusion", "fusion-start")


@dataclasses.dataclass(frozen=True)
class Tick:
    """A tick, or one of the forward and one of the backward pass if each has a loop.

    Args:
        loops: of unknown length, those that run 0 times or once.
        known: of known length: over layers.
        conditionals: branches.
        carried: bytes moved by copies of arrays that go from tick to tick, or come from before the
            first: gradients, weights, pools. They are recognised by their shape.
        others: bytes that other copies move.
    """

    loops: int = 0
    known: int = 0
    conditionals: int = 0
    carried: int = 0
    others: int = 0


def tick(text: str, ticks: int, activation: tuple[int, ...]) -> Tick:
    """Reads the ticks of a program; only its loops over ticks may have that many trips.

    Args:
        text: `compiled.as_text()`.
        ticks: trips.
        activation: the shape of a micro-batch's activation, which does not count as carried.

    Raises:
        ValueError: there is no such loop.
    """
    computations, _ = parse(text)
    loops = [
        each
        for body in computations.values()
        for each in body
        if each.kind == "while" and each.trip_count == ticks
    ]
    if not loops:
        raise ValueError(f"no loop of {ticks} ticks")
    found = [_tick(each, computations, activation) for each in loops]
    return Tick(*(sum(column) for column in zip(*map(dataclasses.astuple, found), strict=True)))


def _tick(loop: Instruction, computations: Computations, activation: tuple[int, ...]) -> Tick:
    shapes = {shape for shape in _shapes(loop) if math.prod(shape) > 1} - {_wide(activation)}
    body = list(_all(computations, loop.body, 1))
    copies = [(each, times) for each, times in body if each.kind in ("copy", "copy-start")]
    carried = [(each, n) for each, n in copies if shapes.intersection(_shapes(each))]
    of = {id(each) for each, _ in carried}
    loops = [each for each, _ in body if each.kind == "while"]
    return Tick(
        sum(each.trip_count is None for each in loops),
        sum(each.trip_count is not None for each in loops),
        sum(each.kind == "conditional" for each, _ in body),
        sum(n * _moved(each) for each, n in carried),
        sum(n * _moved(each) for each, n in copies if id(each) not in of),
    )


def _moved(copy: Instruction) -> int:
    """Bytes that a copy writes; one that was started also names its operand and a counter."""
    return copy.size // 2 if copy.kind == "copy-start" else copy.size


def _all(computations: Computations, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
    """Yields every instruction of a computation and how often it runs; of fusions, final copies."""
    for each in computations.get(name, ()):
        yield each, times
        for body, trips in each.calls:
            yield from _all(computations, body, times * trips)
        if each.kind in _FUSED:
            fused = computations.get(each.called("calls"), ())
            yield from ((last, times) for last in fused if last.is_root and last.kind == "copy")


def _shapes(each: Instruction) -> list[tuple[int, ...]]:
    """Shapes of its results that are numbers to compute with, without dims of 1."""
    return [_wide(array.shape) for array in each.arrays if array.dtype in ("f32", "bf16", "f64")]


def _wide(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n > 1)


def hops(text: str, sizes: Mapping[str, int]) -> list[Move]:
    """Lists the permutes between stages, in the order of the program."""
    return [each for each in moves(text, sizes) if (each.kind, each.axes) == (PERMUTE, (Axis.PP,))]
