"""Predicts all collectives of a training step, from those of its sections.

`count.py` counts the collectives that a step runs.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from jaxptd.analysis.traffic.state import (
    expert_counts,
    per_layer,
    state_collectives,
    whole_matrices,
)
from jaxptd.config import Config, itemsize
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
    subtract,
)
from jaxptd.display import Table, html_of
from jaxptd.layout import BATCH_AXES, SAMPLE_AXES, SEQUENCE_AXES, Axis, Layout
from jaxptd.models.families import architecture_of, family_of, sizes_of
from jaxptd.parts.architecture import Architecture
from jaxptd.parts.scenario import Scenario
from jaxptd.parts.sizes import elements_on_device
from jaxptd.pipeline.placement import Stages
from jaxptd.pipeline.plan import Plan
from jaxptd.shapes import ParamShape, StoredShape
from jaxptd.zero.plan import StateShapes

# ---- between a pipeline's stages -----------------------------------------------------------------
# Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model.


def stage_messages(step: Scenario, plan: Plan, architecture: Architecture) -> Iterator[Collective]:
    """Messages with activations and their gradients, at each hop of the plan.

    Each array of x is b*T*D over all devices that shard it.
    """
    hops = sum(int(taken.sum()) for taken in plan.hops.taken.values())
    for size in architecture.streams(step.sizes):
        yield Collective(PERMUTE, (Axis.PP,), hops, hops * size)


def unstacked_collectives(step: Scenario, zero: StateShapes) -> Iterator[Collective]:
    """Collectives of parameters outside layers: embeddings, last norm, and what all layers read.

    They are gathered before the first tick; their gradients are reduce-scattered after the last.
    """
    layout, wide = step.config.layout, step.sizes.master_itemsize
    for name, info in zero.infos.items():
        if Axis.PP in info.axes and info.stack is None:
            whole = elements_on_device(info, layout) * layout.pp
            narrow = itemsize(zero.plans[name].gather_dtype)
            yield Collective(ALL_GATHER, (Axis.PP,), 1, whole * narrow)
            if not zero.infos[name].frozen:
                yield Collective(REDUCE_SCATTER, (Axis.PP,), 1, whole * wide)


def as_gathers(layers: Iterable[Collective], layout: Layout) -> Iterator[Collective]:
    """Replaces permutes by the all-gathers that CPUs run instead, see `collectives.permute`."""
    for each in layers:
        devices = math.prod(layout.sizes[Axis(axis)] for axis in each.axes)
        gather = Collective(ALL_GATHER, each.axes, each.count, each.bytes * devices)
        yield gather if each.kind == PERMUTE else each


# ---- the ways of counting, side by side ----------------------------------------------------------

TITLES = {
    "jaxpr": "one training step, from the jaxpr",
    "compiled": "one training step, from the compiled HLO",
    "formula": "one training step, by the formula",
    "per_layer": "of which one layer (of each stack), forward and backward, all micro-batches",
}


@dataclasses.dataclass(frozen=True, repr=False)
class CommsReport:
    """Collectives by kind and axes, one list per entry of `TITLES`.

    Args:
        layout: the step's.
        devices: a description.
        jaxpr: those of the program as traced.
        compiled: those of XLA's program; None if it was not compiled.
        formula: those that the config implies.
        per_layer: in the jaxpr, for one more layer in each stack.
    """

    layout: Layout
    devices: str
    jaxpr: list[Collective]
    compiled: list[Collective] | None
    formula: list[Collective]
    per_layer: list[Collective]

    @property
    def as_formula(self) -> bool:
        """True if the program moves what the formula predicts."""
        return subtract(self.jaxpr, self.formula) == []

    @property
    def titles(self) -> list[str]:
        """The names in `TITLES` that were counted."""
        return [name for name in TITLES if getattr(self, name) is not None]

    @property
    def verdict(self) -> str:
        return f"the jaxpr {'moves' if self.as_formula else 'does NOT move'} what the formula says"

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {str(axis): size for axis, size in self.layout.sizes.items()}

    def as_dict(self) -> dict[str, Any]:
        """The report as in JSON."""
        counts = {name: getattr(self, name) for name in self.titles}
        rows = {name: [row.as_dict(self.sizes) for row in each] for name, each in counts.items()}
        return {"mesh": self.sizes, **rows}

    def table(self, name: str) -> Table:
        """The collectives of one of `titles`."""
        columns = ("collective", "axes", "executions", "bytes", "ring bytes sent")
        rows = [
            (row.kind, " x ".join(row.axes), row.count, row.bytes, row.wire_bytes(self.sizes))
            for row in getattr(self, name)
        ]
        return Table(TITLES[name], columns, rows)

    def __repr__(self) -> str:
        head = f"{self.layout} on {self.devices}; {self.verdict}"
        return "\n".join([head, str(self.table("jaxpr"))])

    def _repr_html_(self) -> str:
        head = f"{self.layout} on {self.devices}; {self.verdict}"
        return html_of(head, *(self.table(name) for name in self.titles))


# ---- the formula of a training step --------------------------------------------------------------

COUNT = 4  # bytes of the number of targets


What = Literal["tensor", "ring", "ends", "zero", "stages", "step"]
WHATS: tuple[What, ...] = get_args(What)


class StepPart(NamedTuple):
    """The part of a step in which a collective runs.

    Args:
        what: tensor (tensor parallelism or the grid, inside layers), ring (ring attention, and rows
            of the next strip of an image), ends (embeddings, output layers and the loss, in each
            micro-batch), zero (gathers and reduce-scatters layer by layer), stages (between the
            stages of a pipeline), or step (once a step).
        stack: the layers' stack; None outside layers.
    """

    what: What
    stack: str | None = None


def expected(
    config: Config,
    infos: Mapping[str, ParamShape],
    plan: Stages | None = None,
    *,
    on_gpus: bool = False,
) -> Iterator[Collective]:
    """The collectives of one training step: those of all `parts`; same arguments."""
    return (each for _, each in parts(config, infos, plan, on_gpus=on_gpus))


def parts(
    config: Config,
    infos: Mapping[str, ParamShape],
    plan: Stages | None = None,
    *,
    on_gpus: bool = False,
    only: Collection[What] = WHATS,
) -> Iterator[tuple[StepPart, Collective]]:
    """The collectives of each part of one training step, without axes of size 1.

    They cover all layers and micro-batches. In a pipeline the collectives that a stage runs by
    itself are added up over the stages.

    Args:
        config: of the run.
        infos: its parameters'.
        plan: its pipeline's, if it has several stages.
        on_gpus: whether it runs on GPUs, which can broadcast, and permute in any loop.
        only: parts to predict.
    """
    step, sizes = Scenario(sizes_of(config), plan, on_gpus), config.layout.sizes
    for part, collectives in _all_axes(step, infos):
        for each in collectives if part.what in only else ():
            axes = tuple(str(axis) for axis in each.axes if sizes[Axis(axis)] > 1)
            if axes and each.count:
                yield part, Collective(each.kind, axes, each.count, each.bytes)


def _all_axes(
    step: Scenario, infos: Mapping[str, ParamShape]
) -> Iterator[tuple[StepPart, Iterable[Collective]]]:
    """Each part with its collectives, over axes of any size."""
    layout, zero = step.config.layout, StateShapes.of(step.config, infos)
    architecture = architecture_of(step.config.padded_model)
    for stack in architecture.stacks:
        yield StepPart("tensor", stack.name), _in_loops(step, stack.collectives(step))
        yield StepPart("ring", stack.name), _in_loops(step, stack.along_cp(step))
        yield StepPart("zero", stack.name), per_layer(step, zero, stack)
    yield StepPart("ends"), _in_loops(step, architecture.at_ends(step))
    if step.plan:
        if isinstance(step.plan, Plan):  # an outline has no hops
            yield StepPart("stages"), stage_messages(step, step.plan, architecture)
        yield StepPart("step"), unstacked_collectives(step, zero)
    yield StepPart("step"), _of_all_stages(_once(step, zero), layout)


def _in_loops(step: Scenario, collectives: Iterable[Collective]) -> Iterable[Collective]:
    """Collectives of a micro-batch as they run in a pipeline's loops."""
    if step.on_gpus or not step.plan:
        return collectives
    return as_gathers(collectives, step.config.layout)


