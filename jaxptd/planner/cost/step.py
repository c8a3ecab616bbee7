"""The time of a step: terms of its stages, of the pipeline, of gradients and the optimizer."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxptd.costs import kernels
from jaxptd.costs.collective import ALL_GATHER
from jaxptd.costs.program import Remat
from jaxptd.costs.terms import PRODUCTS, WAITING, Term, merged, scaled, total
from jaxptd.display import Table
from jaxptd.pipeline.statistics import Durations
from jaxptd.planner.cost.collectives import HIDING, Placed, exposed_terms
from jaxptd.planner.cost.description import StepDescription, step_seconds
from jaxptd.planner.cost.layer import LayerTerms, first_terms, last_terms, layer_terms, update_terms


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The predicted time of a step.

    Args:
        seconds: the step's.
        terms: terms that add up to the step, on the stage with the most work.
    """

    seconds: float
    terms: tuple[Term, ...]

    def by_kind(self) -> dict[str, float]:
        """Seconds of each kind of term, the longest first."""
        seconds: dict[str, float] = {}
        for term in self.terms:
            seconds[term.kind] = seconds.get(term.kind, 0.0) + term.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    @property
    def bubble(self) -> float:
        """Share of the step during which the slowest stage waits for others."""
        return self._share(lambda term: term.resource == WAITING)

    @property
    def exposed(self) -> float:
        """Share of the step during which devices only wait for communication."""
        return self._share(lambda term: term.resource in ("NVLink", "network"))

    @property
    def bound(self) -> str:
        """The resource that bounds the largest share of the step."""
        names = {term.resource for term in self.terms}
        return max(sorted(names), key=lambda name: self._share(lambda t: t.resource == name))

    def _share(self, chosen: Callable[[Term], bool]) -> float:
        return total(filter(chosen, self.terms)) / self.seconds

    def table(self) -> Table:
        """A row for each term: its runs, FLOPs, bytes, rate, seconds, and what bounds it."""
        columns = ("part", "kind", "runs", "TFLOP", "GB", "rate", "s", "share", "bound by")
        rows = [
            (
                term.name,
                term.kind,
                f"{term.runs:.0f}",
                f"{term.flops / 1e12:.1f}",
                f"{term.bytes / 1e9:.1f}",
                _rate(term),
                f"{term.seconds:.4f}",
                f"{term.seconds / self.seconds:.2%}",
                term.resource,
            )
            for term in self.terms
        ]
        return Table(f"a step of {self.seconds:.3f} s", columns, rows)


def _rate(term: Term) -> str:
    if term.resource == WAITING:
        return ""
    scale, unit = (1e12, "TFLOP/s") if term.resource == PRODUCTS else (1e9, "GB/s")
    return f"{term.rate / scale:.0f} {unit}"


def step_time(description: StepDescription, collectives: Sequence[Placed]) -> StepTime:
    """Predicts a step.

    Args:
        description: model, layout, program and cluster.
        collectives: all that the step moves between devices, except messages between stages.
    """
    places = by_place(collectives)
    kinds = {kind for stage in description.stages for kind in stage}
    layers = layer_passes(description, kinds, places)
    return put_together(description, layers, end_terms(description, places), places.get("step", ()))


def put_together(
    description: StepDescription,
    layers: "Layers",
    ends: "EndTerms",
    once: Sequence[Placed],
    more: Sequence[Term] = (),
) -> StepTime:
    """Predicts a step from the terms of its layers and ends.

    Args:
        description: model, layout, program and cluster.
        layers: terms of each kind of layer.
        ends: terms per micro-batch outside layers.
        once: collectives that run once per step.
        more: other terms that run once per step.
    """
    stages = _stages(description, layers, ends)
    hosts = {"last backward": _last_backward(description, layers)}
    terms = merged(
        [
            *_pipelined(description, stages),
            *exposed_terms(description, once, hosts),
            *update_terms(description),
            *more,
        ]
    )
    return StepTime(total(terms), tuple(terms))


CollectivesByPlace = Mapping[str, Sequence[Placed]]


def by_place(collectives: Iterable[Placed]) -> CollectivesByPlace:
    """Collectives by their place in the step."""
    places: dict[str, list[Placed]] = {}
    for each in collectives:
        places.setdefault(each.place, []).append(each)
    return places


class LayerPasses(NamedTuple):
    """Terms of one layer and micro-batch, forward and backward, with their seconds.

    W is the part of backward that schedules which split it run later.
    """

    forward: list[Term]
    backward: list[Term]
    durations: Durations

    @property
    def seconds(self) -> float:
        return sum(self.durations)

    @property
    def hiding(self) -> float:
        """Seconds of the kernels that can hide collectives."""
        return total(t for t in (*self.forward, *self.backward) if t.kind in HIDING)

    def and_forward(self, more: Sequence[Term]) -> "LayerPasses":
        """Adds terms of forward to the passes."""
        F, B, W = self.durations
        return LayerPasses([*self.forward, *more], self.backward, Durations(F + total(more), B, W))

    def and_backward(self, more: Sequence[Term]) -> "LayerPasses":
        """Adds terms of backward to the passes."""
        F, B, W = self.durations
        return LayerPasses(self.forward, [*self.backward, *more], Durations(F, B + total(more), W))


class EndTerms(NamedTuple):
    """Terms of one micro-batch outside layers, on the first stage and on the last."""

    first: list[Term]
    last: list[Term]


