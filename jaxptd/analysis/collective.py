"""A collective of a program: its kind, axes, executions and bytes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
PERMUTE, BROADCAST = "collective-permute", "collective-broadcast"
ALL_TO_ALL = "all-to-all"


@dataclasses.dataclass(frozen=True)
class Collective:
    """How often a step runs one kind of collective over one set of axes, and its bytes in all."""

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
