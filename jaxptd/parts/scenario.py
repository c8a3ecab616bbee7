"""Describes a training step to the formulas, with the computations that its backward repeats."""

import dataclasses
from typing import NamedTuple, Self

from jaxptd.config import Config
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxptd.parts.sizes import Sizes
from jaxptd.pipeline.placement import Stages


class Recomputed(NamedTuple):
    """The computations of one layer that backward repeats, because forward did not keep them.

    Args:
        inputs: times of the all-gathers of the first products' inputs, under sequence
            parallelism.
        keys: the all-gather of keys and values of which devices make slices.
        kernel: attention, where a kernel computes it (a ring of keys and values together).
        scores: attention's scores, where no kernel computes them (RSA, blocks).
        values: the product of its probabilities with the values, where there is no kernel.
        products: the layer's products and norms, except the last product.
        last_product: a part's last product, where its output only the next layer needs, or a norm.
    """

    inputs: int = 0
    keys: bool = False
    kernel: bool = False
    scores: bool = False
    values: bool = False
    products: bool = False
    last_product: bool = False

    @property
    def nothing(self) -> bool:
        """True if layers keep all that they compute; a loop runs once what is alike for them."""
        return not (self.kernel or self.scores)

    @property
    def norms(self) -> bool:
        """True if norms run again: layers keep what entered them, as with keys."""
        return self.keys


RECOMPUTED = {
    "none": Recomputed(),
    "attention": Recomputed(kernel=True, scores=True),
    "dots": Recomputed(inputs=1, keys=True, scores=True),
    "full": Recomputed(1, keys=True, kernel=True, scores=True, values=True, products=True),
}
# Where a pipeline keeps only the input of its part of the model, all layers of the part run again.
WHOLE_PART = Recomputed(*[True] * len(Recomputed._fields))


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A training step whose collectives the formulas predict.

    Args:
        sizes: of the step.
        plan: of its pipeline; None if there is one stage.
        on_gpus: GPUs have a broadcast, and can permute in any loop.
    """

    sizes: Sizes
    plan: Stages | None = None
    on_gpus: bool = False

    @property
    def config(self) -> Config:
        return self.sizes.config

    @property
    def micro_batches(self) -> int:
        """M."""
        return self.config.train.micro_batches

    @property
    def kinds_on_tp(self) -> tuple[str, ...]:
        """Collectives that move activations: one, or with sequence parallelism its two halves."""
        halves = self.config.layout.sequence_parallel
        return (ALL_GATHER, REDUCE_SCATTER) if halves else (ALL_REDUCE,)

    def with_tokens(self, length: int, width: int | None = None) -> Self:
        """The step with sequences of so many tokens; width: their D, None: the same."""
        return dataclasses.replace(self, sizes=self.sizes.with_tokens(length, width))

    def gathering(self, again: Recomputed) -> Recomputed:
        """With the gathers for gradients of weights, beside those of products that run again."""
        for_weights = int(self.config.gathers_again)
        return again._replace(inputs=max(again.inputs, again.products + for_weights))
