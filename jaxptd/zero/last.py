"""Gradients of layers that are reduce-scattered in the last micro-batch only.

Stage 1 adds up whole gradients over the micro-batches and sends the sums once. After the last
micro-batch there is nothing left to send them beside. So in it each layer's gradients are added to
those before and sent at once, while other layers compute (`prefetching.py`):

    begin_step         w[=] -- all-gather --> w[====]
    before the last    dw[====] added to sum[====]
    the last           sum[====] + dw[====] -- reduce_scattered --> sum[=]    (`sums.py`)

Its passes are compiled a second time for that.
"""

from typing import Any

import jax

from jaxptd.zero.gathering import is_gatherable
from jaxptd.zero.sums import with_wide_sums


def waits_for_last(params: Any) -> bool:
    """True if gradients of any parameter are reduce-scattered in the last micro-batch only."""
    return any(map(_waits, jax.tree.leaves(params, is_leaf=is_gatherable)))


def before_last(params: Any) -> Any:
    """`params` for the micro-batches before the last: such parameters are blocks, as at stage 1."""

    def block(leaf: Any) -> Any:
        return with_wide_sums(leaf.block) if leaf.summed else leaf.block

    return jax.tree.map(
        lambda leaf: block(leaf) if _waits(leaf) else leaf, params, is_leaf=is_gatherable
    )


def _waits(leaf: Any) -> bool:
    return is_gatherable(leaf) and leaf.last
