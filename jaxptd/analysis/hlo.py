"""Collectives from the text of a compiled program: what XLA made of those in the jaxpr.

Loops count with their known trip counts. Works for CPU and CUDA programs; both spell a group of
devices as lists, as iota (`[2,4]<=[8]`) or as mesh axes.
"""

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np

from jaxptd.analysis.collective import Collective
from jaxptd.mesh import Axis

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
_BYTES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")
_COLLECTIVE = re.compile(r"(?:ROOT )?%?[\w.\-]+ = (.*?) (" + "|".join(KINDS) + r")(-start)?\(")


def collectives_from_hlo(
    text: str, sizes: Mapping[str, int], trips: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Collective]:
    """Every collective of a compiled module.

    Args:
        text: `compiled.as_text()`.
        sizes: of the mesh axes, in mesh order.
        trips: as `comms.collectives_of` has them.

    Raises:
        ValueError: a collective stands in a loop without a known trip count.
    """
    computations, entry = _computations(text)
    stages = sizes.get(Axis.PP, 1)
    for line, runs in _executed(computations, entry, (stages, trips)):
        if match := _COLLECTIVE.match(line):
            axes = _axes(line, sizes)
            if axes:
                times = runs // stages if Axis.PP in axes else runs
                result, kind, start = match.groups()
                size = _payload(result, kind, started=bool(start))
                if kind == "reduce-scatter":  # its operand, as in the jaxpr
                    size *= math.prod(sizes[axis] for axis in axes)
                yield Collective(kind, axes, times, times * size)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the entry's name."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{", line)
        if head and not line.startswith("HloModule"):
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif " = " in line:
            lines.append(line.strip())
    return computations, entry


def _executed(
    computations: Mapping[str, list[str]], name: str, runs: tuple[int, Mapping[str, int]]
) -> Iterator[tuple[str, int]]:
    """Every line with how often it runs; runs: how often this computation does, and trips."""
    times, trips = runs
    for line in computations.get(name, ()):
        yield line, times
        if " while(" in line:
            length = _length(line, runs)
            body = re.search(r"body=%?([\w.\-]+)", line)
            inner = (times if length is None else length), trips
            inside = list(_executed(computations, body[1], inner)) if body else []
            if length is None and any(_COLLECTIVE.match(each) for each, _ in inside):
                raise ValueError(f"a collective in a loop of unknown length: {line[:80]}")
            yield from inside
        elif match := re.search(r" (?:call|async-start)\(.*?(?:to_apply|calls)=%?([\w.\-]+)", line):
            yield from _executed(computations, match[1], runs)


def _length(line: str, runs: tuple[int, Mapping[str, int]]) -> int | None:
    """How often the body of a loop runs in all."""
    times, trips = runs
    scope = re.search(r'op_name="(?:[^"]*/)?([^"/]+)/while"', line)
    if scope and scope[1] in trips:
        return trips[scope[1]]
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    return times * int(known[1]) if known else None


def _payload(result: str, kind: str, *, started: bool) -> int:
    """Bytes of a collective's result; a started one returns (operands, results), of one or several.

    A permute of some versions returns two counters more.
    """
    sizes = [
        math.prod(int(n) for n in dims.split(",") if n) * _BYTES[d]
        for d, dims in _ARRAY.findall(result)
        if kind != "collective-permute" or not started or dims or d != "u32"
    ]
    if not started or kind == "all-reduce":
        return sum(sizes)
    return sum(sizes[len(sizes) // 2 :])


def _axes(line: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ; none if each group is one device."""
    if named := re.search(r"replica_groups=mesh\[[^\]]*\] ?\{([^}]*)\}", line):
        axes = re.findall(r"'([^']+)'", named[1])
        return tuple(str(axis) for axis in axes if sizes[axis] > 1)
    shape = tuple(sizes.values())
    coordinates = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), -1)
    varying: set[int] = set()
    for group in _groups(line, math.prod(shape)):
        where = coordinates[list(group)]
        varying |= set(np.nonzero((where != where[0]).any(0))[0].tolist())
    return tuple(str(axis) for i, axis in enumerate(sizes) if i in varying)


def _groups(line: str, devices: int) -> list[tuple[int, ...]]:
    if lists := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", line):
        return [
            tuple(int(n) for n in group.split(","))
            for group in re.findall(r"\{([\d,]+)\}", lists[1])
        ]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, source, order = (
            [int(n) for n in (part or "").split(",") if n] for part in iota.groups()
        )
        ranks = np.arange(math.prod(source)).reshape(source)
        ranks = ranks.transpose(order) if order else ranks
        return [tuple(group) for group in ranks.reshape(shape).tolist()]
    return [tuple(range(devices))]
