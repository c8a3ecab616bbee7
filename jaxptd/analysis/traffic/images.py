"""Predicts the collectives that only models of images have.

Letters: b images of a micro-batch on one device, D numbers of a patch, N heads, K classes.
"""

from collections.abc import Iterator

from jaxptd.analysis.collective import ALL_REDUCE, Collective
from jaxptd.analysis.sizes import WindowSizes
from jaxptd.analysis.traffic.layers import norms, product
from jaxptd.analysis.traffic.scenario import Recomputed, Scenario
from jaxptd.layout import Axis
from jaxptd.models.architecture import Stack
from jaxptd.vision.architecture import ImageEnds

# Psums of whole scores, where each device has a slice of every head: forward, and again in
# backward, which keeps no scores.
WHOLE_SCORES = 2
GRADIENTS = 1  # psums of the gradients of probabilities, which are as precise as activations


def windows(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """Attention in windows."""
    sized_step = step.of_stack(stack)
    for again, layers in step.recomputed(stack):
        for each in sized_step.sizes.windows(stack):
            yield from _scores(sized_step, each, again, layers)


def image_ends(step: Scenario) -> Iterator[Collective]:
    """The products outside of levels, their norms, and the logits."""
    ends = step.sizes.architecture.images
    if ends is not None and step.config.layout.has_grid:
        yield from _on_grid(step, ends)


def images_in_strips(step: Scenario) -> int:
    """Images of a micro-batch of which a device has strips, as at level 0."""
    first, *_ = step.sizes.architecture.stacks
    sizes = step.of_stack(first).sizes
    return sizes.samples(sizes.stream_rows, first)


def _scores(
    step: Scenario, windows: WindowSizes, again: Recomputed, layers: int
) -> Iterator[Collective]:
    """Sums of scores over slices of heads."""
    if step.sizes.has_blocks:
        layers *= step.config.train.micro_batches
        scores, sizes = step.sizes.rows * windows.heads * windows.part.reach, step.sizes
        for each, itemsize in (
            (WHOLE_SCORES + again.kernel, sizes.master_itemsize),
            (GRADIENTS, sizes.itemsize),
        ):
            times = layers * each
            yield Collective(ALL_REDUCE, (Axis.COL,), times, times * scores * itemsize)


def _on_grid(step: Scenario, ends: ImageEnds) -> Iterator[Collective]:
    """Products in blocks, the statistics of norms, and the sums of logits over hidden units."""
    times = step.config.train.micro_batches
    for each in ends.resamplings:
        sized_step = step.with_tokens(each.tokens)
        contract = step.sizes.padded(each.hidden) * each.joined
        out = step.sizes.padded(each.out) * each.parted
        yield from product(sized_step, contract, out, forwards=1, times=times)
    for tokens in ends.norms:
        yield from norms(step.with_tokens(tokens), ends.statistics, forwards=1, times=times)
    images, cp = images_in_strips(step), step.config.layout.cp
    logits = images * max(ends.logits // cp, 1) * ends.classes
    size = logits * step.sizes.master_itemsize
    yield Collective(ALL_REDUCE, (Axis.COL,), times, times * size)
