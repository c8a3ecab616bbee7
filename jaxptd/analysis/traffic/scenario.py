"""Describes a training step to the formulas, with the computations that its backward repeats."""

import dataclasses
from typing import NamedTuple

from jaxptd.analysis.sizes import Sizes
from jaxptd.config import Config
from jaxptd.pipeline.plan import Plan


class Recomputed(NamedTuple):
    """The computations of one layer that backward repeats, because forward did not keep them.

    Args:
        gathers: the all-gathers of the two column products' inputs, under sequence parallelism.
        kernel: attention, where a kernel computes it (a ring of keys and values together).
        scores: attention's scores, where no kernel computes them (RSA, blocks).
        values: the product of its probabilities with the values, where there is no kernel.
        products: the layer's products and norms, except the last product.
        last_product: the product whose output only the next layer needs.
    """

    gathers: bool = False
    kernel: bool = False
    scores: bool = False
    values: bool = False
    products: bool = False
    last_product: bool = False

    @property
    def row_products(self) -> int:
        """Row-parallel products that run again, of the two in a layer."""
        return self.products + self.last_product


RECOMPUTED = {
    "none": Recomputed(),
    "attention": Recomputed(kernel=True, scores=True),
    "dots": Recomputed(gathers=True, scores=True),
    "full": Recomputed(gathers=True, kernel=True, scores=True, values=True, products=True),
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
    """

    config: Config
    plan: Plan | None = None
    on_gpus: bool = False

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.config)

    @property
    def stacks(self) -> list[tuple[Recomputed, int]]:
        """Layers by the computations that backward repeats: (Recomputed, number of layers)."""
        model = self.config.model
        if self.plan and self.plan.recompute:
            return [(WHOLE_PART, model.num_layers)]
        counts = self.plan.sizes if self.plan else (model.num_layers,)
        return [(RECOMPUTED[remat], n) for count in counts for remat, n in model.remats(count)]
