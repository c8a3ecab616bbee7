"""Predicts the collectives of a training step on a row x col grid.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, of which a device has
m = b*T/(cp*row); D model, F hidden, V vocabulary, N heads, H head size, all as padded.
Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025; for the algorithms see
`matmul/grid.py`.
"""

import dataclasses
import math
from collections.abc import Iterator

from jaxptd.analysis.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.analysis.sizes import AttentionSizes
from jaxptd.analysis.traffic.ring import gathered_kv
from jaxptd.analysis.traffic.scenario import Recomputed, Scenario
from jaxptd.layout import Axis, Layout
from jaxptd.models.inventory import Stack


@dataclasses.dataclass(frozen=True)
class Panels:
    """The collectives that move panels of matrices along one axis of a grid.

    Args:
        layout: with the grid and its algorithm.
        on_gpus: broadcasts are XLA's; CPUs have none, and all-reduce instead.
    """

    layout: Layout
    on_gpus: bool

    def spread(self, axis: Axis, size: int, *, times: int, itemsize: int) -> Iterator[Collective]:
        """Every device along `axis` gets the others' blocks of `size` elements."""
        broadcast = BROADCAST if self.on_gpus else ALL_REDUCE
        yield from self._move(axis, size * itemsize, times, (ALL_GATHER, broadcast))

    def collect(self, axis: Axis, size: int, *, times: int, itemsize: int) -> Iterator[Collective]:
        """Partial sums are reduced to the devices that own their blocks of `size` elements."""
        yield from self._move(axis, size * itemsize, times, (REDUCE_SCATTER, ALL_REDUCE))

    def _move(
        self, axis: Axis, block: int, times: int, kinds: tuple[str, str]
    ) -> Iterator[Collective]:
        """Moves of `block` bytes; kinds: of collective, in gather and in summa."""
        layout = self.layout
        devices, whole = layout.sizes[axis], block * layout.sizes[axis] * times
        ring = Collective(PERMUTE, (axis,), times * (devices - 1), whole - block * times)
        if layout.matmul2d == "gather":
            yield Collective(kinds[0], (axis,), times * layout.matmul2d_slices, whole)
        elif layout.matmul2d == "summa":
            steps = math.lcm(layout.row, layout.col)
            yield Collective(kinds[1], (axis,), times * steps, whole)
        elif layout.matmul2d == "cannon":
            yield Collective(PERMUTE, (axis,), times * devices, whole)  # one of them the skew
        elif axis is Axis.ROW:
            yield ring
        else:  # fox; a source that differs from row to row is no broadcast, see collectives.py
            yield Collective(ALL_REDUCE, (axis,), times * devices, whole)


