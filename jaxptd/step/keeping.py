"""Where a pipeline's pools keep what layers save for backward: on the device, or on the host."""

from collections.abc import Callable
from typing import Any

from jaxptd.config import ModelConfig
from jaxptd.pipeline.plan import Plan
from jaxptd.zero.host import on_host

Keep = Callable[[Any], Any]  # arrays that layers save -> as pools keep them


def keepers(model: ModelConfig, plan: Plan, *, offload: bool) -> list[Keep]:
    """One function for each of `Plan.kinds`; none without offloading.

    offload: what `remat: dots` saves is kept in host memory; other kinds' arrays are not.
    """
    if not offload:
        return []
    stacks = [model.remats(plan.depth(stack)) for stack in plan.stacks]
    return [on_host if remat == "dots" else _as_it_is for each in stacks for remat, _ in each]


def _as_it_is(x: Any) -> Any:
    return x