Kind = tuple[str, Remat]  # of layers: their stack and their policy
Layers = Mapping[Kind, LayerPasses]


def layer_passes(
    description: StepDescription, kinds: Collection[Kind], places: CollectivesByPlace
) -> Layers:
    """The terms of each kind of layer, with the exposed part of their collectives."""
    passes = {}
    for stack in description.model.stacks:
        terms = layer_terms(description, stack)
        for remat in sorted(remat for name, remat in kinds if name == stack.name):
            collectives = {
                place: [each for each in placed if each.is_of(stack.name, remat)]
                for place, placed in places.items()
            }
            passes[stack.name, remat] = _passes(description, terms, remat, collectives)
    return passes


def _passes(
    description: StepDescription, terms: LayerTerms, remat: Remat, places: CollectivesByPlace
) -> LayerPasses:
    forward, backward = terms.forward, terms.backward(remat)
    inputs, weights = total(terms.input_gradients), total(terms.weight_gradients)
    before = {
        "products": total(terms.products),
        "attention": total(terms.attention),
        "layer": total(forward),
    }
    after = {
        "products": inputs + weights,
        "input gradients": inputs,
        "weight gradients": weights,
        "attention": total(terms.attention_backward),
        "layer": total(backward),
    }
    both = {name: before.get(name, 0.0) + seconds for name, seconds in after.items()}
    forward = [*forward, *exposed_terms(description, places.get("forward", ()), before)]
    backward = [
        *backward,
        *exposed_terms(description, places.get("backward", ()), after),
        *exposed_terms(description, places.get("layer", ()), both),
    ]
    later = weights + total(terms.accumulation)
    durations = Durations(total(forward), total(backward) - later, later)
    return LayerPasses(forward, backward, durations)


class _Stage(NamedTuple):
    """Terms of one micro-batch on one stage: those of its layers, and all others."""

    layers: Sequence[tuple[LayerPasses, int]]
    others: Sequence[Term]

    @property
    def durations(self) -> Durations:
        """Seconds of F, B and W; a third of the time outside layers is forward."""
        others = total(self.others)
        F, B, W = (sum(n * p.durations[i] for p, n in self.layers) for i in range(3))
        return Durations(F + others / 3, B + others * 2 / 3, W)

    @property
    def terms(self) -> list[Term]:
        """The terms of all layers, forward before backward, and the others."""
        forward = [term for p, n in self.layers for term in scaled(p.forward, n)]
        backward = [term for p, n in self.layers for term in scaled(p.backward, n)]
        return [*forward, *backward, *self.others]


def _pipelined(description: StepDescription, stages: Sequence[_Stage]) -> list[Term]:
    """Terms of all micro-batches on the slowest stage, and its waits for the others."""
    m, V = description.parallelism.micro_batches, description.parallelism.virtual_stages
    each = [stage.durations for stage in stages]
    seconds = [sum(durations) for durations in each]
    slowest = stages[seconds.index(max(seconds))]
    waiting = step_seconds(description.parallelism.schedule, each, m, V) - m * max(seconds)
    return [*scaled(slowest.terms, m), Term("bubble", "bubble", waiting, WAITING)]


def end_terms(description: StepDescription, places: CollectivesByPlace) -> EndTerms:
    """Terms of the embedding on the first stage, and of the loss on the last."""
    return EndTerms(
        [*first_terms(description), *exposed_terms(description, places.get("first", ()), {})],
        [*last_terms(description), *exposed_terms(description, places.get("last", ()), {})],
    )


def _stages(description: StepDescription, layers: Layers, ends: EndTerms) -> list[_Stage]:
    hops = _hops(description)
    others = [list(hops) for _ in range(description.parallelism.pp)]
    others[0] += ends.first
    others[-1] += ends.last
    return [
        _Stage([(layers[kind], count) for kind, count in stage.items()], extra)
        for stage, extra in zip(description.stages, others, strict=True)
    ]


def _hops(description: StepDescription) -> list[Term]:
    """A stage's messages per chunk: an activation forward, and a gradient back."""
    parallelism = description.parallelism
    if parallelism.pp == 1:
        return []
    terms = message_terms(description, inside=parallelism.gpus <= description.cluster.node_size)
    return [term.times(2 * parallelism.virtual_stages) for term in terms]


def message_terms(description: StepDescription, *, inside: bool) -> list[Term]:
    """A message between two stages; inside: they share a node."""
    parallelism, implementation = description.parallelism, description.implementation
    if implementation.sends_hidden:
        return []
    tokens = sum(description.tokens(stack) for stack in description.model.stacks)
    size = 2.0 * tokens * description.model.hidden / parallelism.col
    sharded = implementation.sends_sharded or parallelism.sequence_parallel
    sent = size / parallelism.tp if sharded else size
    terms = [kernels.message(description.cluster, sent, inside=inside).named("sends", "pp")]
    if sharded and not parallelism.sequence_parallel:
        group = parallelism.group(("tp",))
        gather = kernels.collective(description.cluster, ALL_GATHER, group, size)
        terms.append(gather.named("gathers of what was sent", "pp"))
    return terms


def _last_backward(description: StepDescription, layers: Layers) -> float:
    """Seconds of the last backward pass, during which layers' gradients can be sent."""
    first = description.stages[0]
    seconds = sum(count * total(layers[kind].backward) for kind, count in first.items())
    return seconds / description.parallelism.virtual_stages
