"""The working set of one layer: tensors of its backward pass that no loop over layers stacks.

The loop's backward pass reads what a layer saved, and XLA runs weight-gradient matmuls last. So
memory peaks between the two matmuls of a pair: the MLP's, when everything that forward computed is
alive, or attention's, when all inputs of the MLP's matmuls wait.
Bytes are of one device.
"""

from collections.abc import Iterator, Sequence

from jaxptd.config import Config, Remat
from jaxptd.parts.working import PairBytes, computes_again

ENDS = 3  # arrays like x: the last layer's output, its gradient, and the gradient on its way back


def layer(pairs: Sequence[PairBytes], remat: Remat, *, at_once: bool = False) -> int:
    """Bytes of a layer's tensors at the fullest moment of its backward pass.

    Args:
        pairs: the layer's.
        remat: its policy.
        at_once: whether weight-gradient matmuls do not wait; in pipelines, where each adds to its
            sum, none waits.
    """
    return max(_moments(pairs, remat, at_once))


def _moments(pairs: Sequence[PairBytes], remat: Remat, at_once: bool) -> Iterator[int]:
    """Bytes between the backward passes of the two matmuls of each pair."""
    for i, pair in enumerate(pairs):
        before = sum(each.forward for each in pairs[:i])
        after = sum(each.streams if at_once else each.waiting for each in pairs[i + 1 :])
        yield before + pair.backward(remat) + after + ENDS * pair.x


# ---- the halves of a split backward --------------------------------------------------------------
# Bytes that the first half of a split backward, B, hands to its second, W, besides what is saved.
#
# W multiplies each matmul's input with the gradient of its output. An array that B hands on
# replaces a saved array with as many rows that W does not read, if one is left: see
# `PassedStorage`. Bytes are of one device, layer and micro-batch. Arrays without tokens, such as
# the gradients of biases, are ignored.


def handed_on(config: Config, pairs: Sequence[PairBytes], remat: Remat) -> int:
    """Bytes that B hands to W without replacing a saved array.

    Args:
        config: of the run.
        pairs: of a layer.
        remat: its policy.
    """
    free = list(_free(config, pairs, remat))
    left = 0
    for size in _handed(config, pairs, remat):
        if size in free:
            free.remove(size)
        else:
            left += size
    return left


def _handed(config: Config, pairs: Sequence[PairBytes], remat: Remat) -> Iterator[int]:
    """Bytes of the arrays, in the order in which B computes them.

    Inputs of matmuls are saved, or B has recomputed them. With collective matmul the gradient of a
    pair's output is this device's piece; the others pass once more in W.
    """
    layout, again = config.layout, computes_again(remat)
    if again and not layout.has_grid and not _same_on_all(config):
        yield from (pair.x for pair in pairs)
    for pair in reversed(pairs):
        if layout.has_grid:
            yield from (
                *[pair.second] * pair.makes_second_again(remat),
                pair.gradient,
                *[pair.taken] * again,
                pair.first,
            )
        elif layout.collective_matmul:
            yield from (pair.gradient // layout.tp, pair.first)
        else:
            yield from (pair.gradient, pair.first)


def _free(config: Config, pairs: Sequence[PairBytes], remat: Remat) -> Iterator[int]:
    """The saved arrays that W does not read, in the order of forward."""
    for pair in pairs:
        yield from [] if _same_on_all(config) else [pair.x]
        yield from pair.free(remat, grid=config.layout.has_grid)


def _same_on_all(config: Config) -> bool:
    """True if x is the same on all devices of tp: only recomputed inputs of matmuls replace it.

    This follows from x's type, which does not depend on the size of tp.
    """
    return not config.layout.sequence_parallel and not config.layout.has_grid
