"""The memory of a config's step on each GPU."""

import dataclasses

from jaxptd.analysis import memory_model
from jaxptd.planner.own.step import OwnStep


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on a device.

    Args:
        parts: by name.
    """

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def memory_of(step: OwnStep) -> Memory:
    """Predicts the bytes that a step needs on each GPU."""
    config, plan, state = step.config, step.plan, step.state
    kept = memory_model.activations(config, plan)
    if config.layout.offload == "activations":
        kept = 0
    if config.layout.offload == "optimizer":
        state = state | {"parameters": 0, "optimizer": 0}
    waiting = memory_model.mail(config, plan) if plan else 0
    return Memory({**state, "activations": kept, "mail": waiting})
