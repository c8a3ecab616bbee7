"""Predicts the collectives of one-way tensor parallelism, with and without sequence parallelism.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, M
micro-batches.
Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

from collections.abc import Iterator

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.traffic.ring import gathered_kv
from jaxptd.analysis.traffic.scenario import Scenario
from jaxptd.mesh import Axis

# Collectives of a layer's two pairs of products: forward, and their conjugates backward.
FORWARD, BACKWARD = 2, 2
# Rounds of a layer with collective matmul: two gathers and two scatters forward, their conjugates
# backward, and the two gathers of x once more, for the gradients of the weights.
ROUNDS = 2 * (FORWARD + BACKWARD) + 2
ENDS = 2  # collectives of a micro-batch outside its layers: at the embedding and the output layer


def one_way(step: Scenario) -> Iterator[Collective]:
    """Activations of b*T/cp*D at every collective; then the loss of the sharded vocabulary.

    The loss takes a maximum and two sums for each token.
    """
    layout, sizes = step.config.layout, step.sizes
    micro_batches = step.config.train.micro_batches
    size = sizes.tokens * step.config.model.hidden_size * sizes.itemsize
    layers = {} if layout.collective_matmul else _of_layers(step)
    for kind in (ALL_GATHER, REDUCE_SCATTER) if layout.sequence_parallel else (ALL_REDUCE,):
        times = micro_batches * (layers.get(kind, 0) + ENDS)
        yield Collective(kind, (Axis.TP,), times, times * size)
    for again, count in step.stacks:
        yield from gathered_kv(step, again, micro_batches * count)
    hops = micro_batches * _rounds(step) * (layout.tp - 1)
    yield Collective(PERMUTE, (Axis.TP,), hops, hops * size // layout.tp)
    loss = 3 * micro_batches * sizes.tokens * sizes.master_itemsize
    yield Collective(ALL_REDUCE, (Axis.TP,), 2 * micro_batches, loss)


def _of_layers(step: Scenario) -> dict[str, int]:
    """Executions in all layers, for one micro-batch."""
    total = {ALL_REDUCE: 0, ALL_GATHER: 0, REDUCE_SCATTER: 0}
    for again, layers in step.stacks:
        total[ALL_REDUCE] += layers * (FORWARD + BACKWARD + again.row_products)
        total[ALL_GATHER] += layers * (FORWARD + BACKWARD + 2 * again.gathers)
        total[REDUCE_SCATTER] += layers * (FORWARD + BACKWARD + again.row_products)
    return total


def _rounds(step: Scenario) -> int:
    """Rounds of tp-1 hops in all layers, for one micro-batch; none without collective matmul.

    Products gather in the same rounds, so the gathers run again only with the products.
    """
    if not step.config.layout.collective_matmul:
        return 0
    again = [(2 * each.products + each.row_products, layers) for each, layers in step.stacks]
    return sum(layers * (ROUNDS + rounds) for rounds, layers in again)
