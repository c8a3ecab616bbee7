"""Predicts all collectives of a training step; the files beside this one predict its sections.

`count.py` counts the collectives that a step does run.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, Collective
from jaxptd.analysis.traffic.grid import on_grid
from jaxptd.analysis.traffic.one_way import one_way
from jaxptd.analysis.traffic.optimizers import whole_matrices
from jaxptd.analysis.traffic.pipeline import as_gathers, between_stages
from jaxptd.analysis.traffic.ring import ring
from jaxptd.analysis.traffic.scenario import Scenario
from jaxptd.analysis.traffic.zero import once_a_step, per_layer
from jaxptd.config import Config
from jaxptd.layout import Axis, Layout
from jaxptd.models.families import family_of
from jaxptd.optimizers.moments import state_shapes
from jaxptd.pipeline.plan import Plan
from jaxptd.shapes import ParamShape, StoredShape

COUNT = 4  # bytes of a number of targets


def expected(
    config: Config,
    infos: Mapping[str, ParamShape],
    plan: Plan | None = None,
    *,
    on_gpus: bool = False,
) -> Iterator[Collective]:
    """The collectives of one training step, without axes of size 1.

    In a pipeline the collectives that a stage runs by itself are added up over the stages.

    Args:
        config: of the run.
        infos: of its parameters.
        plan: of its pipeline, if it has several stages.
        on_gpus: GPUs have a broadcast, and can permute in any loop.
    """
    step, sizes = Scenario(config, plan, on_gpus), config.layout.sizes
    zero = state_shapes(config, infos)
    ends = itertools.chain(
        _documents(step),
        _loss(step),
        once_a_step(step, zero),
        _norm(step, zero.stored),
        whole_matrices(step, zero.stored),
    )
    between = between_stages(step, plan, infos) if plan else ()
    layers = itertools.chain(_layers(step), per_layer(step, zero))
    for each in itertools.chain(layers, _of_all_stages(ends, config.layout), between):
        axes = tuple(str(axis) for axis in each.axes if sizes[Axis(axis)] > 1)
        if axes and each.count:
            yield dataclasses.replace(each, axes=axes)


def _layers(step: Scenario) -> Iterable[Collective]:
    """Tensor parallelism and ring attention."""
    moved = on_grid(step) if step.config.layout.has_grid else one_way(step)
    layers = itertools.chain(moved, ring(step))
    return layers if step.on_gpus or not step.plan else as_gathers(layers, step.config.layout)


def _of_all_stages(ends: Iterable[Collective], layout: Layout) -> Iterator[Collective]:
    """Adds up collectives that every stage runs; one over the stages counts once."""
    for each in ends:
        stages = 1 if Axis.PP in each.axes else layout.pp
        yield dataclasses.replace(each, count=each.count * stages, bytes=each.bytes * stages)


def _documents(step: Scenario) -> Iterator[Collective]:
    """The documents' numbers of whole sequences, if attention keeps documents apart."""
    config = step.config
    samples = config.train.micro_batches * step.sizes.sequences
    for length in family_of(config.model).lengths_with_documents(config):
        yield Collective(ALL_GATHER, (Axis.CP,), 1, 4 * samples * length)


def _loss(step: Scenario) -> Iterator[Collective]:
    """The numbers of targets and the losses, each over the axes that shard it."""
    model = step.config.model
    family = family_of(model)
    losses, fields = family.losses(model), family.fields(step.config)
    counts = {term.targets for term in losses.values()}
    axes = (Axis.PP, Axis.DP, Axis.CP, Axis.ROW)
    number = len(losses)
    for field in counts:
        batch_axes = (Axis.DP, Axis.CP) if fields[field].length else (Axis.DP,)
        yield Collective(ALL_REDUCE, batch_axes, 1, COUNT)
    yield Collective(ALL_REDUCE, axes, number, number * step.sizes.master_itemsize)


def _norm(step: Scenario, stored: Mapping[str, StoredShape]) -> Iterator[Collective]:
    """The gradients' norm: one scalar for all parameters sharded over the same axes."""
    for axes in {each.axes for each in stored.values()}:
        over = tuple(Axis(axis) for axis in sorted(axes))
        yield Collective(ALL_REDUCE, over, 1, step.sizes.master_itemsize)
