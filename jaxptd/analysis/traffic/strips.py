"""Predicts the collectives of models of images along cp, which cuts them into strips, and of sums.

Letters: B images of which a device has strips, D numbers of a patch, K classes.
"""

import itertools
from collections.abc import Iterator

from jaxptd.analysis.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.analysis.traffic.images import images_in_strips
from jaxptd.analysis.traffic.scenario import Scenario
from jaxptd.layout import Axis
from jaxptd.models.architecture import Stack
from jaxptd.vision.architecture import ImageEnds
from jaxptd.vision.family import images_of

ROLLS = 2  # of a shifted block: x before attention, and back after it
PASSES = 2  # forward and backward
DICE_SUMS = 3  # of each image and class


def halos(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """The rows that windows of a shifted block share with the next strip.

    Backward rolls x again where it normalises it again, and the result where a norm reads their
    sum.
    """
    layout, sizes = step.config.layout, step.of_stack(stack).sizes
    images = sizes.samples(sizes.stream_rows, stack)
    for again, layers in step.recomputed(stack):
        rolls = ROLLS * PASSES + again.norms + again.products
        times = step.config.train.micro_batches * layers * rolls
        for each in stack.windows:
            if each.shift and each.in_strips(layout.cp):
                row = each.rows * sizes.hidden // layout.col * sizes.itemsize
                yield Collective(PERMUTE, (Axis.CP,), times, times * images * each.shift * row)


def strip_ends(step: Scenario) -> Iterator[Collective]:
    """From strips to whole images and back between levels, and sums over an image in the loss."""
    ends = step.sizes.architecture.images
    if ends is None:
        return
    yield from _between_levels(step)
    yield from (_sums if ends.logits > 1 else _means)(step, ends)


def _between_levels(step: Scenario) -> Iterator[Collective]:
    """All-to-alls of the residual stream of the level that is in strips."""
    cp, times = step.config.layout.cp, step.config.train.micro_batches * PASSES
    for pair in itertools.pairwise(step.sizes.architecture.stacks):
        in_strips = [stack for stack in pair if stack.in_strips(cp)]
        if len(in_strips) == 1:
            sizes = step.of_stack(in_strips[0]).sizes
            columns = sizes.hidden // step.config.layout.col
            size = sizes.stream_rows * columns * sizes.itemsize
            yield Collective(ALL_TO_ALL, (Axis.CP,), times, times * size)


def _sums(step: Scenario, ends: ImageEnds) -> Iterator[Collective]:
    """The sums of Dice losses `[3, B, K]`, and backward those of the losses' gradients `[B]`.

    A batch has one loss, with sums `[3, K]` over all devices that share its images.
    """
    layout, times = step.config.layout, step.config.train.micro_batches
    axes: tuple[Axis, ...] = (Axis.CP,)
    losses = images_in_strips(step)
    if images_of(step.config.model).dice == "batch":
        losses, axes = 1, (Axis.DP, Axis.CP, Axis.ROW, *(Axis.TP,) * layout.sequence_parallel)
    size = times * losses * (DICE_SUMS * ends.classes + 1) * step.sizes.master_itemsize
    yield Collective(ALL_REDUCE, axes, PASSES * times, size)


def _means(step: Scenario, ends: ImageEnds) -> Iterator[Collective]:
    """Means of images `[B, D]`: sums over their strips, or those of other devices' images."""
    layout, times = step.config.layout, step.config.train.micro_batches
    last = step.sizes.architecture.stacks[-1]
    columns = step.of_stack(last).sizes.hidden // layout.col
    size = times * images_in_strips(step) * columns * step.sizes.master_itemsize
    whole = (ALL_GATHER, REDUCE_SCATTER)
    for kind in (ALL_REDUCE,) * PASSES if last.in_strips(layout.cp) else whole:
        yield Collective(kind, (Axis.CP,), times, size)
