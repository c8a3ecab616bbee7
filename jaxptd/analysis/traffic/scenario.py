"""Describes a training step to the formulas, with the computations that its backward repeats."""

import dataclasses
from typing import NamedTuple

from jaxptd.analysis.sizes import Sizes
from jaxptd.config import Config
from jaxptd.models.architecture import Stack
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
        last_product: the last product, whose output only the next layer needs, or a norm.
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

    def row_products(self, sublayers: int) -> int:
        """Second products of a layer's pairs that run again."""
        return (sublayers - 1) * self.products + self.last_product


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
        config: of the run.
        plan: of its pipeline; None if there is one stage.
        on_gpus: GPUs have a broadcast, and can permute in any loop.
        length: tokens in a sequence; None: in those of the last stack.
        width: D without padding; None: that of the model.
    """

    config: Config
    plan: Stages | None = None
    on_gpus: bool = False
    length: int | None = None
    width: int | None = None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.config, self.length, self.width)

    def of_stack(self, stack: Stack) -> "Scenario":
        """The step with the sizes of the sequences of a stack."""
        return dataclasses.replace(self, length=stack.tokens, width=stack.hidden)

    def with_tokens(self, length: int) -> "Scenario":
        """The step with the sizes of sequences of so many tokens."""
        return dataclasses.replace(self, length=length)

    def recomputed(self, stack: Stack) -> list[tuple[Recomputed, int]]:
        """Layers of a stack that are alike: (what backward repeats, number of layers)."""
        if self.plan and self.plan.recompute:
            return [(WHOLE_PART, stack.layers)]
        counts = self.plan.stacks[stack.name] if self.plan else (stack.layers,)
        remats = (each for count in counts for each in self.config.model.remats(count))
        rows = [(self._gathering(RECOMPUTED[remat]), layers) for remat, layers in remats]
        if not stack.norms_sums:
            return rows
        # The last sum enters a norm of the same layer.
        return [(again._replace(last_product=again.products), n) for again, n in rows]

    def _gathering(self, again: Recomputed) -> Recomputed:
        """With the gathers for gradients of weights, beside those of products that run again."""
        for_weights = int(self.config.gathers_again)
        return again._replace(inputs=max(again.inputs, again.products + for_weights))

    @property
    def embeddings(self) -> int:
        """Forward passes of a micro-batch's embedding.

        A pipeline differentiates it at a tick of its own, and a norm there needs its input again.
        """
        return 2 if self.plan and self.sizes.architecture.first_norm else 1
