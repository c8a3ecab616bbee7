"""Predicts the collectives that only models of images have.

Letters: b images of a micro-batch on one device, D numbers of a patch, N heads, K classes.
"""

from collections.abc import Iterator

from jaxptd.analysis.collective import ALL_REDUCE, Collective
from jaxptd.analysis.sizes import WindowSizes
from jaxptd.analysis.traffic.grid import norms, product
from jaxptd.analysis.traffic.scenario import Recomputed, Scenario
from jaxptd.layout import Axis
from jaxptd.models.inventory import ImageEnds, Stack

# Psums of whole scores, where each device has a slice of every head: forward, again in backward,
# which keeps no scores, and of the gradients of probabilities.
WHOLE_SCORES = 3


def windows(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """Attention in windows."""
    own = step.of_stack(stack)
    for again, layers in step.recomputed(stack):
        for each in own.sizes.windows(stack):
            yield from _scores(own, each, again, layers)


def image_ends(step: Scenario) -> Iterator[Collective]:
    """The products outside of levels, their norms, and the logits."""
    ends = step.sizes.inventory.images
    if ends is not None and step.config.layout.has_grid:
        yield from _on_grid(step, ends)


def _scores(
    step: Scenario, windows: WindowSizes, again: Recomputed, layers: int
) -> Iterator[Collective]:
    """Sums of scores over slices of heads."""
    if step.sizes.has_blocks:
        times = step.config.train.micro_batches * layers * (WHOLE_SCORES + again.kernel)
        scores = step.sizes.rows * windows.heads * windows.part.reach
        size = scores * step.sizes.master_itemsize
        yield Collective(ALL_REDUCE, (Axis.COL,), times, times * size)


def _on_grid(step: Scenario, ends: ImageEnds) -> Iterator[Collective]:
    """Products in blocks, the statistics of norms, and the sums of logits over hidden units."""
    times = step.config.train.micro_batches
    for each in ends.resamplings:
        own = step.with_tokens(each.tokens)
        contract = step.sizes.padded(each.hidden) * each.joined
        out = step.sizes.padded(each.out) * each.parted
        yield from product(own, contract, out, forwards=1, times=times)
    for tokens in ends.norms:
        yield from norms(step.with_tokens(tokens), ends.statistics, forwards=1, times=times)
    rows = step.with_tokens(ends.logits).sizes.rows
    size = rows * ends.classes * step.sizes.master_itemsize
    yield Collective(ALL_REDUCE, (Axis.COL,), times, times * size)