def _once(step: Scenario, zero: StateShapes) -> Iterator[Collective]:
    """Collectives that each stage runs once a step."""
    yield from _documents(step)
    yield from _loss(step)
    yield from state_collectives(step, zero)
    yield from _norm(step, zero.stored)
    yield from whole_matrices(step, zero.stored)
    yield from expert_counts(step, zero)


def _of_all_stages(ends: Iterable[Collective], layout: Layout) -> Iterator[Collective]:
    """Adds up collectives over stages; one that spans all stages counts once."""
    for each in ends:
        stages = 1 if Axis.PP in each.axes else layout.pp
        yield dataclasses.replace(each, count=each.count * stages, bytes=each.bytes * stages)


def _documents(step: Scenario) -> Iterator[Collective]:
    """All-gathers of whole sequences' document numbers, if attention masks by document.

    With `layout.balance: tokens` also of positions.
    """
    config = step.config
    samples, arrays = config.train.micro_batches * step.sizes.sequences, 1
    arrays += config.layout.places_tokens
    for length in family_of(config.model).lengths_with_documents(config):
        yield Collective(ALL_GATHER, SEQUENCE_AXES, arrays, arrays * 4 * samples * length)


def _loss(step: Scenario) -> Iterator[Collective]:
    """All-reduces of target counts and losses, each over the axes that shard it."""
    model = step.config.model
    family = family_of(model)
    losses, fields = family.losses(model), family.fields(step.config)
    counts = {term.targets for term in losses.values()}
    axes: tuple[Axis, ...] = (Axis.PP, *BATCH_AXES, Axis.ROW)
    if architecture_of(model).of_images and step.config.layout.sequence_parallel:
        axes = (*axes, Axis.TP)  # shards images, whose logits no other device holds
    number = sum(term.trained for term in losses.values())
    for field in counts:
        batch_axes = BATCH_AXES if fields[field].length else SAMPLE_AXES
        yield Collective(ALL_REDUCE, batch_axes, 1, COUNT)
    yield Collective(ALL_REDUCE, axes, number, number * step.sizes.master_itemsize)


def _norm(step: Scenario, stored: Mapping[str, StoredShape]) -> Iterator[Collective]:
    """All-reduces of the gradient norm: a scalar for all parameters sharded over the same axes."""
    for axes in dict.fromkeys(each.axes for each in stored.values() if each.info.optimized):
        over = tuple(Axis(axis) for axis in sorted(axes))
        yield Collective(ALL_REDUCE, over, 1, step.sizes.master_itemsize)
