"""Predicts the collectives of one-way tensor parallelism, with and without sequence parallelism.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, M
micro-batches.
Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

from collections.abc import Iterator

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.traffic.ring import gathered_kv
from jaxptd.analysis.traffic.scenario import Recomputed, Scenario
from jaxptd.layout import Axis
from jaxptd.models.inventory import Stack

# Collectives of each kind of a pair of products: forward, and its conjugate backward.
FORWARD, BACKWARD = 1, 1
# Rounds of a pair with collective matmul: a gather and a scatter forward, their conjugates
# backward, and the gather of x once more, for the gradient of the weights.
ROUNDS = 2 * (FORWARD + BACKWARD) + 1
SOURCE_ROUNDS = FORWARD + BACKWARD + 1  # of a first product alone


def layers_one_way(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """The layers of a stack: activations of b*T/cp*D at every collective."""
    products = _in_rounds if step.config.layout.collective_matmul else _around_products
    own = step.of_stack(stack)
    for again, count in step.recomputed(stack):
        times = step.config.train.micro_batches * count
        yield from products(own, stack, again, times=times)
        yield from gathered_kv(own, stack, again, times=times)
        yield from _sources(own, stack, again, times=times)


def ends_one_way(step: Scenario) -> Iterator[Collective]:
    """Embeddings and output layers; then the loss of the sharded vocabulary.

    The loss takes a maximum and two sums for each token.
    """
    sizes, micro_batches = step.sizes, step.config.train.micro_batches
    for length in sizes.inventory.embedded:
        yield from _at_an_end(step.with_tokens(length), scattered=step.embeddings)
    for _ in sizes.inventory.heads:
        yield from _at_an_end(step, scattered=1)
    times = len(sizes.inventory.heads) * micro_batches
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
    pairs = len(stack.pairs)
    once, scattered = pairs * (FORWARD + BACKWARD), again.row_products(pairs)
    gathered = pairs * again.inputs
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
    pairs, tp = len(stack.pairs), step.config.layout.tp
    splits = step.plan is not None and step.plan.schedule.splits
    rounds = pairs * (ROUNDS + again.products + splits) + again.row_products(pairs)
    hops = times * rounds * (tp - 1)
    yield Collective(PERMUTE, (Axis.TP,), hops, hops * _size(step) // tp)
