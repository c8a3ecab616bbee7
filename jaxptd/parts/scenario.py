"""Describes a training step to the formulas, with the computations that backward repeats."""

import dataclasses
from typing import NamedTuple, Self

from jaxptd.config import Config
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxptd.parts.sizes import Sizes
from jaxptd.pipeline.placement import Stages


class Recomputed(NamedTuple):
    """The computations of one layer that backward repeats, because their results were not saved.

    Args:
        inputs: all-gathers of the first matmuls' inputs, under sequence parallelism.
        keys: the all-gather of keys and values that devices compute in slices.
        kernel: attention, where a kernel computes it (one ring of keys and values).
        scores: attention's scores, where no kernel computes them (RSA, blocks).
        values: the matmul of probabilities with values, where there is no kernel.
        products: the layer's matmuls and norms, except the last matmul.
        last_product: a part's last matmul, whose output only the next layer or a norm needs.
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
        """True if layers save all that they compute; a loop then runs shared work only once."""
        return not (self.kernel or self.scores)

    @property
    def norms(self) -> bool:
        """True if norms run again: layers save their inputs, as with keys."""
        return self.keys


RECOMPUTED = {
    "none": Recomputed(),
    "attention": Recomputed(kernel=True, scores=True),
    "dots": Recomputed(inputs=1, keys=True, scores=True),
    "full": Recomputed(1, keys=True, kernel=True, scores=True, values=True, products=True),
}
# Where a pipeline saves only the input of its part of the model, all layers of the part run again.
WHOLE_PART = Recomputed(*[True] * len(Recomputed._fields))


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A training step whose collectives the formulas predict.

    Args:
        sizes: the step's sizes.
        plan: its pipeline's plan; None with one stage.
        on_gpus: whether it runs on GPUs, which can broadcast, and permute in any loop.
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
        """The step with sequences of `length` tokens; width: their D, None: the same."""
        return dataclasses.replace(self, sizes=self.sizes.with_tokens(length, width))

    def gathering(self, again: Recomputed) -> Recomputed:
        """Adds the gathers for weight gradients to those of matmuls that run again."""
        for_weights = int(self.config.gathers_again)
        return again._replace(inputs=max(again.inputs, again.products + for_weights))
