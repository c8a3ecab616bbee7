"""Bytes that the first half of a split backward, B, hands to its second, W, besides what is saved.

W multiplies what each product takes with the gradient of what it makes. An array that B hands on
takes the place of a saved one with its rows that W does not read, if one is left: see
`PassedStorage`. Bytes are of one device, layer and micro-batch; arrays without tokens, such as the
gradients of biases, are left out.
"""

from collections.abc import Iterator, Sequence

from jaxptd.analysis.peak.working import PairBytes, computes_again
from jaxptd.config import Config, Remat


def handed_on(config: Config, pairs: Sequence[PairBytes], remat: Remat) -> int:
    """Bytes that B hands to W and that take no saved array's place.

    Args:
        config: of the run.
        pairs: of a layer.
        remat: its policy.
    """
    free = list(_free(config, pairs, computes_again(remat)))
    left = 0
    for size in _handed(config, pairs, remat):
        if size in free:
            free.remove(size)
        else:
            left += size
    return left


def _handed(config: Config, pairs: Sequence[PairBytes], remat: Remat) -> Iterator[int]:
    """The arrays, in the order in which B makes them.

    What products take is saved, or B has computed it again. With collective matmul the gradient of
    what a pair makes is this device's piece; the others pass once more in W.
    """
    layout, again = config.layout, computes_again(remat)
    if again and not layout.has_grid and not _same_on_all(config):
        yield from (pair.x for pair in pairs)
    for pair in reversed(pairs):
        if layout.has_grid:
            made = again if pair.is_mlp else remat in ("attention", "full")
            yield from (*[pair.second] * made, pair.gradient, *[pair.taken] * again, pair.first)
        elif layout.collective_matmul:
            yield from (pair.gradient // layout.tp, pair.first)
        else:
            yield from (pair.gradient, pair.first)


def _free(config: Config, pairs: Sequence[PairBytes], again: bool) -> Iterator[int]:
    """The saved arrays that W does not read, in the order of forward."""
    layout = config.layout
    for pair in pairs:
        yield from [] if _same_on_all(config) else [pair.x]
        if pair.is_mlp and pair.first == pair.second:  # of gated units saved rows are halves
            yield from [] if again and not layout.has_grid else [pair.first]


def _same_on_all(config: Config) -> bool:
    """True if x is the same on all devices of tp: only what products take again replaces it.

    So says its type, which does not know the size of tp.
    """
    return not config.layout.sequence_parallel and not config.layout.has_grid
