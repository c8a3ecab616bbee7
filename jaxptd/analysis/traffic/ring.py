"""Predicts the collectives along cp of attention, and of kv heads that more devices share.

Letters: b sequences of a micro-batch on one device, T queries and S keys in a sequence, K heads of
keys and values, H head size.
Source: Li et al., arXiv 2105.13120 (RSA); Liu et al., arXiv 2310.01889.
"""

from collections.abc import Iterator

from jaxptd.analysis.collective import ALL_GATHER, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.sizes import AttentionSizes
from jaxptd.analysis.traffic.scenario import Recomputed, Scenario
from jaxptd.layout import Axis, Layout
from jaxptd.models.inventory import Attention, Stack


def ring(step: Scenario, stack: Stack) -> Iterator[Collective]:
    """A stack's keys and values, forward and backward; their gradients, in masters' precision."""
    for again, layers in step.recomputed(stack):
        for attention in step.sizes.of_stack(stack).attentions(stack):
            own = step.of_stack(stack)
            one = _gathered_blocks if own.sizes.has_blocks else _rings
            yield from one(own, attention, again, layers)


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
    rings, block = (2, block) if layout.ring == "rsa" else (1, 2 * block)
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
    if layout.ring == "zigzag" or part.source is not None:
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
