"""The seam between the cost model and whoever knows what a program moves.

A step takes a list of `Placed` collectives: for published programs they follow from the record of
the program (`jaxptd.planner.programs`); for jaxptd they are those of the formulas that
equal its jaxpr (`jaxptd.analysis.traffic`), each given its place.
"""

import dataclasses
from typing import Literal

# `forward`, `backward`, and `layer` where it is either: of each layer and micro-batch; `first` and
# `last`: of the ends of the model, each micro-batch; `step`: once a step.
Place = Literal["forward", "backward", "layer", "first", "last", "step"]
# What runs at the same time: nothing, the products of the same pass, those of weight or input
# gradients, attention's kernel, products and attention of other layers, the whole pass of the
# layer, or all of a step's last backward.
Under = Literal[
    "nothing",
    "products",
    "weight gradients",
    "input gradients",
    "attention",
    "other layers",
    "layer",
    "last backward",
]


@dataclasses.dataclass(frozen=True)
class Placed:
    """Collectives of one kind, with their place in the step.

    Args:
        name: for tables.
        kind: XLA's name, one of `jaxptd.analysis.collective`.
        axes: over which it runs; those of `Spread.group`.
        count: executions at its place.
        bytes: of the whole array, of one execution.
        place: how often a step runs it.
        under: what hides it.
        stack: of the layers that it is of; None: of all.
        remat: what these layers compute again; None: whatever it is.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    count: float
    bytes: float
    place: Place
    under: Under = "nothing"
    stack: str | None = None
    remat: str | None = None

    def is_of(self, stack: str, remat: str) -> bool:
        """True if such layers have it."""
        return self.stack in (None, stack) and self.remat in (None, remat)
