"""Predicts the collectives of parameters, gradients and the optimizer."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxptd.config import OptimizerName, itemsize
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.layout import BATCH_AXES, Axis, Layout
from jaxptd.optimizers.moments import factors, is_orthogonalised
from jaxptd.parts.architecture import Stack
from jaxptd.parts.scenario import Scenario
from jaxptd.parts.sizes import elements_on_device
from jaxptd.shapes import ParamShape, StoredShape
from jaxptd.zero.plan import ShardShape, StateShapes

# ---- data parallelism and ZeRO: gathers of parameters, reductions of gradients -------------------
# Letters: n elements of a parameter on one device (with ZeRO's padding, if ZeRO shards it), Z
# devices along the batch's axes.
# Source: Rajbhandari et al., arXiv 1910.02054, section 7.


def state_collectives(step: Scenario, zero: StateShapes) -> Iterator[Collective]:
    """ZeRO's gathers at the beginning of a step, and the reductions of gradients at its end.

    A gradient has n elements, or n/Z where ZeRO shards it; it is summed over all axes that shard
    tokens but not the parameter.
    """
    layout, wide = step.config.layout, step.sizes.master_itemsize
    for name, stored in zero.stored.items():
        elements = elements_on_device(stored, layout)
        summed = _summed_over(stored, layout)
        if zero.plans[name].sums_replicas:
            summed = tuple(axis for axis in summed if axis != Axis.REPLICAS)
        if not stored.info.frozen:
            yield Collective(ALL_REDUCE, summed, 1, elements * wide)
        if not isinstance(stored, ShardShape):
            continue
        shard, along, plan = elements * stored.parts, stored.along, zero.plans[name]
        yield Collective(ALL_GATHER, stored.split, 1, shard * itemsize(plan.gather_dtype))
        if not stored.info.frozen:
            yield Collective(REDUCE_SCATTER, stored.split, 1, shard * wide)
        whole = shard * stored.devices
        if plan.gather == "step":
            yield Collective(ALL_GATHER, along, 1, whole * itemsize(plan.gather_dtype))
        if plan.reduce == "end" and not stored.info.frozen:
            yield Collective(REDUCE_SCATTER, along, 1, whole * wide)


def expert_counts(step: Scenario, zero: StateShapes) -> Iterator[Collective]:
    """Gathers of the counts of each expert's tokens, for metrics."""
    layout, wide = step.config.layout, step.sizes.master_itemsize
    for stored in zero.stored.values():
        if stored.info.counts and not stored.info.frozen:
            whole = elements_on_device(stored.info, layout)
            if isinstance(stored, ShardShape):
                gathered = elements_on_device(stored, layout) * stored.devices * stored.parts
                yield Collective(ALL_GATHER, stored.holders, 1, gathered * wide)
            if Axis.PP in stored.info.axes:
                yield Collective(ALL_GATHER, (Axis.PP,), 1, whole * layout.pp * wide)


