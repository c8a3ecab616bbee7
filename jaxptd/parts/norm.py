"""A norm of the residual stream: its parameters, and all that it costs; see `layers/norm.py`.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, of which a device of a
grid has m = b*T/(cp*row); D model.
"""

import dataclasses
from collections.abc import Iterator

from jaxptd.costs.collective import ALL_REDUCE, Collective
from jaxptd.costs.program import Implementation
from jaxptd.layout import Axis
from jaxptd.parts.parameters import Named, Sharding, norm
from jaxptd.parts.scenario import Scenario
from jaxptd.parts.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm.

    Args:
        hidden: D.
        statistics: of a token: 2 of LayerNorm, 1 of RMSNorm, 0 where there is no norm.
    """

    hidden: int
    statistics: int

    def parameters(self, sharding: Sharding) -> Named:
        """`w[D]`, and `b[D]` of a norm with a mean."""
        return norm(sharding, self.hidden, self.statistics)

    def kept(self, sizes: Sizes) -> int:
        """Bytes of its statistics, which backward needs."""
        return self.statistics * sizes.stream_rows * sizes.master_itemsize

    def on_grid(self, step: Scenario, *, forward: int, backward: int) -> Iterator[Collective]:
        """Mean and variance, one after the other; backward two means in one message.

        RMSNorm has a single one, forward and backward.

        Args:
            step: with the tokens of the norm.
            forward: times in all layers and micro-batches.
            backward: the same of its backward.
        """
        if not self.statistics:
            return
        size = step.sizes.rows * step.sizes.master_itemsize
        count = self.statistics * forward + backward
        scalars = self.statistics * (forward + backward)
        yield Collective(ALL_REDUCE, (Axis.COL,), count, size * scalars)

    # ---- seconds -------------------------------------------------------------------------------

    def moved_forward(self, implementation: Implementation) -> int:
        """Bytes for each number of the stream, with the sum before it and dropout's mask."""
        return implementation.stream_forward + implementation.dropout

    def moved_backward(self, implementation: Implementation) -> int:
        """Bytes of the gradients of these, and of the bias before them."""
        passes = implementation.stream_backward
        return passes + 5 * implementation.dropout + 2 * implementation.bias
