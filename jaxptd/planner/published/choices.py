"""Ranks layouts of a published program by their predicted time."""

import itertools
from collections.abc import Iterable, Sequence

from jaxptd.hardware import Cluster
from jaxptd.planner.cost import Program, Setting, Spread, step_time
from jaxptd.planner.published.shape import Shape
from jaxptd.planner.published.traffic import published_collectives


def layouts(
    gpus: int,
    global_batch: int,
    *,
    tp: Iterable[int],
    pp: Iterable[int],
    micro_batch: Iterable[int],
) -> list[Spread]:
    """Layouts with full recomputation that divide the devices and the batch.

    Args:
        gpus: devices.
        global_batch: sequences of a step.
        tp: sizes of tensor parallelism to try; here and below, what does not divide is left out.
        pp: stages to try.
        micro_batch: sequences of a micro-batch to try.
    """
    found = []
    for t, p, b in itertools.product(tp, pp, micro_batch):
        if gpus % (t * p) == 0 and global_batch % (gpus // (t * p) * b) == 0:
            found.append(Spread(gpus, global_batch, b, t, p, remat="full"))
    return found


def ranked(
    shape: Shape, spreads: Sequence[Spread], program: Program, cluster: Cluster
) -> list[tuple[float, Spread]]:
    """Predicted seconds and layout, the fastest first."""
    settings = [Setting(shape.inventory, spread, program, cluster) for spread in spreads]
    timed = [
        (step_time(setting, published_collectives(setting)).seconds, setting.spread)
        for setting in settings
    ]
    return sorted(timed, key=lambda pair: pair[0])
