"""Predicts the collectives of data parallelism and ZeRO: parameters gathered, gradients summed.

Letters: n elements of a parameter on one device (with ZeRO's padding, if ZeRO shards it), Z devices
along dp x cp.
Source: Rajbhandari et al., arXiv 1910.02054, section 7.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from jaxptd.analysis.sizes import elements_on_device
from jaxptd.analysis.traffic.scenario import Scenario
from jaxptd.config import itemsize
from jaxptd.layout import BATCH_AXES, Axis, Layout
from jaxptd.models.inventory import Stack
from jaxptd.shapes import StoredShape
from jaxptd.zero.shapes import ShardShape, StateShapes


def once_a_step(step: Scenario, zero: StateShapes) -> Iterator[Collective]:
    """ZeRO's gathers at the beginning of a step, and the sums of gradients at its end.

    A gradient has n elements, or n/Z where ZeRO shards it; it is summed over all axes that shard
    tokens but not the parameter.
    """
    layout, wide = step.config.layout, step.sizes.master_itemsize
    for name, stored in zero.stored.items():
        elements = elements_on_device(stored, layout)
        yield Collective(ALL_REDUCE, _summed_over(stored, layout), 1, elements * wide)
        if not isinstance(stored, ShardShape):
            continue
        whole = elements * math.prod(layout.sizes[axis] for axis in BATCH_AXES)
        if zero.gathered_early(name):
            yield Collective(ALL_GATHER, BATCH_AXES, 1, whole * itemsize(zero.gather_dtype(name)))
        if not zero.is_scattered(name):
            yield Collective(REDUCE_SCATTER, BATCH_AXES, 1, whole * wide)


def per_layer(step: Scenario, zero: StateShapes, stack: Stack) -> Iterator[Collective]:
    """Each layer of a stack in each micro-batch, or in the last: n reduce-scattered; n gathered.

    If fetched, n are gathered twice; if held for the step, once; else at the beginning of the step.
    """
    layout, wide = step.config.layout, step.sizes.master_itemsize
    times = stack.layers * step.config.train.micro_batches
    gathers = _gathers(step, stack) if zero.fetches else stack.layers * zero.holds
    scatters = times if zero.stage >= 2 else stack.layers * zero.last
    for message in _messages(zero, layout, stack, together=False):
        for size, elements in message.items():
            yield Collective(ALL_GATHER, BATCH_AXES, gathers, gathers * elements * size)
    for message in _messages(zero, layout, stack, together=zero.last):
        summed = scatters * sum(message.values()) * wide
        yield Collective(REDUCE_SCATTER, BATCH_AXES, scatters, summed)


def _messages(
    zero: StateShapes, layout: Layout, stack: Stack, *, together: bool
) -> Iterable[dict[int, int]]:
    """The messages of a layer: in each the elements by the bytes that one is gathered in.

    One has all parameters that are sharded alike. A loop's matrices are messages of their own; not
    `together`, as the last micro-batch scatters their gradients.
    """
    messages: dict[Any, dict[int, int]] = {}  # by axes, or by name
    for name, stored in zero.stored.items():
        if isinstance(stored, ShardShape) and stored.info.stack == stack.name:
            axes = stored.axes | {*_summed_over(stored, layout)}
            alone = zero.is_alone(name) and not together
            message = messages.setdefault(name if alone else tuple(sorted(axes)), {})
            size = itemsize(zero.gather_dtype(name))
            message[size] = message.get(size, 0) + stored.padded_size
    return messages.values()


def _gathers(step: Scenario, stack: Stack) -> int:
    """Gathers in a step that fetches layers, of a stack and all micro-batches together.

    A pipeline gathers a layer once more where its part of the model runs again, and where the
    second half of a split backward computes again what `dots` does not keep.
    """
    model, plan, layers = step.config.model, step.plan, stack.layers
    again = 0
    if plan and plan.recompute:
        again = layers
    elif plan and plan.splits and model.remat == "dots":
        most = layers if model.remat_layers is None else model.remat_layers
        again = sum(min(most, size) for size in plan.stacks[stack.name])
    return (2 * layers + again) * step.config.train.micro_batches


def _summed_over(stored: StoredShape, layout: Layout) -> tuple[Axis, ...]:
    """The axes over which a device's gradient is a partial sum."""
    tokens = (Axis.PP, Axis.DP, Axis.CP, Axis.ROW)
    sharding = (*tokens, Axis.TP) if layout.sequence_parallel else tokens
    others = (Axis(axis) for axis in stored.info.over if axis not in sharding)
    return tuple(axis for axis in (*sharding, *others) if axis not in stored.axes)
