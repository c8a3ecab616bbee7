"""What a training step must move, by formula; on a grid, with `formulas_grid.py`.

`comms` counts what it does move. Between the stages of a pipeline: `formulas_pipeline.py`; between
data parallel devices, parameters and their gradients: `formulas_zero.py`.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence (T/cp of them on one
device), D model, M micro-batches, L layers.
Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198; Li et al., arXiv
2105.13120; Liu et al., arXiv 2310.01889.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.traffic.grid import inside, on_grid
from jaxptd.analysis.traffic.pipeline import between_stages
from jaxptd.analysis.traffic.zero import alone, at_once
from jaxptd.config import Config
from jaxptd.mesh import Axis, Layout
from jaxptd.params import ParamInfo, Stored
from jaxptd.pipeline.plan import Plan
from jaxptd.zero import Zero

# What backward moves again, per layer, because `model.remat` does not keep it:
# without sequence parallelism all-reduces, with it (all-gathers, reduce-scatters).
_AGAIN = {
    "none": (0, 0, 0),
    "attention": (0, 0, 0),
    "dots": (0, 2, 0),
    "full": (1, 2, 1),
    "part": (2, 2, 2),  # of a pipeline, all of it, also what no layer after it needs
}
# With collective matmul: its rounds of n-1 hops, of four forward and six backward.
_ROUNDS_AGAIN = {"none": 0, "attention": 0, "dots": 0, "full": 3, "part": 4}
# Of the rings of one layer's forward pass: of k and v together, and of RSA's two.
_RINGS_AGAIN = {"none": (0, 0), "dots": (0, 1), "attention": (1, 1), "full": (1, 2), "part": (1, 2)}


def expected(
    config: Config,
    infos: Mapping[str, ParamInfo],
    plan: Plan | None = None,
    *,
    native: bool = False,
) -> Iterator[Collective]:
    """The collectives of one training step. Axes of size 1 are left out.

    What the stages of a pipeline do by themselves is added up over them.

    Args:
        config: of the run.
        infos: of its parameters.
        plan: of its pipeline, if it has several stages.
        native: the devices are GPUs: they have a broadcast, and permute in any loop.
    """
    sizes = config.layout.sizes
    grid = config.layout.has_grid
    stacks = _stacks(config, plan)
    moved = on_grid(config, stacks, native=native) if grid else _one_way(config, stacks)
    layers: Iterable[Collective] = itertools.chain(moved, _ring(config, stacks))
    if config.layout.pp > 1 and not native:
        layers = _gathered(layers, config.layout)
    zero = Zero(config.layout.zero, infos, sizes, jnp.dtype(config.model.dtype))
    layers = itertools.chain(layers, alone(config, zero, plan))
    norm = _norm(config, zero.stored)
    step = itertools.chain(_documents(config), _ends(config), at_once(config, zero), norm)
    between = between_stages(config, infos, plan) if plan else ()
    for each in itertools.chain(layers, _of_all_stages(step, config.layout), between):
        axes = tuple(str(axis) for axis in each.axes if sizes[Axis(axis)] > 1)
        if axes and each.count:
            yield dataclasses.replace(each, axes=axes)


def _stacks(config: Config, plan: Plan | None) -> list[tuple[str, int]]:
    """What is computed again, and by how many layers: a policy, or "part", of a pipeline's part."""
    if plan and plan.recompute:
        return [("part", config.model.num_layers)]
    sizes = plan.sizes if plan else (config.model.num_layers,)
    return [stack for size in sizes for stack in config.model.remats(size)]


def _of_all_stages(step: Iterable[Collective], layout: Layout) -> Iterator[Collective]:
    for each in step:
        stages = 1 if Axis.PP in each.axes else layout.pp
        yield dataclasses.replace(each, count=each.count * stages, bytes=each.bytes * stages)


def _gathered(layers: Iterable[Collective], layout: Layout) -> Iterator[Collective]:
    """Permutes as the all-gathers that stand for them, see `collectives.permute`."""
    for each in layers:
        devices = math.prod(layout.sizes[Axis(axis)] for axis in each.axes)
        permute = each.kind == PERMUTE
        yield (
            Collective(ALL_GATHER, each.axes, each.count, each.bytes * devices) if permute else each
        )