def layers_on_grid(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """A stack's products, norms and attention in blocks; attention by heads is in `ring.py`."""
    own = step.of_stack(stack)
    for again, layers in step.recomputed(stack):
        times = step.config.train.micro_batches * layers
        yield from _layers(own, stack, again, times=times)


def ends_on_grid(step: Scenario) -> Iterator[Collective]:
    """Tables, the norms and products outside of layers, and the loss."""
    sizes, M = step.sizes, step.config.train.micro_batches
    parts = sizes.inventory
    for head in parts.heads:
        yield from product(step, sizes.hidden, sizes.columns(head), forwards=1, times=M)
        yield from product(step, sizes.hidden, sizes.hidden, forwards=1, times=M * head.squares)
    first = [(parts.first_norm, step.embeddings)]
    for norm, forwards in first + [(head.norm, 1) for head in parts.heads]:
        if norm:
            yield from norms(step, norm, forwards=forwards, times=M)
    yield from _tables(step)


def _layers(step: Scenario, stack: Stack, again: Recomputed, *, times: int) -> Iterator[Collective]:
    """Layers of a stack with the same recomputation; times: layers in all micro-batches."""
    sizes, last = step.sizes, len(stack.pairs) - 1
    forwards = 1 + again.products
    for number, pair in enumerate(stack.pairs):
        each, runs = sizes.of(pair), 1 + again.last_product if number == last else forwards
        yield from product(step, sizes.hidden, each.first, forwards=forwards, times=times)
        yield from product(step, each.second, sizes.hidden, forwards=runs, times=times)
    for attention in sizes.attentions(stack):
        yield from _source(step, attention, again, times=times)
    all_norms = times * len(stack.pairs)
    yield from norms(step, stack.statistics, forwards=forwards, times=all_norms)
    for attention in sizes.attentions(stack) if sizes.has_blocks else ():
        yield from _blocks(step, attention, again, times)
    yield from gathered_kv(step, stack, again, times=times)


def _source(
    step: Scenario, attention: AttentionSizes, again: Recomputed, *, times: int
) -> Iterator[Collective]:
    """The product that makes keys and values of another sequence, if these are so, and its norm.

    No layer changes that sequence: without remat one loop over all layers normalises it once.
    """
    part, forwards = attention.part, 1 + again.products
    if part.source is None:
        return
    source, out = step.with_tokens(part.source), 2 * attention.made_keys
    yield from product(source, step.sizes.hidden, out, forwards=forwards, times=times)
    one_loop = step.config.model.scan_layers and not step.sizes.traces_layers
    once = one_loop and again.nothing
    forward = step.config.train.micro_batches if once else forwards * times
    if part.source_statistics:
        yield from _statistics(source, part.source_statistics, forward=forward, backward=times)


def product(
    step: Scenario, contract: int, out: int, *, forwards: int, times: int
) -> Iterator[Collective]:
    """x[m, K] w[K, out], run `forwards` times, and its backward.

    Forward spreads x and w. Backward spreads w again for the gradient of x, and x for the gradient
    of w; it collects the gradient of x, and that of w in the masters' precision.
    """
    layout, sizes, panels = step.config.layout, step.sizes, Panels(step.config.layout, step.on_gpus)
    x = sizes.rows * contract // layout.col
    w = contract * out // (layout.row * layout.col)
    spread = times * (forwards + 1)
    yield from panels.spread(Axis.COL, x, times=spread, itemsize=sizes.itemsize)
    yield from panels.spread(Axis.ROW, w, times=spread, itemsize=sizes.itemsize)
    yield from panels.collect(Axis.COL, x, times=times, itemsize=sizes.itemsize)
    yield from panels.collect(Axis.ROW, w, times=times, itemsize=sizes.master_itemsize)


def norms(step: Scenario, means: int, *, forwards: int, times: int) -> Iterator[Collective]:
    """Norms that are run `forwards` times forward."""
    yield from _statistics(step, means, forward=forwards * times, backward=times)


def _statistics(step: Scenario, means: int, *, forward: int, backward: int) -> Iterator[Collective]:
    """Mean and variance, one after the other; backward two means in one message.

    RMSNorm has a single one, forward and backward.
    """
    size = step.sizes.rows * step.sizes.master_itemsize
    count, scalars = means * forward + backward, means * (forward + backward)
    yield Collective(ALL_REDUCE, (Axis.COL,), count, size * scalars)


def _tables(step: Scenario) -> Iterator[Collective]:
    """Rows of both tables, m*D and T/cp*D/col, forward and back; the loss of V sharded over col."""
    config, layout, sizes = step.config, step.config.layout, step.sizes
    micro_batches = config.train.micro_batches
    length = config.padded_model.seq_length // layout.cp
    positions = length * sizes.hidden // layout.col * sizes.itemsize
    forwards, learned = step.embeddings, sizes.inventory.positions is not None
    for length in sizes.inventory.embedded:
        yield from _look_ups(step.with_tokens(length))
    for kind, passes in ((REDUCE_SCATTER, forwards), (ALL_GATHER, 1)):
        times = passes * micro_batches * learned
        yield Collective(kind, (Axis.ROW,), times, times * positions)
    times = len(sizes.inventory.heads) * micro_batches
    loss = 3 * times * sizes.rows * sizes.master_itemsize
    yield Collective(ALL_REDUCE, (Axis.COL,), 2 * times, loss)


def _look_ups(step: Scenario) -> Iterator[Collective]:
    """Rows of the table of tokens for one sequence."""
    sizes, times, forwards = step.sizes, step.config.train.micro_batches, step.embeddings
    rows = times * sizes.rows * sizes.hidden * sizes.itemsize
    yield Collective(ALL_TO_ALL, (Axis.ROW,), (1 + forwards) * times, (1 + forwards) * rows)
    yield Collective(REDUCE_SCATTER, (Axis.COL,), forwards * times, forwards * rows)
    yield Collective(ALL_GATHER, (Axis.COL,), times, rows)


def _blocks(
    step: Scenario, attention: AttentionSizes, again: Recomputed, times: int
) -> Iterator[Collective]:
    """Q K^T, softmax, P V of every head: s elements in a block of scores, k in one of whole keys.

    Forward and backward of the two products spread keys or values four times and scores four times.
    """
    sizes, panels, part = step.sizes, Panels(step.config.layout, step.on_gpus), attention.part
    narrow, wide = sizes.itemsize, sizes.master_itemsize
    k = step.config.layout.cp * attention.of_keys(sizes.rows) * attention.keys
    s = sizes.rows * part.heads * part.key_tokens // step.config.layout.col
    keys = times * (4 + again.scores + again.values)
    yield from panels.spread(Axis.ROW, k, times=keys, itemsize=narrow)
    yield from panels.spread(Axis.COL, s, times=times * (4 + again.values), itemsize=narrow)
    yield from panels.collect(Axis.COL, s, times=times, itemsize=narrow)
    yield from panels.collect(Axis.COL, s, times=times * (1 + again.scores), itemsize=wide)
    yield from panels.collect(Axis.ROW, k, times=times * 2, itemsize=narrow)
    softmax = times * (3 + 2 * again.scores)
    rows = sizes.rows * part.heads * wide
    yield Collective(ALL_REDUCE, (Axis.COL,), softmax, softmax * rows)
    if part.has_norm:
        passes = times * (2 + again.products)
        rows += sizes.rows * part.kv_heads * wide
        yield Collective(ALL_REDUCE, (Axis.COL,), 2 * passes, passes * rows)