def per_layer(step: Scenario, zero: StateShapes, stack: Stack) -> Iterator[Collective]:
    """Reduce-scatters and gathers of n elements for each layer, in each micro-batch or the last.

    Fetched layers are gathered twice, layers held for the step once, others at the step's
    beginning.
    """
    layout, wide = step.config.layout, step.sizes.master_itemsize
    plan, layers, many = zero.layers, stack.layers, step.config.train.micro_batches
    held = {"first_microbatch": layers}.get(plan.gather, 0)
    gathers = _gathers(step, stack) if plan.gather == "layer" else held
    scatters = {"end": 0, "last_microbatch": layers, "each_layer": layers * many}[plan.reduce]
    for along, message in _messages(zero, layout, stack, together=False):
        for size, elements in message.items():
            yield Collective(ALL_GATHER, along, gathers, gathers * elements * size)
    at_last = plan.reduce == "last_microbatch"
    for along, message in _messages(zero, layout, stack, together=at_last, sent=True):
        summed = scatters * sum(message.values()) * wide
        yield Collective(REDUCE_SCATTER, along, scatters, summed)
        if plan.sums_replicas:
            shards = math.prod(layout.sizes[axis] for axis in along)
            yield Collective(ALL_REDUCE, (Axis.REPLICAS,), scatters, summed // shards)


def _messages(
    zero: StateShapes, layout: Layout, stack: Stack, *, together: bool, sent: bool = False
) -> Iterable[tuple[tuple[Axis, ...], dict[int, int]]]:
    """The collectives of a layer: the axes of each, and its elements by bytes of an element.

    Parameters that are sharded alike share one. A loop's matrices are sent separately unless
    `together`, as when the last micro-batch scatters their gradients.

    sent: counts gradients, which frozen parameters do not have.
    """
    messages: dict[Any, tuple[tuple[Axis, ...], dict[int, int]]] = {}  # by axes, or by name
    for name, stored in zero.stored.items():
        if isinstance(stored, ShardShape) and stored.info.stack == stack.name:
            axes = stored.axes | {*_summed_over(stored, layout)}
            plan = zero.plans[name]
            if (together and plan.reduce == "end") or (sent and stored.info.frozen):
                continue  # experts that no other device has, or no gradient
            alone = plan.own_collective and not together
            alike = name if alone else (stored.along, tuple(sorted(axes)))
            _, message = messages.setdefault(alike, (stored.along, {}))
            size = itemsize(plan.gather_dtype)
            message[size] = message.get(size, 0) + stored.padded_size
    return messages.values()


def _gathers(step: Scenario, stack: Stack) -> int:
    """Number of gathers of a stack in a step that fetches layers, over all micro-batches.

    A pipeline gathers a layer once more where its part of the model runs again, and where the
    second half of a split backward recomputes what `dots` does not save.
    """
    model, plan, layers = step.config.model, step.plan, stack.layers
    again = 0
    if plan and plan.recompute:
        again = layers
    elif plan and plan.splits and model.remat == "dots":
        most = layers if model.recomputing is None else model.recomputing
        again = sum(min(most, size) for size in plan.stacks[stack.name])
    return (2 * layers + again) * step.config.train.micro_batches


def _summed_over(stored: StoredShape, layout: Layout) -> tuple[Axis, ...]:
    """The axes over which a device's gradient is a partial sum."""
    tokens = (Axis.PP, *BATCH_AXES, Axis.ROW)
    sharding = (*tokens, Axis.TP) if layout.sequence_parallel else tokens
    others = (Axis(axis) for axis in stored.info.over if axis not in sharding)
    return tuple(axis for axis in (*sharding, *others) if axis not in stored.axes)


# ---- optimizers that need whole matrices ---------------------------------------------------------
# Letters: S matrices of a stage, R rows, C columns, L layers of a stage, Z devices along dp x ep x
# cp, n elements of a device's block of a layer.


def whole_matrices(step: Scenario, stored: Mapping[str, StoredShape]) -> Iterator[Collective]:
    """All-to-alls of whole matrices, or all-reduces of their rows and columns."""
    moved = _MOVED.get(step.config.optimizer.name)
    if moved is not None:
        for each in stored.values():
            if each.info.optimized:
                yield from moved(step, each)


# ---- Muon ----------------------------------------------------------------------------------------


def _dealt(step: Scenario, stored: StoredShape) -> Iterator[Collective]:
    """All-to-alls of a stack, there and back: over the batch's axes if sharded, then a cut dim's.

    A stack is dealt out in equal shares, so it is padded to a multiple of the devices.
    """
    if not is_orthogonalised(stored):
        return
    layout, wide, info = step.config.layout, step.sizes.master_itemsize, stored.info
    layers = info.stored_shape[0] // layout.pp
    block = elements_on_device(info, layout) // layers
    if isinstance(stored, ShardShape):
        share = -(-layers // (stored.devices * stored.parts))
        yield Collective(ALL_TO_ALL, stored.holders, 2, 2 * share * stored.padded_size * wide)
        layers = share
    parts = _stack(info, layout) * layout.pp // info.stored_shape[0]
    stack, block = layers * parts, block // parts
    for axes in reversed(_cuts(info)):
        devices = _devices(axes, layout)
        share = -(-stack // devices)
        moved = share * devices * block
        yield Collective(ALL_TO_ALL, axes, 2, 2 * moved * wide)
        stack, block = share, block * devices


def _cuts(info: ParamShape) -> list[tuple[Axis, ...]]:
    """The axes of each row or column dim that is sharded."""
    dims = zip(info.axes_of_dims, info.matrix, strict=True)
    return [tuple(map(Axis, axes)) for axes, kind in dims if axes and kind != "s"]


# ---- Adafactor -----------------------------------------------------------------------------------


def _summed(step: Scenario, stored: StoredShape) -> Iterator[Collective]:
    """All-reduces over rows, columns and the means of rows, and of the step's squares."""
    layout, wide = step.config.layout, step.sizes.master_itemsize
    shards = tuple(map(Axis, stored.holders))
    stack = _stack(stored.info, layout)
    everywhere = _axes(stored.info, "rc")
    yield Collective(ALL_REDUCE, (*everywhere, *shards), 1, stack * wide)
    if not stored.info.matrix:
        return
    rows, columns = (elements_on_device(mean, layout) for mean in factors(stored))
    yield Collective(ALL_REDUCE, (*_axes(stored.info, "c"), *shards), 1, rows * wide)
    yield Collective(ALL_REDUCE, (*_axes(stored.info, "r"), *shards), 1, columns * wide)
    yield Collective(ALL_REDUCE, _axes(stored.info, "r"), 1, stack * wide)


def _kinds(info: ParamShape) -> str:
    layers = int(info.stack is not None)
    return info.matrix or "s" * layers + "c" * (len(info.shape) - layers)


def _axes(info: ParamShape, kinds: str) -> tuple[Axis, ...]:
    """The axes that shard dims of these kinds."""
    dims = zip(info.axes_of_dims, _kinds(info), strict=True)
    return tuple(Axis(axis) for axes, kind in dims if kind in kinds for axis in axes)


def _stack(info: ParamShape, layout: Layout) -> int:
    """Number of matrices, or vectors, on one device."""
    sizes = zip(info.stored_shape, _kinds(info), strict=True)
    every = math.prod(n for n, kind in sizes if kind == "s")
    return every // _devices(_axes(info, "s"), layout)


def _devices(axes: tuple[Axis, ...], layout: Layout) -> int:
    return math.prod(layout.sizes[axis] for axis in axes)


_MOVED: Mapping[OptimizerName, Callable[[Scenario, StoredShape], Iterator[Collective]]] = {
    "muon": _dealt,
    "adafactor": _summed,
}
