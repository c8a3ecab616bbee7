"""How long a step takes where stages wait for each other: a hop's stages all for the slowest.

`statistics.simulate` lets each operation begin as soon as its input is there. In the executor what
arrives comes by a hop at the end of a tick, and whom a hop joins goes on together. 1F1B's pairs
lose nothing by that; interleaved stages are a closed ring, where backward, twice as long as
forward, sets the pace of every tick. Schedules that split backward have ticks of about one length.
"""

import numpy as np

from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.statistics import EQUAL, Durations
from jaxptd.pipeline.table import Operation


def makespan(plan: Plan, durations: Durations = EQUAL) -> float:
    """From the first operation to the end of the last, in the unit of the durations.

    Args:
        plan: of a schedule.
        durations: of a micro-batch's operations on all layers of a stage.
    """
    schedule, hops = plan.schedule, plan.hops
    backward = durations.B + (0 if schedule.splits else durations.W)
    each = {Operation.F: durations.F, Operation.B: backward, Operation.W: durations.W}
    cost = np.array([each.get(Operation(o), 0.0) for o in range(len(Operation))]) / schedule.chunks
    done = np.zeros(schedule.stages)
    for tick, cells in enumerate(schedule.table):
        done = done + cost[cells[:, 0]]
        for hop in hops.at(tick):
            before = done.copy()
            for source, target in hops.pairs[hop]:
                latest = max(before[source], before[target])
                done[[source, target]] = np.maximum(done[[source, target]], latest)
    return float(done.max())
