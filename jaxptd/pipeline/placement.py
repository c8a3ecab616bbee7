"""The layers of each part of the model, and their rows in the stages' stacks of parameters.

Each stage stacks the layers of its parts, chunk after chunk. Every chunk has as many rows as the
largest part has layers; the rows that a smaller part does not fill are never run.
"""

from collections.abc import Sequence

from jaxptd.errors import UserError
from jaxptd.pipeline.table import Schedule


def part_sizes(
    layers: int, parts: int, stage_layers: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The number of layers of each part of the model, in the model's order.

    As equal as possible. Parts in the middle get the remainder first, because the first part also
    has the embedding, and the last the head and the loss.

    Args:
        layers: the number of layers of the model.
        parts: stages times chunks.
        stage_layers: the number of layers of each part, to use instead.

    Raises:
        UserError: a part would be empty, or `stage_layers` does not add up to `layers`.
    """
    if stage_layers is not None:
        if len(stage_layers) != parts or sum(stage_layers) != layers or min(stage_layers) < 0:
            raise UserError(
                f"layout.stage_layers={list(stage_layers)}: use {parts} numbers, one for each "
                f"part of the model, that add up to model.num_layers={layers}"
            )
        return tuple(stage_layers)
    if layers < parts:
        raise UserError(
            f"model.num_layers={layers} leaves some of the pipeline's {parts} parts (layout.pp x "
            "layout.virtual_stages) empty; use more layers, fewer parts, or layout.stage_layers"
        )
    each, more = divmod(layers, parts)
    order = sorted(range(parts), key=lambda part: (part == parts - 1, part == 0))
    return tuple(each + (order.index(part) < more) for part in range(parts))


def rows_of_layers(schedule: Schedule, sizes: Sequence[int]) -> tuple[int, ...]:
    """The row of each layer, counted through the stacks of all stages.

    For 1f1b on 2 stages with parts of 3 and 1 layers: rows 0, 1, 2 and 3; rows 4 and 5 are unused.
    """
    rows: list[int] = []
    for part, size in enumerate(sizes):
        stage, chunk = schedule.where(part)
        begin = (stage * schedule.chunks + chunk) * max(sizes)
        rows += range(begin, begin + size)
    return tuple(rows)