def _tokens(config: Config) -> int:
    """b*T/cp."""
    sequences = config.train.global_batch_size // (config.layout.dp * config.train.micro_batches)
    return sequences * config.model.seq_length // config.layout.cp


def _ring(config: Config, stacks: Sequence[tuple[str, int]]) -> Iterator[Collective]:
    """Keys and values, a device's part of each, ring-1 hops forward, and backward with gradients.

    A part is b*T*D/(cp*tp), or b*T*D/(cp*row*col) with the heads as padded. A gradient travels in
    float32.
    """
    model, layout, parts = config.model, config.layout, config.train.micro_batches
    dtype = jnp.dtype(model.dtype)
    parts_of_sequence = layout.ring_size // layout.cp
    size = _tokens(config) * inside(config) // (parts_of_sequence * layout.tp * layout.col)
    axes = (Axis.CP, Axis.ROW) if layout.ring_size > layout.cp else (Axis.CP,)
    rings = 2 if layout.ring == "rsa" else 1  # of keys and of values, or both in one permute
    size *= 2 // rings
    again = sum(count * _RINGS_AGAIN[remat][rings - 1] for remat, count in stacks)
    hops = parts * (layout.ring_size - 1)
    forward, gradients = (hops * (n * rings * model.num_layers) for n in (2, 1))
    forward += hops * again
    yield Collective(PERMUTE, axes, forward, forward * size * dtype.itemsize)
    wide = jnp.promote_types(dtype, jnp.float32).itemsize
    yield Collective(PERMUTE, axes, gradients, gradients * size * wide)


def _documents(config: Config) -> Iterator[Collective]:
    """Where they are kept apart, their numbers once a step, on every device."""
    tokens = config.train.micro_batches * _tokens(config) * config.layout.cp
    yield Collective(ALL_GATHER, (Axis.CP,), int(config.data.documents == "apart"), 4 * tokens)


def _one_way(config: Config, stacks: Sequence[tuple[str, int]]) -> Iterator[Collective]:
    """Of b*T/cp*D each: four a layer (or four and four), two beside: embedding and output layer.

    With collective matmul a layer's are rounds of tp-1 hops of a part each. And of the loss a
    maximum and two sums a token.
    """
    model, parts, tp = config.model, config.train.micro_batches, config.layout.tp
    size = _tokens(config) * model.hidden_size * jnp.dtype(model.dtype).itemsize
    cut, steps = config.layout.sequence_parallel, config.layout.collective_matmul
    for again, kind in enumerate((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)):
        if (kind != ALL_REDUCE) == cut:
            layers = sum(count * (4 + _AGAIN[remat][again]) for remat, count in stacks)
            layers = 0 if steps else layers
            times = parts * (layers + 2)
            yield Collective(kind, (Axis.TP,), times, times * size)
    rounds = sum(count * (10 + _ROUNDS_AGAIN[remat]) for remat, count in stacks) if steps else 0
    hops = parts * rounds * (tp - 1)
    yield Collective(PERMUTE, (Axis.TP,), hops, hops * size // tp)
    wide = jnp.promote_types(model.dtype, jnp.float32).itemsize
    yield Collective(ALL_REDUCE, (Axis.TP,), 2 * parts, 3 * parts * _tokens(config) * wide)


def _ends(config: Config) -> Iterator[Collective]:
    """The count of targets and the loss, over the axes that cut them."""
    wide = jnp.promote_types(config.model.dtype, jnp.float32).itemsize
    count = jnp.zeros((), bool).sum().dtype.itemsize
    yield Collective(ALL_REDUCE, (Axis.DP, Axis.CP), 1, count)
    yield Collective(ALL_REDUCE, (Axis.PP, Axis.DP, Axis.CP, Axis.ROW), 1, wide)


def _norm(config: Config, stored: Mapping[str, Stored]) -> Iterator[Collective]:
    """The scalars of the gradients' norm: of those cut alike, one."""
    wide = jnp.promote_types(config.model.dtype, jnp.float32).itemsize
    for cut in {each.axes for each in stored.values()}:
        yield Collective(ALL_REDUCE, tuple(Axis(axis) for axis in sorted(cut)), 1, wide)
