"""Layers on the stages of a pipeline: in equal parts, or with fewer beside the loss.

The last part also has the loss. Where that takes longer than a layer, the pipeline is faster if the
last part has fewer layers and the others take them over. The first part has only the embedding
beside its layers, which takes less than a layer, so it has its equal share.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import NamedTuple

from jaxptd.errors import UserError
from jaxptd.layout import SCHEDULES
from jaxptd.pipeline.placement import part_sizes
from jaxptd.pipeline.schedules import outline


class Cut(NamedTuple):
    """A model's layers on stages.

    sizes: layers of each part of the model, in its order; None: as the pipeline divides them.
    first, last: shares of all layers on the first stage, and on the one with the loss: at least.
    most: share of the stage with most layers, at least.
    depth: layers of the largest part.
    """

    sizes: tuple[int, ...] | None
    first: float
    last: float
    most: float
    depth: int


@functools.lru_cache(65536)
def cut(
    layers: int,
    stages: int,
    schedule: str,
    chunks: int | None,
    fewer: int = 0,
    sizes: tuple[int, ...] | None = None,
) -> Cut:
    """The layers of one stack on the stages of a schedule.

    Args:
        layers: of the stack.
        stages: of the pipeline.
        schedule: its name.
        chunks: of a stage, where the schedule has a choice.
        fewer: layers that the last part has less than an equal share.
        sizes: layers of each part, to use instead.

    Raises:
        UserError: there is no such pipeline.
    """
    parts = outline(schedule, stages=stages, micro_batches=stages, virtual_stages=chunks)
    asked = sizes is not None or fewer > 0
    *others, last = part_sizes(layers + fewer, parts.parts, sizes)
    found = (*others, last - fewer)
    if found[-1] < 0 or (fewer and found == part_sizes(layers, parts.parts)):
        raise UserError(f"the last of {parts.parts} parts cannot have {fewer} layers fewer")
    of_stage = [0] * stages
    for part, size in enumerate(found):
        of_stage[parts.where(part)[0]] += size
    loss = parts.where(parts.parts - 1)[0]
    ends = of_stage[0] / layers, of_stage[loss] / layers
    return Cut(found if asked else None, *ends, max(of_stage) / layers, max(found))


class Cuts:
    """The ways to divide the layers of a model among stages.

    Args:
        stacks: layers of each stack.
        sizes: layers of each part of the model, if they are given.
    """

    def __init__(self, stacks: Sequence[int], sizes: tuple[int, ...] | None) -> None:
        self._stacks, self._sizes = stacks, sizes

    def of(self, stages: int, schedule: str, chunks: int | None, fewer: int) -> Cut:
        """The layers of each part.

        Raises:
            UserError: there is no such pipeline.
        """
        if self._follow(schedule):
            return cut(sum(self._stacks), stages, schedule, chunks, fewer, self._sizes)
        number, parts = sum(self._stacks), stages * (chunks or 1)
        fewest = number // parts * (chunks or 1) / number if self._sizes is None else 0.0
        depth = -(-number // parts) if stages > 1 else max(self._stacks)
        return Cut(self._sizes, 1 / stages, fewest, fewest, depth)

    def fewer(self, stages: int, schedule: str, chunks: int | None, most: int) -> Sequence[int]:
        """Layers that the last part can have less than an equal share."""
        equal = stages == 1 or self._sizes is not None or not self._follow(schedule)
        found = []
        for fewer in range(1 if equal else most + 1):
            with contextlib.suppress(UserError):
                self.of(stages, schedule, chunks, fewer)
                found.append(fewer)
        return found

    def _follow(self, schedule: str) -> bool:
        """True if the parts follow from numbers: of one stack, and of a schedule that has a name.

        Of several stacks, or of a schedule of one's own, only the means are known.
        """
        return len(self._stacks) == 1 and schedule in SCHEDULES
