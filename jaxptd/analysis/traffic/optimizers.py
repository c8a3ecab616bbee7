"""Predicts the collectives of optimizers that look at whole matrices.

Letters: S matrices of a stage, R rows, C columns, L layers of a stage, Z devices along dp x cp, n
elements of a device's block of a layer.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from jaxptd.analysis.collective import ALL_REDUCE, ALL_TO_ALL, Collective
from jaxptd.analysis.sizes import elements_on_device
from jaxptd.analysis.traffic.scenario import Scenario
from jaxptd.config import OptimizerName
from jaxptd.layout import BATCH_AXES, Axis, Layout
from jaxptd.optimizers.moments import factors, is_orthogonalised
from jaxptd.shapes import ParamShape, StoredShape
from jaxptd.zero.shapes import ShardShape


def whole_matrices(step: Scenario, stored: Mapping[str, StoredShape]) -> Iterator[Collective]:
    """Matrices dealt out and brought back, or sums over their rows and columns."""
    moved = _MOVED.get(step.config.optimizer.name)
    if moved is not None:
        for each in stored.values():
            yield from moved(step, each)


# ---- Muon ----------------------------------------------------------------------------------------


def _dealt(step: Scenario, stored: StoredShape) -> Iterator[Collective]:
    """All-to-alls of a stack there and back: over dp x cp if it is sharded, then for each cut dim.

    A stack is dealt out in equal shares, so it is filled up to a multiple of the devices.
    """
    if not is_orthogonalised(stored):
        return
    layout, wide, info = step.config.layout, step.sizes.master_itemsize, stored.info
    layers = info.stored_shape[0] // layout.pp
    block = elements_on_device(info, layout) // layers
    if isinstance(stored, ShardShape):
        devices = _devices(BATCH_AXES, layout)
        share = -(-layers // devices)
        yield Collective(ALL_TO_ALL, BATCH_AXES, 2, 2 * share * stored.padded_size * wide)
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
    """Sums over rows, over columns, over the means of rows, and of the squares of the step."""
    layout, wide = step.config.layout, step.sizes.master_itemsize
    shards = BATCH_AXES if isinstance(stored, ShardShape) else ()
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
    """Matrices, or vectors, of one stage."""
    sizes = zip(info.stored_shape, _kinds(info), strict=True)
    return math.prod(n for n, kind in sizes if kind == "s") // (layout.pp if info.stack else 1)


def _devices(axes: tuple[Axis, ...], layout: Layout) -> int:
    return math.prod(layout.sizes[axis] for axis in axes)


_MOVED: Mapping[OptimizerName, Callable[[Scenario, StoredShape], Iterator[Collective]]] = {
    "muon": _dealt,
    "adafactor": _summed,
}
