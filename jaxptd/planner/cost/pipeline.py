"""The time of a pipelined step, from the seconds of its stages."""

import functools
from collections.abc import Sequence

from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.statistics import Durations, simulate_stages


def scheduled(
    name: str, stages: Sequence[Durations], micro_batches: int, *, chunks: int | None = None
) -> float:
    """Seconds of a schedule with a name, or of a table in a `.csv` file.

    `1f1b`, and `interleaved` if the stages divide the micro-batches, by their formula if the last
    stage is the slowest, as the loss makes it; others by simulating their tables.

    Args:
        name: one of `jaxptd.pipeline.schedules.SCHEDULES`, or the path.
        stages: seconds of one micro-batch's F, B and W on each stage.
        micro_batches: m.
        chunks: V, parts of the model on a stage; None: the schedule's default.

    Raises:
        UserError: there is no such schedule in these sizes.
    """
    each, p = [sum(stage) for stage in stages], len(stages)
    if each[-1] == max(each) and name == "1f1b":
        return pipelined(each, micro_batches)
    if each[-1] == max(each) and name == "interleaved" and micro_batches % p == 0:
        return pipelined(each, micro_batches, chunks or 2)
    schedule = make_schedule(name, stages=p, micro_batches=micro_batches, virtual_stages=chunks)
    return simulate_stages(schedule, stages).makespan


def pipelined(stages: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Seconds of `1f1b` (one chunk) and `interleaved` (more): m max + (sum - max) / V.

    The slowest stage works all the time; before and after it, one chunk of every other stage. That
    is exact for `1f1b` if the last stage is the slowest; an earlier one would do part of its work
    while it waits, and be a few percent faster.

    Args:
        stages: seconds of forward and backward of one micro-batch on each stage.
        micro_batches: m.
        chunks: V, parts of the model on a stage.
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / chunks


def step_seconds(
    name: str, stages: Sequence[Durations], micro_batches: int, chunks: int = 1
) -> float:
    """Seconds of a schedule of many micro-batches, fast enough for a search.

    `1f1b` and `interleaved` by `pipelined`. Others by simulating twice as many micro-batches as
    stages: each further one adds the slowest stage's time.

    Args:
        name: one of `jaxptd.pipeline.schedules.SCHEDULES`, or the path of a table.
        stages: seconds of one micro-batch's F, B and W on each stage.
        micro_batches: m.
        chunks: V, parts of the model on a stage.
    """
    each = [sum(stage) for stage in stages]
    if name in ("1f1b", "interleaved"):
        return pipelined(each, micro_batches, chunks)
    few = micro_batches if name.endswith(".csv") else min(micro_batches, 2 * len(stages))
    return _simulated(name, tuple(stages), few) + (micro_batches - few) * max(each)


@functools.lru_cache(4096)
def _simulated(name: str, stages: Sequence[Durations], micro_batches: int) -> float:
    schedule = make_schedule(name, stages=len(stages), micro_batches=micro_batches)
    return simulate_stages(schedule, stages).makespan


def stage_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage; if they do not divide, the stages at the ends have one less.

    The ends have the embedding and the loss as well, so programs leave layers out there first: the
    last stage, the first, the last but one, and so on.

    >>> stage_layers(126, 8)
    [15, 16, 16, 16, 16, 16, 16, 15]
    """
    found = [-(-layers // stages)] * stages
    for i in range(sum(found) - layers):
        found[i // 2 if i % 2 else -1 - i // 2] -= 1
    return found
