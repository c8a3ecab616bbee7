"""The interface between the cost model and predictions of what a program moves.

A step takes a list of `Placed` collectives. For published programs they follow from the program's
record (`jaxptd.planner.programs`); for jaxptd they come from the formulas that equal its jaxpr
(`jaxptd.analysis.traffic`), each with its place.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from jaxptd.costs import kernels
from jaxptd.costs.terms import Term
from jaxptd.planner.cost.description import StepDescription

# `forward`, `backward`, and `layer` (either): per layer and micro-batch; `first` and `last`: at the
# ends of the model, per micro-batch; `step`: once per step.
Place = Literal["forward", "backward", "layer", "first", "last", "step"]
# What overlaps it: nothing, the matmuls of the same pass, those of weight or input gradients,
# attention's kernel, matmuls and attention of other layers, the layer's whole pass, or all of a
# step's last backward.
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


class Placed(NamedTuple):
    """Collectives of one kind, with their place in the step.

    name: for tables.
    kind: XLA's name, one of `jaxptd.costs.collective`.
    axes: those over which it runs, as in `Parallelism.group`.
    count: executions at its place.
    bytes: size of the whole array, per execution.
    place: how often a step runs it.
    under: what hides it.
    stack: the stack of its layers; None: all.
    remat: the policy of its layers; None: any.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    count: float  # type: ignore[assignment]  # overrides the method of tuples
    bytes: float
    place: Place
    under: Under = "nothing"
    stack: str | None = None
    remat: str | None = None

    def is_of(self, stack: str, remat: str) -> bool:
        """True if such layers run it."""
        return self.stack in (None, stack) and self.remat in (None, remat)


# ---- seconds of collectives that nothing hides ---------------------------------------------------

HIDING = ("products", "attention")  # kinds of terms that can hide collectives
BESIDE = 0.9  # share of a kernel's time that can hide a collective, which starts later


def exposed_terms(
    description: StepDescription, collectives: Iterable[Placed], hosts: Mapping[str, float]
) -> list[Term]:
    """A term for each collective, with the seconds that nothing hides.

    Args:
        description: the step.
        collectives: those of one place.
        hosts: seconds of what may hide them, by the names of `collectives.Under`.
    """
    groups: dict[str, list[tuple[Placed, Term]]] = {}
    for each in collectives:
        groups.setdefault(each.under, []).append((each, collective_term(description, each)))
    return [
        term for under, members in groups.items() for term in _left(members, hosts.get(under, 0.0))
    ]


def collective_term(description: StepDescription, each: Placed) -> Term:
    """The term of a collective that nothing overlaps."""
    group = description.parallelism.group(each.axes)
    term = kernels.collective(description.cluster, each.kind, group, each.bytes)
    return term.times(each.count).named(each.name, "+".join(each.axes))


def _left(members: Sequence[tuple[Placed, Term]], host: float) -> list[Term]:
    """Shortens terms that overlap the same kernels by what these hide, each by its share.

    What one of several micro-batches sends overlaps only that one's kernels.
    """
    seconds = sum(term.seconds for _, term in members)
    runs = min(1.0, max(each.count for each, _ in members))
    left = max(0.0, seconds - BESIDE * runs * host) / seconds if seconds else 0.0
    return [term._replace(seconds=term.seconds * left) for _, term in members]
