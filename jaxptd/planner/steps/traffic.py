"""This library's collectives with their places in a step, from the formulas of `analysis.traffic`.

The formulas count a whole step. This divides those of one micro-batch, per remat policy, by the
layers of each stack; what happens once per step comes from the config itself.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxptd.analysis.traffic import StepPart, parts
from jaxptd.config import Config, ModelConfig, Remat
from jaxptd.costs.collective import BROADCAST, PERMUTE, Collective
from jaxptd.costs.terms import HBM, WAITING, Term, total
from jaxptd.models.families import architecture_of
from jaxptd.models.stages import parameter_infos
from jaxptd.pipeline.placement import Stages
from jaxptd.planner.cost import Placed, StepTime
from jaxptd.planner.cost.collectives import BESIDE, HIDING, Place, Under
from jaxptd.shapes import ParamShape

NAMES = {
    "tensor": "layers",
    "ring": "ring",
    "ends": "ends",
    "zero": "parameters of layers",
    "step": "once",
}


def layer_collectives(config: Config, remat: Remat) -> Iterator[Placed]:
    """Collectives of one layer of each stack and one micro-batch, and of its ends.

    Args:
        config: for one micro-batch on the devices that share it.
        remat: what the layers recompute.
    """
    model = dataclasses.replace(config.model, remat=remat, remat_layers=None)
    config = dataclasses.replace(config, model=model)
    infos, layers = parameter_infos(config), _layers(config.model)
    for part, each in parts(config, infos, on_gpus=True, only=("tensor", "ring", "ends")):
        runs = layers[part.stack] if part.stack else 1
        place: Place = "layer" if part.stack else "last"
        yield _placed(part, each, place, _under(part, each), runs)


def _layers(model: ModelConfig) -> dict[str, int]:
    """The layers of each stack."""
    return {stack.name: stack.layers for stack in architecture_of(model).stacks}


def step_collectives(
    config: Config, infos: Mapping[str, ParamShape], plan: Stages | None
) -> Iterator[Placed]:
    """Collectives of ZeRO's layers per micro-batch, and those once per step.

    Args:
        config: of the run.
        infos: its parameters'.
        plan: its pipeline's plan or outline.
    """
    layout, m = config.layout, config.train.micro_batches
    layers = _layers(config.model)
    under: Under = "nothing" if layout.pp > 1 else "other layers"
    for part, each in parts(config, infos, plan, on_gpus=True, only=("zero", "step")):
        if part.what == "zero":
            runs = layers[part.stack or ""] * m
            yield _placed(part, each, "layer", under, runs)
        else:
            runs = 1 if "pp" in each.axes else layout.pp
            yield _placed(part, each, "step", "nothing", runs)


def _placed(part: StepPart, each: Collective, place: Place, under: Under, runs: int = 1) -> Placed:
    """A collective at its place; the formulas count `runs` runs together."""
    name = f"{NAMES[part.what]}, {each.kind} over {'+'.join(each.axes)}"
    count, size = each.count / runs, each.bytes / each.count
    return Placed(name, each.kind, each.axes, count, size, place, under, part.stack)


def _under(part: StepPart, each: Collective) -> Under:
    """The work that overlaps it: pieces overlap the work on the previous piece."""
    if part.what == "ring":
        return "attention" if each.kind == PERMUTE else "nothing"
    if part.what == "tensor" and each.kind in (PERMUTE, BROADCAST):
        return "products"
    return "nothing"


# ---- the time of a step, predicted again with the compiler's figures -----------------------------

IN_LAYERS = tuple(f"{NAMES[what]}, " for what in ("tensor", "ring", "zero"))
OUTER = frozenset({"replicas", "dp", "ep", "pp"})  # axes whose devices share no layer


class Figures(NamedTuple):
    """Figures of a compiled step for one device; a pipeline's stages are averaged.

    Args:
        bytes: arguments and temporaries.
        moved: bytes per step of kernels other than matmuls, attention and collectives.
        hidden: shares of the bytes sent that overlap matmuls or attention, by axes such as `cp+dp`.
    """

    bytes: int
    moved: float
    hidden: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled candidate.

    Args:
        figures: its step's.
        bytes: bytes on a device, including those outside the program.
        step: its time, predicted again.
    """

    figures: Figures
    bytes: int
    step: StepTime

    @property
    def hidden(self) -> float | None:
        """The least hidden share over axes that share a layer; None if nothing is sent there."""
        hidden = self.figures.hidden
        return min(
            (hidden[axes] for axes in hidden if OUTER.isdisjoint(axes.split("+"))), default=None
        )


def remade(step: StepTime, alone: StepTime, figures: Figures) -> StepTime:
    """Predicts a step again, from compiled figures.

    Kernels other than matmuls take the time of their compiled bytes. Layers' collectives are hidden
    by the compiled share, and on each link for no longer than matmuls and attention run. A
    pipeline's waits grow in proportion to its stages' work.

    Args:
        step: the first prediction.
        alone: the same with nothing overlapping the layers' collectives.
        figures: the compiled step's.
    """
    moved = sum(term.bytes for term in step.terms if _is_pass(term))
    times = figures.moved / moved if moved else 1.0
    of_layers = (term for term in alone.terms if term.name.startswith(IN_LAYERS))
    full = {(term.name, term.resource): term.seconds for term in of_layers}
    exposed = _exposed(step, full, figures.hidden)
    terms = []
    for term in step.terms:
        key = term.name, term.resource
        if _is_pass(term):
            term = term._replace(seconds=times * term.seconds, bytes=times * term.bytes)
        elif key in exposed:
            term = term._replace(seconds=exposed[key])
        terms.append(term)
    working = sum(t.seconds for t in step.terms if t.resource != WAITING)
    longer = sum(t.seconds for t in terms if t.resource != WAITING) / working
    terms = [t._replace(seconds=longer * t.seconds) if t.resource == WAITING else t for t in terms]
    return StepTime(total(terms), tuple(terms))


def _is_pass(term: Term) -> bool:
    """True for passes over memory: kernels other than matmuls."""
    return term.resource == HBM and not term.flops


def _exposed(
    step: StepTime, full: Mapping[tuple[str, str], float], hidden: Mapping[str, float]
) -> dict[tuple[str, str], float]:
    """Exposed seconds of layers' collectives, over axes that the compiler's figures list."""
    shares = {(t.name, t.resource): hidden[t.kind] for t in step.terms if t.kind in hidden}
    known = {key: seconds for key, seconds in full.items() if key in shares}
    work = BESIDE * sum(term.seconds for term in step.terms if term.kind in HIDING)
    beside = {key: seconds * shares[key] for key, seconds in known.items()}
    of_link = {link: sum(s for (_, on), s in beside.items() if on == link) for _, link in known}
    fits = {link: min(1.0, work / s) if s else 1.0 for link, s in of_link.items()}
    return {key: seconds - beside[key] * fits[key[1]] for key, seconds in known.items()}
