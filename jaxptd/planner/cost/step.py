"""The time of a step: terms of its stages, of the pipeline, of gradients and the optimizer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxptd.analysis.collective import ALL_GATHER
from jaxptd.display import Table
from jaxptd.planner.cost import ends, links
from jaxptd.planner.cost.collectives import Placed
from jaxptd.planner.cost.exposed import exposed_terms
from jaxptd.planner.cost.layer import LayerTerms, layer_terms
from jaxptd.planner.cost.pipeline import pipelined
from jaxptd.planner.cost.setting import Remat, Setting
from jaxptd.planner.cost.terms import PRODUCTS, WAITING, Term, merged, scaled, total


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The predicted time of a step.

    Args:
        seconds: of the step.
        terms: whose seconds are the step's, on the stage with most work.
    """

    seconds: float
    terms: tuple[Term, ...]

    def by_kind(self) -> dict[str, float]:
        """Seconds of each kind of term, the longest first."""
        found: dict[str, float] = {}
        for term in self.terms:
            found[term.kind] = found.get(term.kind, 0.0) + term.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

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


def step_time(setting: Setting, collectives: Sequence[Placed]) -> StepTime:
    """Predicts a step.

    Args:
        setting: model, layout, program and cluster.
        collectives: all that the step moves between devices, except messages between stages.
    """
    places: dict[str, list[Placed]] = {}
    for each in collectives:
        places.setdefault(each.place, []).append(each)
    layers = layer_passes(setting, places)
    stages = _stages(setting, places, layers)
    hosts = {"last backward": _last_backward(setting, layers)}
    terms = merged(
        [
            *_pipelined(setting, stages),
            *exposed_terms(setting, places.get("step", ()), hosts),
            *ends.update_terms(setting),
        ]
    )
    return StepTime(total(terms), tuple(terms))


class Passes(NamedTuple):
    """Terms of one layer and micro-batch, forward and backward."""

    forward: list[Term]
    backward: list[Term]

    @property
    def seconds(self) -> float:
        return total(self.forward) + total(self.backward)


Kind = tuple[str, Remat]  # of layers: their stack, and what they compute again
Layers = Mapping[Kind, Passes]


def layer_passes(setting: Setting, places: Mapping[str, Sequence[Placed]]) -> Layers:
    """The terms of each kind of layer, with what is exposed of their collectives."""
    kinds = {kind for stage in setting.stages for kind in stage}
    found = {}
    for stack in setting.model.stacks:
        terms = layer_terms(setting, stack)
        for remat in sorted(remat for name, remat in kinds if name == stack.name):
            own = {
                place: [each for each in placed if each.is_of(stack.name, remat)]
                for place, placed in places.items()
            }
            found[stack.name, remat] = _passes(setting, terms, remat, own)
    return found


def _passes(
    setting: Setting, terms: LayerTerms, remat: Remat, places: Mapping[str, Sequence[Placed]]
) -> Passes:
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
    return Passes(
        [*forward, *exposed_terms(setting, places.get("forward", ()), before)],
        [
            *backward,
            *exposed_terms(setting, places.get("backward", ()), after),
            *exposed_terms(setting, places.get("layer", ()), both),
        ],
    )


class _Stage(NamedTuple):
    """Terms of one micro-batch on one stage: those of its layers, and all others."""

    layers: Sequence[tuple[Passes, int]]
    others: Sequence[Term]

    @property
    def seconds(self) -> float:
        return sum(count * each.seconds for each, count in self.layers) + total(self.others)

    @property
    def terms(self) -> list[Term]:
        """The terms of all layers, forward before backward, and the others."""
        forward = [term for p, n in self.layers for term in scaled(p.forward, n)]
        backward = [term for p, n in self.layers for term in scaled(p.backward, n)]
        return [*forward, *backward, *self.others]


def _pipelined(setting: Setting, stages: Sequence[_Stage]) -> list[Term]:
    """Terms of all micro-batches on the slowest stage, and its waiting for the others."""
    m, V = setting.spread.micro_batches, setting.spread.virtual_stages
    seconds = [stage.seconds for stage in stages]
    slowest = stages[seconds.index(max(seconds))]
    waiting = pipelined(seconds, m, V) - m * max(seconds)
    return [*scaled(slowest.terms, m), Term("bubble", "bubble", waiting, WAITING)]


def _stages(
    setting: Setting, places: Mapping[str, Sequence[Placed]], layers: Layers
) -> list[_Stage]:
    """The stages: the first has the embedding, the last the loss."""
    hops = _hops(setting)
    others = [list(hops) for _ in range(setting.spread.pp)]
    others[0] += [*ends.first_terms(setting), *exposed_terms(setting, places.get("first", ()), {})]
    others[-1] += [*ends.last_terms(setting), *exposed_terms(setting, places.get("last", ()), {})]
    return [
        _Stage([(layers[kind], count) for kind, count in stage.items()], extra)
        for stage, extra in zip(setting.stages, others, strict=True)
    ]


def _hops(setting: Setting) -> list[Term]:
    """Messages of a stage for each chunk: an activation on, and a gradient back."""
    spread, program = setting.spread, setting.program
    if spread.pp == 1 or program.sends_hidden:
        return []
    size = 2.0 * sum(setting.tokens(stack) for stack in setting.model.stacks) * setting.model.hidden
    size /= spread.col
    sharded = program.sends_sharded or spread.sequence_parallel
    inside = spread.gpus <= setting.cluster.node_size
    sent = size / spread.tp if sharded else size
    terms = [links.message(setting.cluster, sent, inside=inside).named("sends")]
    if sharded and not spread.sequence_parallel:
        group = spread.group(("tp",))
        gather = links.collective(setting.cluster, ALL_GATHER, group, size)
        terms.append(gather.named("gathers of what was sent"))
    return [term.times(2 * spread.virtual_stages).named(term.name, "pp") for term in terms]


def _last_backward(setting: Setting, layers: Layers) -> float:
    """Seconds of the backward pass in which gradients of layers can be sent: the last one's."""
    first = setting.stages[0]
    seconds = sum(count * total(layers[kind].backward) for kind, count in first.items())
    return seconds / setting.spread.virtual_stages
