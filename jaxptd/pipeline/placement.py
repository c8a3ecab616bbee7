"""Which layers each part of the model has, and in which rows of its stage's stack they lie.

Each stage holds its parts' layers in one stack, chunk after chunk, every chunk with as many rows as
the largest part has layers; what a smaller part leaves over is never run.
"""

from collections.abc import Sequence

from jaxptd.errors import UserError
from jaxptd.pipeline.table import Schedule


def part_sizes(layers: int, parts: int, given: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of each part of the model, in its order.

    As even as possible, the parts in the middle first: the first part embeds, the last has the head
    and the loss.

    Args:
        layers: of the model.
        parts: stages times the parts that each holds.
        given: layers of each part, instead.

    Raises:
        UserError: a part would be empty, or `given` does not add up.
    """
    if given is not None:
        if len(given) != parts or sum(given) != layers or min(given) < 0:
            raise UserError(
                f"layout.stage_layers={list(given)}: use {parts} numbers, one for each part of the "
                f"model, that add up to model.num_layers={layers}"
            )
        return tuple(given)
    if layers < parts:
        raise UserError(
            f"model.num_layers={layers} leaves some of the pipeline's {parts} parts (layout.pp x "
            "layout.virtual_stages) empty; use more layers, fewer parts, or layout.stage_layers"
        )
    each, more = divmod(layers, parts)
    order = sorted(range(parts), key=lambda part: (part == parts - 1, part == 0))
    return tuple(each + (order.index(part) < more) for part in range(parts))


def rows_of_layers(schedule: Schedule, sizes: Sequence[int]) -> tuple[int, ...]:
    """The row of every layer in the stages' stacks, one after the other."""
    rows: list[int] = []
    for part, size in enumerate(sizes):
        stage, chunk = schedule.where(part)
        begin = (stage * schedule.chunks + chunk) * max(sizes)
        rows += range(begin, begin + size)
    return tuple(rows)
