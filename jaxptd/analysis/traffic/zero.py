"""What a training step moves to have whole parameters and gradients' sums; see `formulas.py`.

Letters: n elements of a parameter's block (where it is cut by ZeRO with its padding), Z devices
along dp x cp, L layers, M micro-batches.
Source: Rajbhandari et al., arXiv 1910.02054, section 7.
"""

import math
from collections.abc import Iterator

import jax.numpy as jnp

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from jaxptd.config import Config
from jaxptd.mesh import BATCH_AXES, Axis, Layout
from jaxptd.params import Stored
from jaxptd.pipeline.plan import Plan
from jaxptd.zero import Zero
from jaxptd.zero.shards import Shard


def at_once(config: Config, zero: Zero) -> Iterator[Collective]:
    """Once a step: what ZeRO gathers at its beginning, and what is summed at its end.

    A gradient n, or where it is cut n/Z, over all axes that cut tokens but not it.
    """
    wide = jnp.promote_types(config.model.dtype, jnp.float32).itemsize
    for name, stored in zero.stored.items():
        block = _block(stored, config.layout)
        yield Collective(ALL_REDUCE, _owed(stored, config.layout), 1, block * wide)
        if not isinstance(stored, Shard):
            continue
        whole = block * math.prod(config.layout.sizes[axis] for axis in BATCH_AXES)
        if zero.stage < 3 or not stored.info.stacked:
            yield Collective(ALL_GATHER, BATCH_AXES, 1, whole * zero.gather_dtype(name).itemsize)
        if not zero.per_layer(name):
            yield Collective(REDUCE_SCATTER, BATCH_AXES, 1, whole * wide)


def alone(config: Config, zero: Zero, plan: Plan | None) -> Iterator[Collective]:
    """Of each layer in each micro-batch: n reduce-scattered; at stage 3 n gathered twice.

    In a pipeline a layer is gathered once more where its part of the model runs again, and where
    the second half of a backward in two computes again what `dots` does not keep.
    """
    model, layout = config.model, config.layout
    times = model.num_layers * config.train.micro_batches
    gathers = _gathers(config, plan) if zero.stage == 3 else 0
    wide = jnp.promote_types(model.dtype, jnp.float32).itemsize
    lengths: dict[tuple, dict[int, int]] = {}  # of those in one message, by precision
    for name, stored in zero.stored.items():
        if isinstance(stored, Shard) and zero.per_layer(name):
            axes = stored.axes | {*_owed(stored, layout)}
            group = lengths.setdefault(tuple(sorted(axes)), {})
            size = zero.gather_dtype(name).itemsize
            group[size] = group.get(size, 0) + stored.padded
    for group in lengths.values():
        for size, length in group.items():
            yield Collective(ALL_GATHER, BATCH_AXES, gathers, gathers * length * size)
        yield Collective(REDUCE_SCATTER, BATCH_AXES, times, times * sum(group.values()) * wide)


def _gathers(config: Config, plan: Plan | None) -> int:
    """How often layers are gathered in a step at stage 3, all together."""
    model, parts = config.model, config.train.micro_batches
    again = 0
    if plan and plan.recompute:
        again = model.num_layers
    elif plan and plan.slots["between"] and model.remat == "dots":
        most = model.num_layers if model.remat_layers is None else model.remat_layers
        again = sum(min(most, size) for size in plan.sizes)
    return (2 * model.num_layers + again) * parts


def _owed(stored: Stored, layout: Layout) -> tuple[Axis, ...]:
    """Axes over which a gradient, or its part, is still to be summed."""
    tokens = (Axis.PP, Axis.DP, Axis.CP, Axis.ROW)
    cut = (*tokens, Axis.TP) if layout.sequence_parallel else tokens
    return tuple(axis for axis in cut if axis not in stored.axes)


def _block(stored: Stored, layout: Layout) -> int:
    """Elements on one device."""
    return math.prod(stored.held) // math.prod(layout.sizes[Axis(axis)] for axis in stored.axes)
