"""Predicts the collectives of ring attention, and of kv heads that more devices share.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, K heads of keys and
values, H head size.
Source: Li et al., arXiv 2105.13120 (RSA); Liu et al., arXiv 2310.01889.
"""

from collections.abc import Iterator

from jaxptd.analysis.collective import ALL_GATHER, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.traffic.scenario import Recomputed, Scenario
from jaxptd.mesh import Axis


def ring(step: Scenario) -> Iterator[Collective]:
    """Keys and values, forward and backward; and their gradients, in the masters' precision.

    Each travels in blocks of b*T*K*H/(cp*tp), or b*T*K*H/(cp*row*col). RSA sends keys and values in
    rings of their own, other attention both in one.
    """
    model, layout, sizes = step.config.model, step.config.layout, step.sizes
    axes = (Axis.CP, Axis.ROW) if layout.ring_size > layout.cp else (Axis.CP,)
    row = layout.ring_size // layout.cp
    block = sizes.tokens // row * sizes.keys
    rings, block = (2, block) if layout.ring == "rsa" else (1, 2 * block)
    hops = step.config.train.micro_batches * _hops(step)
    once = hops * rings * model.num_layers
    again = hops * sum(layers * _rings_again(each, rings) for each, layers in step.stacks)
    both_passes = 2 * once + again
    yield Collective(PERMUTE, axes, both_passes, both_passes * block * sizes.itemsize)
    yield Collective(PERMUTE, axes, once, once * block * sizes.master_itemsize)


def _hops(step: Scenario) -> int:
    """Hops to all other devices, or with contiguous blocks as far as a window reaches."""
    model, layout = step.config.model, step.config.layout
    others = layout.ring_size - 1
    if layout.ring == "zigzag" or model.window is None:
        return others
    return min(others, -(-(model.window - 1) * layout.ring_size // model.seq_length))


def gathered_kv(step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
    """Slices of kv heads, gathered, and their gradients; times: layers in all micro-batches."""
    sizes, axis = step.sizes, Axis.COL if step.config.layout.has_grid else Axis.TP
    if sizes.gathers_kv:
        whole = times * sizes.rows * 2 * sizes.made_keys * sizes.itemsize
        passes = 1 + again.gathers
        yield Collective(ALL_GATHER, (axis,), times * passes, passes * whole)
        yield Collective(REDUCE_SCATTER, (axis,), times, whole)


def _rings_again(again: Recomputed, rings: int) -> int:
    """Rings of one layer's forward pass that run again: the kernel's, or RSA's two."""
    return int(again.kernel) if rings == 1 else again.scores + again.values
