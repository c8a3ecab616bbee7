"""The parts of models of images: attention in windows, and what comes between and after levels.

Letters: b images of a micro-batch on one device, B images of which it holds strips, D size of a
patch, N heads, H head size, T patches of an image, K classes.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from jaxptd.config.images import Dice, windows_split
from jaxptd.context_parallel import Imported
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.costs.kept import MOST, Kept, by
from jaxptd.costs.program import Implementation, Work
from jaxptd.layout import BATCH_AXES, Axis, Layout
from jaxptd.matmul.padding import heads_for
from jaxptd.parts.architecture import Stack
from jaxptd.parts.ends import End, Norm
from jaxptd.parts.grid import product
from jaxptd.parts.parameters import HeadShape, Named, Sharding, by_head
from jaxptd.parts.part import Part, Product
from jaxptd.parts.projections import Projections
from jaxptd.parts.scenario import Recomputed, Scenario
from jaxptd.parts.sizes import Sizes
from jaxptd.parts.working import PairBytes

# Psums of whole scores, where each device holds a slice of every head: forward, and again in
# backward, for which no scores are saved.
WHOLE_SCORES = 2
GRADIENTS = 1  # psums of the gradients of probabilities, in activations' precision
ROLLS = 2  # per shifted block: x before attention, and back after it
PASSES = 2  # forward and backward
DICE_SUMS = 3  # per image and class


@dataclasses.dataclass(frozen=True)
class WindowShape(Part):
    """A pair of matmuls with attention in an image's windows between them; the first makes q, k, v.

    Args:
        hidden: D.
        heads: N.
        head_size: H.
        rows: rows of patches in an image, and patches in a row.
        window: patches in a row of a window.
        shift: rows, and columns, by which windows are moved; 0 for none.
        bias: whether both matmuls have a bias.
    """

    hidden: int
    heads: int
    head_size: int
    rows: int
    window: int
    shift: int
    bias: bool

    layer = Imported("jaxptd.vision.windows", "WindowAttention")
    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "attention"
    first_title: ClassVar[str] = "product that makes q, k, v"
    of_images: ClassVar[bool] = True

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """T."""
        return self.rows**2

    def in_strips(self, devices: int) -> bool:
        return windows_split(self.rows, self.window, devices)

    @property
    def reach(self) -> int:
        """Patches of a window, all of which a patch attends to."""
        return self.window**2

    @property
    def columns(self) -> int:
        return 3 * self.inner

    @property
    def inner(self) -> int:
        return self.heads * self.head_size

    @property
    def score_flops(self) -> int:
        """FLOPs per patch of scores and of their matmul with the values, forward."""
        return 4 * self.heads * self.head_size * self.reach

    def first(self, sizes: Sizes) -> int:
        return 3 * self.second(sizes)

    def second(self, sizes: Sizes) -> int:
        """N*H; the sharded one is padded, as in `AttentionShape`."""
        if sizes.has_blocks:
            return self.heads * sizes.padded(self.head_size)
        return self._padded_heads(sizes) * self.head_size

    def heads_on_device(self, sizes: Sizes) -> int:
        return self.heads if sizes.has_blocks else self._padded_heads(sizes) // sizes.inner_devices

    def _padded_heads(self, sizes: Sizes) -> int:
        return heads_for(sizes.config.layout, self.heads, self.heads, self.head_size).queries

    @property
    def head_shape(self) -> HeadShape:
        return HeadShape(self.heads, self.heads, self.head_size)

    def splits(self, layout: Layout) -> bool:
        raise _no_times(self)

    @property
    def projections(self) -> Projections:
        """Its projections."""
        return Projections(
            self.hidden,
            self.heads,
            self.heads,
            self.head_size,
            joined=True,
            bias=self.bias,
            out_bias=self.bias,
        )

    def parameters(self, sharding: Sharding) -> Named:
        yield from self.projections.parameters(sharding)
        offsets = (2 * self.window - 1) ** 2
        yield "window_bias.table", by_head(sharding, offsets, self.head_shape)

    # ---- bytes ---------------------------------------------------------------------------------

    def kept(self, sizes: Sizes) -> Iterator[Kept]:
        """Queries, keys and values, from which backward recomputes scores, and the output."""
        output = sizes.tokens * sizes.itemsize * self.second(sizes) // sizes.matrix_shards
        bias = self.heads_on_device(sizes) * self.reach**2 * sizes.master_itemsize
        yield Kept("q, k, v", 3 * output, MOST)
        yield Kept("biases of scores", bias, by("none"))
        yield Kept("attention's output", output, by("none", "dots"))

    def pair_bytes(self, sizes: Sizes) -> PairBytes:
        return PairBytes.of(self, sizes)

    # ---- bytes sent ----------------------------------------------------------------------------

    def on_grid(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Adds all-reduces of scores over slices of heads."""
        yield from super().on_grid(step, again, times)
        if step.sizes.has_blocks:
            scores, sizes = step.sizes.rows * self.heads * self.reach, step.sizes
            for each, itemsize in (
                (WHOLE_SCORES + again.kernel, sizes.master_itemsize),
                (GRADIENTS, sizes.itemsize),
            ):
                count = times * each
                yield Collective(ALL_REDUCE, (Axis.COL,), count, count * scores * itemsize)

    def along_cp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Sends rows that windows of a shifted block share with the next strip.

        Backward rolls x again where it normalises it again, and the result where a norm reads their
        sum.
        """
        layout, sizes = step.config.layout, step.sizes
        if self.shift and self.in_strips(layout.cp):
            images = sizes.stream_rows * layout.cp // self.sequence
            count = times * (ROLLS * PASSES + again.norms + again.products)
            row = self.rows * sizes.hidden // layout.col * sizes.itemsize
            yield Collective(PERMUTE, (Axis.CP,), count, count * images * self.shift * row)

    # ---- seconds -------------------------------------------------------------------------------

    def products(self, work: Work) -> Iterator[Product]:
        raise _no_times(self)

    def moved_forward(self, implementation: Implementation) -> int:
        raise _no_times(self)

    def moved_backward(self, implementation: Implementation) -> int:
        raise _no_times(self)


def _no_times(part: WindowShape) -> NotImplementedError:
    """The error if `models.families.require_times` was not called before."""
    return NotImplementedError(f"the planner does not cover {part.title} in windows")


@dataclasses.dataclass(frozen=True)
class Resampling:
    """A matmul of the residual stream between levels of patches, or of two streams.

    Args:
        tokens: patches of an image in the matmul.
        hidden: D.
        joined: number of patches, or streams, that become one.
        out: D of the result.
        parted: number of patches that one becomes.
    """

    tokens: int
    hidden: int
    joined: int
    out: int
    parted: int

    @property
    def multiplications(self) -> int:
        """Multiplications with weights per image."""
        return self.tokens * self.hidden * self.joined * self.out * self.parted


@dataclasses.dataclass(frozen=True)
class ImageEnds(End):
    """The parts of a model of images outside its levels, and between them.

    Args:
        levels: in the order in which activations pass them.
        patches: number per image at level 0.
        pixels: elements of such a patch.
        hidden: D of level 0.
        resamplings: those between levels, and after them.
        norms: patches of an image in each norm.
        last: D before the classes.
        logits: vectors of logits per image: one, or one for each pixel.
        classes: K.
        statistics: each norm's, as in `Norm`.
        dice: whether Dice losses are per image or per batch.
    """

    levels: tuple[Stack, ...]
    patches: int
    pixels: int
    hidden: int
    resamplings: tuple[Resampling, ...]
    norms: tuple[int, ...]
    last: int
    logits: int
    classes: int
    statistics: int
    dice: Dice | None

    def multiplications(self, tokens: int) -> int:
        ends = self.patches * self.pixels * self.hidden + self.logits * self.last * self.classes
        return ends + sum(each.multiplications for each in self.resamplings)

    # ---- bytes sent ----------------------------------------------------------------------------

    def collectives(self, step: Scenario) -> Iterator[Collective]:
        """Collectives on a grid, between levels with and without strips, and of the loss."""
        if step.config.layout.has_grid:
            yield from self._on_grid(step)
        yield from self._between_levels(step)
        yield from (self._sums if self.logits > 1 else self._means)(step)

    def _on_grid(self, step: Scenario) -> Iterator[Collective]:
        """Matmuls in blocks, statistics of norms, and all-reduces of logits over hidden units."""
        times = step.micro_batches
        for each in self.resamplings:
            sized_step = step.with_tokens(each.tokens)
            contract = step.sizes.padded(each.hidden) * each.joined
            out = step.sizes.padded(each.out) * each.parted
            yield from product(sized_step, contract, out, forwards=1, times=times)
        for tokens in self.norms:
            norm = Norm(self.hidden, self.statistics)
            yield from norm.on_grid(step.with_tokens(tokens), forward=times, backward=times)
        images, cp = self._in_strips(step), step.config.layout.cp
        logits = images * max(self.logits // cp, 1) * self.classes
        size = logits * step.sizes.master_itemsize
        yield Collective(ALL_REDUCE, (Axis.COL,), times, times * size)

    def _sums(self, step: Scenario) -> Iterator[Collective]:
        """All-reduces of Dice sums `[3, B, K]`, and in backward of the losses' gradients `[B]`.

        A batch has one loss, with sums `[3, K]` over all devices that share its images.
        """
        layout, times = step.config.layout, step.micro_batches
        axes: tuple[Axis, ...] = (Axis.CP,)
        losses = self._in_strips(step)
        if self.dice == "batch":
            losses, axes = 1, (*BATCH_AXES, Axis.ROW, *(Axis.TP,) * layout.sequence_parallel)
        size = times * losses * (DICE_SUMS * self.classes + 1) * step.sizes.master_itemsize
        yield Collective(ALL_REDUCE, axes, PASSES * times, size)

    def _means(self, step: Scenario) -> Iterator[Collective]:
        """Means of images `[B, D]`: reduced over strips, or gathered for whole images."""
        layout, times, last = step.config.layout, step.micro_batches, self.levels[-1]
        columns = step.with_tokens(last.tokens, last.hidden).sizes.hidden // layout.col
        size = times * self._in_strips(step) * columns * step.sizes.master_itemsize
        whole = (ALL_GATHER, REDUCE_SCATTER)
        for kind in (ALL_REDUCE,) * PASSES if last.in_strips(layout.cp) else whole:
            yield Collective(kind, (Axis.CP,), times, size)

    def _in_strips(self, step: Scenario) -> int:
        """Images of a micro-batch of which a device holds strips, as at level 0."""
        first = self.levels[0]
        sizes = step.with_tokens(first.tokens, first.hidden).sizes
        return first.samples(sizes, sizes.stream_rows)

    def _between_levels(self, step: Scenario) -> Iterator[Collective]:
        """All-to-alls of the residual stream of the level in strips."""
        cp, times = step.config.layout.cp, step.micro_batches * PASSES
        for pair in itertools.pairwise(self.levels):
            in_strips = [stack for stack in pair if stack.in_strips(cp)]
            if len(in_strips) == 1:
                (stack,) = in_strips
                size = step.with_tokens(stack.tokens, stack.hidden).sizes.stream
                yield Collective(ALL_TO_ALL, (Axis.CP,), times, times * size)
