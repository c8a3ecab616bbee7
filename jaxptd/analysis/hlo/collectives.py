"""Reads the collectives of a compiled program: what XLA made of those in the jaxpr.

Loops count with their known trip counts. Reads CPU and CUDA programs; both write a collective's
groups as lists, as iota (`[2,4]<=[8]`) or as mesh axes.
"""

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np

from jaxptd.analysis.hlo.text import (
    Computations,
    Instruction,
    Runs,
    loop_runs,
    parse,
    taken,
)
from jaxptd.costs.collective import ALL_REDUCE, KINDS, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.mesh import Axis

_KIND = re.compile(f"({'|'.join(KINDS)})(-start)?")


def collectives_from_hlo(
    text: str, sizes: Mapping[str, int], trips: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Collective]:
    """Every collective of a compiled module.

    Args:
        text: `compiled.as_text()`.
        sizes: sizes of the mesh axes, in mesh order.
        trips: as in `count.collectives_of`.

    Raises:
        ValueError: a collective is in a loop without a known trip count.
    """
    computations, entry = parse(text)
    stages = sizes.get(Axis.PP, 1)
    for instruction, runs in _executed(computations, entry, (stages, trips)):
        if axes := axes_of(instruction, sizes):
            kind, _ = _kind(instruction)
            times = runs // stages if Axis.PP in axes else runs
            size = payload(instruction)
            if kind == REDUCE_SCATTER:  # count its operand, as in the jaxpr
                size *= math.prod(sizes[axis] for axis in axes)
            yield Collective(kind, axes, times, times * size)


def kind_of_collective(instruction: Instruction) -> str:
    """The kind of a collective, or of its start or done; empty for other instructions."""
    match = re.fullmatch(f"({'|'.join(KINDS)})(-start|-done)?", instruction.kind)
    return match[1] if match else ""


def _kind(instruction: Instruction) -> tuple[str, bool]:
    """The kind of a collective, and whether this is the start of an asynchronous one."""
    match = _KIND.fullmatch(instruction.kind)
    return (match[1], bool(match[2])) if match else ("", False)


def _executed(
    computations: Computations, name: str, runs: tuple[int, Mapping[str, int]]
) -> Iterator[tuple[Instruction, int]]:
    """Every collective and its executions; runs: this computation's executions, and trips."""
    times, trips = runs
    for each in computations.get(name, ()):
        if _kind(each)[0]:
            yield each, times
        for body, inner in _called(each, computations, runs):
            known = times if inner is None else inner
            inside = list(_executed(computations, body, (known, trips)))
            if inner is None and inside:
                raise ValueError(f"unknown number of executions of a collective: {each.name}")
            yield from inside


def _called(each: Instruction, computations: Computations, runs: tuple) -> Runs:
    """The computations that an instruction calls, and their executions; None if unknown."""
    times, trips = runs
    if each.kind == "conditional":
        return taken(each, computations, trips)
    if each.kind == "while":
        return [(each.body, loop_runs(each, times, trips))]
    return [(each.body, times)] if each.body else []


def payload(instruction: Instruction) -> int:
    """Bytes of a collective's result.

    An asynchronous start returns (operands, results), one or several of each. In some versions of
    XLA a permute also returns two counters, and an all-reduce only the results.
    """
    kind, started = _kind(instruction)
    sizes = [
        array.bytes
        for array in instruction.arrays
        if kind != PERMUTE or not started or array.shape or array.dtype != "u32"
    ]
    if not started or (kind == ALL_REDUCE and not instruction.result.startswith("((")):
        return sum(sizes)
    return sum(sizes[len(sizes) // 2 :])


def axes_of(instruction: Instruction, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ; empty if groups are single devices.

    Args:
        instruction: a collective.
        sizes: of the mesh axes, in mesh order.
    """
    if named := re.search(r"replica_groups=mesh\[[^\]]*\] ?\{([^}]*)\}", instruction.rest):
        axes = re.findall(r"'([^']+)'", named[1])
        return tuple(str(axis) for axis in axes if sizes[axis] > 1)
    shape = tuple(sizes.values())
    coordinates = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), -1)
    varying: set[int] = set()
    for group in _groups(instruction.rest, math.prod(shape)):
        members = coordinates[list(group)]
        varying |= set(np.nonzero((members != members[0]).any(0))[0].tolist())
    return tuple(str(axis) for i, axis in enumerate(sizes) if i in varying)


def _groups(rest: str, devices: int) -> list[tuple[int, ...]]:
    """The groups of a collective, or the pairs of a permute; if none are given, all devices."""
    if lists := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", rest):
        return [
            tuple(int(n) for n in group.split(","))
            for group in re.findall(r"\{([\d,]+)\}", lists[1])
        ]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, source, order = (
            [int(n) for n in (numbers or "").split(",") if n] for numbers in iota.groups()
        )
        ranks = np.arange(math.prod(source)).reshape(source)
        ranks = ranks.transpose(order) if order else ranks
        return [tuple(group) for group in ranks.reshape(shape).tolist()]
    return [tuple(range(devices))]
