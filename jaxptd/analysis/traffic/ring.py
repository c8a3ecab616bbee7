"""Predicts the collectives of ring attention.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, N heads, H head size.
Source: Li et al., arXiv 2105.13120 (RSA); Liu et al., arXiv 2310.01889.
"""

from collections.abc import Iterator

from jaxptd.analysis.collective import PERMUTE, Collective
from jaxptd.analysis.traffic.scenario import Recomputed, Scenario
from jaxptd.mesh import Axis


def ring(step: Scenario) -> Iterator[Collective]:
    """Keys and values, forward and backward; and their gradients, in the masters' precision.

    Each travels ring_size-1 hops, in blocks of b*T*N*H/(cp*tp), or b*T*N*H/(cp*row*col). RSA sends
    keys and values in rings of their own, other attention both in one.
    """
    model, layout, sizes = step.config.model, step.config.layout, step.sizes
    axes = (Axis.CP, Axis.ROW) if layout.ring_size > layout.cp else (Axis.CP,)
    row = layout.ring_size // layout.cp
    block = sizes.tokens * sizes.attention // (row * layout.tp * layout.col)
    rings, block = (2, block) if layout.ring == "rsa" else (1, 2 * block)
    hops = step.config.train.micro_batches * (layout.ring_size - 1)
    once = hops * rings * model.num_layers
    again = hops * sum(layers * _rings_again(each, rings) for each, layers in step.stacks)
    both_passes = 2 * once + again
    yield Collective(PERMUTE, axes, both_passes, both_passes * block * sizes.itemsize)
    yield Collective(PERMUTE, axes, once, once * block * sizes.master_itemsize)


def _rings_again(again: Recomputed, rings: int) -> int:
    """Rings of one layer's forward pass that run again: the kernel's, or RSA's two."""
    return int(again.kernel) if rings == 1 else again.scores + again.values
