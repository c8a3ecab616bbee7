"""Predicts the collectives of one-way tensor parallelism, with and without sequence parallelism.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, M
micro-batches.
Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

from collections.abc import Iterator

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.traffic.ring import gathered_kv
from jaxptd.analysis.traffic.scenario import Recomputed, Scenario
from jaxptd.mesh import Axis
from jaxptd.models.inventory import Stack

# Collectives of each kind of a pair of products: forward, and its conjugate backward.
FORWARD, BACKWARD = 1, 1
# Rounds of a pair with collective matmul: a gather and a scatter forward, their conjugates
# backward, and the gather of x once more, for the gradient of the weights.
ROUNDS = 2 * (FORWARD + BACKWARD) + 1
SOURCE_ROUNDS = FORWARD + BACKWARD + 1  # of a first product alone


def one_way(step: Scenario) -> Iterator[Collective]:
    """Activations of b*T/cp*D at every collective; then the loss of the sharded vocabulary.

    The loss takes a maximum and two sums for each token.
    """
    layout, sizes = step.config.layout, step.sizes
    micro_batches = step.config.train.micro_batches
    size = sizes.tokens * step.config.model.hidden_size * sizes.itemsize
    layers = {} if layout.collective_matmul else _of_layers(step)
    heads = sizes.inventory.heads
    for kind in (ALL_GATHER, REDUCE_SCATTER) if layout.sequence_parallel else (ALL_REDUCE,):
        more = 0 if kind == ALL_GATHER else step.embeddings - 1
        ends = 1 + len(heads)  # at the embedding and at each output layer
        times = micro_batches * (layers.get(kind, 0) + ends + more)
        yield Collective(kind, (Axis.TP,), times, times * size)
    for stack, again, count in step.stacks:
        yield from gathered_kv(step, stack, again, times=micro_batches * count)
        yield from _sources(step, stack, again, times=micro_batches * count)
    hops = micro_batches * _rounds(step) * (layout.tp - 1)
    yield Collective(PERMUTE, (Axis.TP,), hops, hops * size // layout.tp)
    times = len(heads) * micro_batches
    loss = 3 * times * sizes.tokens * sizes.master_itemsize
    yield Collective(ALL_REDUCE, (Axis.TP,), 2 * times, loss)


def _sources(
    step: Scenario, stack: Stack, again: Recomputed, *, times: int
) -> Iterator[Collective]:
    """Other sequences, as they enter the product that makes their keys and values.

    times: layers in all micro-batches.
    """
    layout, sizes = step.config.layout, step.sizes
    for attention in sizes.attentions(stack):
        if attention.part.source is None:
            continue
        hidden = step.config.model.hidden_size
        size = attention.of_keys(sizes.tokens) * hidden * sizes.itemsize
        if layout.collective_matmul:
            hops = times * (SOURCE_ROUNDS + again.products) * (layout.tp - 1)
            yield Collective(PERMUTE, (Axis.TP,), hops, hops * size // layout.tp)
        elif layout.sequence_parallel:
            gathers = times * (FORWARD + again.gathers)
            yield Collective(ALL_GATHER, (Axis.TP,), gathers, gathers * size)
            yield Collective(REDUCE_SCATTER, (Axis.TP,), times, times * size)
        else:
            yield Collective(ALL_REDUCE, (Axis.TP,), times, times * size)


def _of_layers(step: Scenario) -> dict[str, int]:
    """Executions in all layers, for one micro-batch."""
    total = {ALL_REDUCE: 0, ALL_GATHER: 0, REDUCE_SCATTER: 0}
    for stack, again, layers in step.stacks:
        pairs = len(stack.pairs)
        once, scattered = pairs * (FORWARD + BACKWARD), again.row_products(pairs)
        total[ALL_REDUCE] += layers * (once + scattered)
        total[ALL_GATHER] += layers * (once + pairs * again.gathers)
        total[REDUCE_SCATTER] += layers * (once + scattered)
    return total


def _rounds(step: Scenario) -> int:
    """Rounds of tp-1 hops in all layers, for one micro-batch; none without collective matmul.

    Products gather in the same rounds, so the gathers run again only with the products.
    """
    if not step.config.layout.collective_matmul:
        return 0
    total = 0
    for stack, again, layers in step.stacks:
        pairs = len(stack.pairs)
        total += layers * (pairs * (ROUNDS + again.products) + again.row_products(pairs))
    return total
