"""The kinds of collectives, and lists of them with axes, executions and bytes."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# XLA's names.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
PERMUTE, BROADCAST = "collective-permute", "collective-broadcast"
ALL_TO_ALL = "all-to-all"
KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, PERMUTE, ALL_TO_ALL, BROADCAST)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective over one set of axes: executions in a program, and total bytes."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int

    def wire_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes that each device sends if the collective runs as a ring."""
        devices = math.prod(sizes[axis] for axis in self.axes)
        if self.kind in (PERMUTE, BROADCAST):
            return self.bytes
        return (2 if self.kind == ALL_REDUCE else 1) * self.bytes * (devices - 1) // devices

    def as_dict(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "wire_bytes": self.wire_bytes(sizes)}


def add_up(collectives: Iterable[Collective]) -> list[Collective]:
    """Adds up collectives of the same kind and axes; those with most bytes come first."""
    total: dict[tuple, list[int]] = collections.defaultdict(lambda: [0, 0])
    for each in collectives:
        entry = total[each.kind, tuple(sorted(each.axes))]
        entry[0] += each.count
        entry[1] += each.bytes
    merged = [Collective(*key, *entry) for key, entry in total.items()]
    return sorted(merged, key=lambda c: (-c.bytes, c.kind, c.axes))


def subtract(more: Sequence[Collective], less: Sequence[Collective]) -> list[Collective]:
    """The difference of two lists, without the collectives in which they agree."""
    negative = [dataclasses.replace(c, count=-c.count, bytes=-c.bytes) for c in less]
    return [c for c in add_up([*more, *negative]) if c.count or c.bytes]
