"""The memory of a config's step on each GPU."""

import dataclasses

from jaxptd.analysis.peak import outside, peak
from jaxptd.planner.own.step import OwnStep


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on a device by their kind: those of a step, and those outside of it."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def memory_of(step: OwnStep) -> Memory:
    """Predicts the bytes that a step needs on each GPU."""
    found = peak(step.config, step.state, step.plan)
    others = {each.name: each.bytes for each in outside(step.config.layout)}
    return Memory({name: size for name, size in found.parts.items() if size} | others)
