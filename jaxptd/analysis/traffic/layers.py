"""Predicts the collectives of layers: of attention along cp, on a row x col grid, and along tp."""

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
from jaxptd.analysis.traffic.scenario import Recomputed, Scenario
from jaxptd.layout import Axis, Layout
from jaxptd.models.architecture import Attention, Stack

# ---- attention along cp, and kv heads that more devices share -----------------------------------
# Letters: b sequences of a micro-batch on one device, T queries and S keys in a sequence, K heads
# of keys and values, H head size.
# Source: Li et al., arXiv 2105.13120 (RSA); Liu et al., arXiv 2310.01889.


def ring(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """A stack's keys and values, forward and backward; their gradients, in masters' precision."""
    for again, layers in step.recomputed(stack):
        for attention in step.sizes.of_stack(stack).attentions(stack):
            sized_step = step.of_stack(stack)
            one = _gathered_blocks if sized_step.sizes.has_blocks else _rings
            yield from one(sized_step, attention, again, layers)


def _gathered_blocks(
    step: Scenario, attention: AttentionSizes, again: Recomputed, layers: int
) -> Iterator[Collective]:
    """Blocks of keys and values of every grid, together, with the scores; and their gradients."""
    times, passes = step.config.train.micro_batches * layers, 1 + again.scores
    whole = times * 2 * attention.of_keys(step.sizes.rows) * attention.keys * step.sizes.itemsize
    whole *= step.config.layout.cp
    yield Collective(ALL_GATHER, (Axis.CP,), passes * times, passes * whole)
    yield Collective(REDUCE_SCATTER, (Axis.CP,), times, whole)


def _rings(
    step: Scenario, attention: AttentionSizes, again: Recomputed, layers: int
) -> Iterator[Collective]:
    """Attention of some layers.

    Each travels in blocks of b*S*K*H/(cp*tp), or b*S*K*H/(cp*row*col). RSA sends keys and values in
    rings of their own, other attention both in one.
    """
    layout, sizes = step.config.layout, step.sizes
    axes = (Axis.CP, Axis.ROW) if layout.ring_size > layout.cp else (Axis.CP,)
    row = layout.ring_size // layout.cp
    block = attention.of_keys(sizes.tokens // row) * attention.keys
    rings = layout.context_parallel.exchange.rings
    block = 2 * block // rings
    times, hops = step.config.train.micro_batches * layers, _hops(layout, attention.part)
    both_passes = times * hops * (2 * rings + _rings_again(again, rings))
    yield Collective(PERMUTE, axes, both_passes, both_passes * block * sizes.itemsize)
    # The last hop of gradients leads back to their owner: over cp alone where its row is the same.
    back = axes if hops % row else (Axis.CP,)
    for over, number in ((axes, hops - 1), (back, 1)):
        once = times * rings * number if hops else 0
        yield Collective(PERMUTE, over, once, once * block * sizes.master_itemsize)


def _hops(layout: Layout, part: Attention) -> int:
    """Hops to all other devices, or with contiguous blocks as far as a window reaches."""
    others = layout.ring_size - 1
    if not layout.context_parallel.order.in_line or part.source is not None:
        return others
    return min(others, -(-(part.reach - 1) * layout.ring_size // part.tokens))


def gathered_kv(
    step: Scenario, stack: Stack, again: Recomputed, *, times: int
) -> Iterator[Collective]:
    """Slices of kv heads, gathered, and their gradients; times: layers in all micro-batches."""
    sizes, axis = step.sizes.of_stack(stack), Axis.COL if step.config.layout.has_grid else Axis.TP
    for attention in sizes.attentions(stack):
        if attention.gathers_kv:
            rows = attention.of_keys(sizes.rows)
            whole = times * rows * 2 * attention.made_keys * sizes.itemsize
            passes = 1 + again.keys
            yield Collective(ALL_GATHER, (axis,), times * passes, passes * whole)
            yield Collective(REDUCE_SCATTER, (axis,), times, whole)


def _rings_again(again: Recomputed, rings: int) -> int:
    """Rings of one layer's forward pass that run again: the kernel's, or RSA's two."""
    return int(again.kernel) if rings == 1 else again.scores + again.values


# ---- on a row x col grid -------------------------------------------------------------------------
# Letters: b sequences of a micro-batch on one device, T tokens in a sequence, of which a device has
# m = b*T/(cp*row); D model, F hidden, V vocabulary, N heads, H head size, all as padded.
# Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025; for the algorithms see
# `matmul/grid.py`.


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
    sized_step = step.of_stack(stack)
    for again, layers in step.recomputed(stack):
        times = step.config.train.micro_batches * layers
        yield from _layers(sized_step, stack, again, times=times)


def ends_on_grid(step: Scenario) -> Iterator[Collective]:
    """Tables, the norms and products outside of layers, and the loss."""
    sizes, M = step.sizes, step.config.train.micro_batches
    parts = sizes.architecture
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
    sizes, last = step.sizes, len(stack.sublayers) - 1
    forwards = 1 + again.products
    for number, sublayer in enumerate(stack.sublayers):
        each, runs = sizes.of(sublayer), 1 + again.last_product if number == last else forwards
        yield from product(step, sizes.hidden, each.first, forwards=forwards, times=times)
        yield from product(step, each.second, sizes.hidden, forwards=runs, times=times)
    for attention in sizes.attentions(stack):
        yield from _source(step, attention, again, times=times)
    all_norms = times * len(stack.sublayers)
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
    forwards, learned = step.embeddings, sizes.architecture.positions is not None
    for length in sizes.architecture.embedded:
        yield from _look_ups(step.with_tokens(length))
    for kind, passes in ((REDUCE_SCATTER, forwards), (ALL_GATHER, 1)):
        times = passes * micro_batches * learned
        yield Collective(kind, (Axis.ROW,), times, times * positions)
    times = len(sizes.architecture.heads) * micro_batches
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


# ---- on tp ---------------------------------------------------------------------------------------
# Predicts the collectives of one-way tensor parallelism, with and without sequence parallelism.
#
# Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, M
# micro-batches.
# Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.

# Collectives of each kind of a pair of products: forward, and its conjugate backward.
FORWARD, BACKWARD = 1, 1
# Rounds of a pair with collective matmul: a gather and a scatter forward, their conjugates
# backward, and the gather of x once more, for the gradient of the weights.
ROUNDS = 2 * (FORWARD + BACKWARD) + 1
SOURCE_ROUNDS = FORWARD + BACKWARD + 1  # of a first product alone


def layers_one_way(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """The layers of a stack: activations of b*T/cp*D at every collective."""
    products = _in_rounds if step.config.layout.collective_matmul else _around_products
    sized_step = step.of_stack(stack)
    for again, count in step.recomputed(stack):
        times = step.config.train.micro_batches * count
        yield from products(sized_step, stack, again, times=times)
        yield from gathered_kv(sized_step, stack, again, times=times)
        yield from _sources(sized_step, stack, again, times=times)


def ends_one_way(step: Scenario) -> Iterator[Collective]:
    """Embeddings and output layers; then the loss of the sharded vocabulary.

    The loss takes a maximum and two sums for each token.
    """
    sizes, micro_batches = step.sizes, step.config.train.micro_batches
    for length in sizes.architecture.embedded:
        yield from _at_an_end(step.with_tokens(length), scattered=step.embeddings)
    for _ in sizes.architecture.heads:
        yield from _at_an_end(step, scattered=1)
    times = len(sizes.architecture.heads) * micro_batches
    loss = 3 * times * sizes.tokens * sizes.master_itemsize
    yield Collective(ALL_REDUCE, (Axis.TP,), 2 * times, loss)


def _kinds(step: Scenario) -> tuple[str, ...]:
    """Collectives that move activations: one, or with sequence parallelism its two halves."""
    return (ALL_GATHER, REDUCE_SCATTER) if step.config.layout.sequence_parallel else (ALL_REDUCE,)


def _size(step: Scenario) -> int:
    """Bytes of the activations of all a micro-batch's tokens on a device, b*T/cp*D."""
    return step.sizes.tokens * step.sizes.hidden * step.sizes.itemsize


def _at_an_end(step: Scenario, *, scattered: int) -> Iterator[Collective]:
    """The embedding of a sequence, or an output layer; scattered: times of the sums."""
    micro_batches = step.config.train.micro_batches
    for kind in _kinds(step):
        times = micro_batches * (1 if kind == ALL_GATHER else scattered)
        yield Collective(kind, (Axis.TP,), times, times * _size(step))


def _sources(
    step: Scenario, stack: Stack, again: Recomputed, *, times: int
) -> Iterator[Collective]:
    """Other sequences, as they enter the product that makes their keys and values.

    A loop whose layers keep all gathers them once for all layers.

    times: layers in all micro-batches.
    """
    layout, sizes = step.config.layout, step.sizes
    in_loop = step.config.model.scan_layers and not sizes.traces_layers
    forward = step.config.train.micro_batches if in_loop and again.nothing else times
    for attention in sizes.attentions(stack):
        if attention.part.source is None:
            continue
        size = _size(step.with_tokens(attention.part.source))
        if layout.collective_matmul:
            hops = times * (SOURCE_ROUNDS + again.products) * (layout.tp - 1)
            yield Collective(PERMUTE, (Axis.TP,), hops, hops * size // layout.tp)
        elif layout.sequence_parallel:
            gathers = forward + times * again.inputs
            yield Collective(ALL_GATHER, (Axis.TP,), gathers, gathers * size)
            yield Collective(REDUCE_SCATTER, (Axis.TP,), times, times * size)
        else:
            yield Collective(ALL_REDUCE, (Axis.TP,), times, times * size)


def _around_products(
    step: Scenario, stack: Stack, again: Recomputed, *, times: int
) -> Iterator[Collective]:
    """Before and behind the pairs of products; times: layers in all micro-batches."""
    sublayers = len(stack.sublayers)
    once, scattered = sublayers * (FORWARD + BACKWARD), again.row_products(sublayers)
    gathered = sublayers * again.inputs
    for kind in _kinds(step):
        count = times * (once + (gathered if kind == ALL_GATHER else scattered))
        yield Collective(kind, (Axis.TP,), count, count * _size(step))


def _in_rounds(
    step: Scenario, stack: Stack, again: Recomputed, *, times: int
) -> Iterator[Collective]:
    """Rounds of tp-1 hops, with collective matmul; times: layers in all micro-batches.

    Products gather in the same rounds, so the gathers run again only with the products. Where
    backward is split, the gradient of a pair's result passes in both halves.
    """
    sublayers, tp = len(stack.sublayers), step.config.layout.tp
    splits = step.plan is not None and step.plan.schedule.splits
    rounds = sublayers * (ROUNDS + again.products + splits) + again.row_products(sublayers)
    hops = times * rounds * (tp - 1)
    yield Collective(PERMUTE, (Axis.TP,), hops, hops * _size(step) // tp)
