"""Predicts the collectives between a pipeline's stages.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model.
"""

import math
from collections.abc import Iterable, Iterator

from jaxptd.analysis.collective import ALL_GATHER, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.sizes import elements_on_device
from jaxptd.analysis.traffic.scenario import Scenario
from jaxptd.config import itemsize
from jaxptd.layout import Axis, Layout
from jaxptd.pipeline.plan import Plan
from jaxptd.zero.shapes import StateShapes


def between_stages(step: Scenario, plan: Plan) -> Iterator[Collective]:
    """Activations and their gradients at each hop of the plan.

    Each array of x is b*T*D over all devices that shard it.
    """
    sizes, hops = step.sizes, sum(int(taken.sum()) for taken in plan.hops.taken.values())
    for size in sizes.streams:
        yield Collective(PERMUTE, (Axis.PP,), hops, hops * size)


def on_all_stages(step: Scenario, zero: StateShapes) -> Iterator[Collective]:
    """Parameters outside of layers: embeddings, the last norm and what all layers read.

    They are gathered before the first tick, and their gradients are reduce-scattered after the
    last.
    """
    layout, wide = step.config.layout, step.sizes.master_itemsize
    for name, info in zero.infos.items():
        if Axis.PP in info.axes and info.stack is None:
            whole = elements_on_device(info, layout) * layout.pp
            narrow = itemsize(zero.gather_dtype(name))
            yield Collective(ALL_GATHER, (Axis.PP,), 1, whole * narrow)
            yield Collective(REDUCE_SCATTER, (Axis.PP,), 1, whole * wide)


def as_gathers(layers: Iterable[Collective], layout: Layout) -> Iterator[Collective]:
    """Replaces permutes by the all-gathers that CPUs run instead, see `collectives.permute`."""
    for each in layers:
        devices = math.prod(layout.sizes[Axis(axis)] for axis in each.axes)
        gather = Collective(ALL_GATHER, each.axes, each.count, each.bytes * devices)
        yield gather if each.kind == PERMUTE else each
