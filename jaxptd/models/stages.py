"""A model's parameters on a layout, and a pipeline's plan, which assigns them to stages.

All follows from the architecture: no model or array is built.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeVar

from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.layout import Axis
from jaxptd.models.families import architecture_of
from jaxptd.parts.parameters import LayoutSharding
from jaxptd.pipeline.placement import chunk_rows, rows_of_layers, stack_sizes
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import make_schedule, outline
from jaxptd.pipeline.table import Schedule
from jaxptd.shapes import ParamShape

Shape = TypeVar("Shape", bound=ParamShape)


def make_plan(config: Config) -> Plan:
    """Plans what each stage of the pipeline does at each tick.

    Raises:
        UserError: the schedule does not exist, or the model's layers do not fill it.
    """
    return _plan(config, make_schedule)


def outline_plan(config: Config) -> Plan:
    """Plans only where layers are, without the schedule's table of ticks.

    Raises:
        UserError: as `make_plan`, except for errors that only a table shows.
    """
    return _plan(config, outline)


def _plan(config: Config, make: Callable[..., Schedule]) -> Plan:
    """Plans the schedule that `make` returns."""
    model, layout = config.model, config.layout
    try:
        schedule = make(
            layout.schedule,
            stages=layout.pp,
            micro_batches=config.train.micro_batches,
            virtual_stages=layout.virtual_stages,
        )
    except UserError as error:
        raise UserError(in_terms_of_config(str(error))) from error
    parts = architecture_of(model).stacks
    layers = {stack.name: stack.layers for stack in parts}
    given = layout.stage_layers and model.in_periods(layout.stage_layers)
    stacks = stack_sizes(layers, schedule, given, period=model.period)
    # From a part's input routers would choose again; with policies of layers their choice is saved.
    routes = any(part.routes for stack in parts for part in stack.parts)
    recompute = model.remat == "full" and model.remat_layers is None and not routes
    return Plan(schedule, stacks, recompute=recompute, first=model.recomputing)


def in_terms_of_config(sentence: str) -> str:
    """Replaces the schedule's size name at a sentence's beginning by the config's field."""
    fields = {"stages": "layout.pp", "micro_batches": "train.micro_batches"}
    words = re.sub(r"\b(stages|micro_batches)(?==)", lambda name: fields[name[1]], sentence)
    return f"layout.{words}"


@dataclasses.dataclass(frozen=True)
class StagePlacement:
    """Shards parameters over stages: maps a shape without a pipeline to one with it.

    Each layer is on the stage that holds its part of the model. Any other parameter is cut into
    equal blocks along its longest dim that splits over the stages; without such a dim, every stage
    holds all of it.

    Args:
        plan: the pipeline's plan.
        sizes: devices along each axis.
    """

    plan: Plan
    sizes: Mapping[Axis, int]

    def __call__(self, info: Shape) -> Shape:
        if info.stack is None:
            return sharded_over(info, Axis.PP, self.sizes)
        count, rows = self._rows[info.stack]
        shape, spec = (count, *info.stored_shape[1:]), (Axis.PP, *info.spec[1:])
        return dataclasses.replace(info, stored_shape=shape, spec=spec, rows=rows)

    @cached_property
    def _rows(self) -> dict[str, tuple[int, tuple[int, ...] | None]]:
        """For each stack, its rows on all stages and each layer's row; None: the layer's number."""
        schedule, by_stack = self.plan.schedule, {}
        for stack, sizes in self.plan.stacks.items():
            count, rows = chunk_rows(schedule, sizes)[-1], rows_of_layers(schedule, sizes)
            every = tuple(range(schedule.stages * count))
            by_stack[stack] = (len(every), None if rows == every else rows)
        return by_stack


def sharded_over(info: Shape, axis: Axis, sizes: Mapping[Axis, int]) -> Shape:
    """Also shards a parameter over `axis`, along its longest local dim that splits, if any.

    Args:
        info: a parameter not yet sharded over the axis.
        axis: a mesh axis.
        sizes: devices along each axis.
    """
    axes = info.axes_of_dims
    splits = [math.prod(sizes[Axis(each)] for each in over) for over in axes]
    local = [n // split for n, split in zip(info.stored_shape, splits, strict=True)]
    able = [dim for dim, n in enumerate(local) if n % sizes[axis] == 0]
    if not able:
        return info
    dim = max(able, key=local.__getitem__)
    spec = (*info.spec[:dim], (*axes[dim], axis) if axes[dim] else axis, *info.spec[dim + 1 :])
    return dataclasses.replace(info, spec=spec)


def stage_dim(info: ParamShape) -> int | None:
    """The dim of a parameter that is sharded over stages, or None."""
    return next((i for i, axes in enumerate(info.axes_of_dims) if Axis.PP in axes), None)


def parameter_infos(config: Config) -> dict[str, ParamShape]:
    """Shapes and axes of the parameters of a config's model, as layers hold them.

    Parameters of a kind that is named alike in all models have the model's names.

    Raises:
        UserError: the model's layers do not fill the pipeline.
    """
    model, layout = config.model, config.layout
    sharding = LayoutSharding(layout)
    vocab = model.padded_vocab(sharding.padded)
    infos = dict(architecture_of(model).parameters(sharding, vocab))
    if layout.pp == 1:
        return infos
    place = StagePlacement(outline_plan(config), layout.sizes)
    return {name: place(info) for name, info in infos.items()}
