"""The sums over documents that the loss of pairs needs: their costs. The layer is its namesake.

Letters: B sequences of a micro-batch, K documents of a sequence, M micro-batches.
"""

import dataclasses
from collections.abc import Iterator

from jaxptd.config.preference import pairs_of
from jaxptd.costs.collective import ALL_REDUCE, Collective
from jaxptd.layout import SEQUENCE_AXES, Axis
from jaxptd.parts.ends import End
from jaxptd.parts.scenario import Scenario


@dataclasses.dataclass(frozen=True)
class PairSums(End):
    """What the texts of pairs gain, and their sizes, added up over the devices of a sequence."""

    def collectives(self, step: Scenario) -> Iterator[Collective]:
        """An all-reduce of two numbers of each document, 2*b*K."""
        config, sizes = step.config, step.sizes
        documents = 2 * pairs_of(config.padded_model.seq_length)
        size = 2 * sizes.sequences * documents * sizes.master_itemsize
        axes = (*SEQUENCE_AXES, *[Axis.ROW] * config.layout.has_grid)
        M = step.micro_batches
        yield Collective(ALL_REDUCE, axes, M, M * size)
