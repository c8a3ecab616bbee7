"""What a training step must move, by formula. `comms` counts what it does move.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence (T/cp of them on one
device), D model, M micro-batches, L layers.
Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198; Li et al., arXiv
2105.13120; Liu et al., arXiv 2310.01889.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxptd.config import Config
from jaxptd.mesh import Axis, Layout
from jaxptd.params import ParamInfo

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
PERMUTE = "collective-permute"


@dataclasses.dataclass(frozen=True)
class Collective:
    """How often a step runs one kind of collective over one set of axes, and its bytes in all."""

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int

    def wire_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes that each device sends if the collective runs as a ring."""
        devices = math.prod(sizes[axis] for axis in self.axes)
        if self.kind in (PERMUTE, "collective-broadcast"):
            return self.bytes
        return (2 if self.kind == ALL_REDUCE else 1) * self.bytes * (devices - 1) // devices

    def as_dict(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "wire_bytes": self.wire_bytes(sizes)}


# What backward moves again, per layer, because `model.remat` does not keep it:
# without sequence parallelism all-reduces, with it (all-gathers, reduce-scatters).
_AGAIN = {"none": (0, 0, 0), "attention": (0, 0, 0), "dots": (0, 2, 0), "full": (1, 2, 1)}
# Of the rings of one layer's forward pass: of k and v together, and of RSA's two.
_RINGS_AGAIN = {"none": (0, 0), "dots": (0, 1), "attention": (1, 1), "full": (1, 2)}


def expected(config: Config, infos: Mapping[str, ParamInfo]) -> Iterator[Collective]:
    """The collectives of one training step over dp x cp x tp. Axes of size 1 are left out."""
    sizes = config.layout.sizes
    parts = (_activations(config), _ring(config), _loss(config), _gradients(config, infos))
    for each in itertools.chain(*parts):
        axes = tuple(str(axis) for axis in each.axes if sizes[Axis(axis)] > 1)
        if axes and each.count:
            yield dataclasses.replace(each, axes=axes)


def _tokens(config: Config) -> int:
    """b*T/cp."""
    sequences = config.train.global_batch_size // (config.layout.dp * config.train.micro_batches)
    return sequences * config.model.seq_length // config.layout.cp


def _ring(config: Config) -> Iterator[Collective]:
    """Keys and values, b*T*D/(cp*tp) each, cp-1 hops forward, and backward again with gradients.

    A gradient travels in float32. Documents kept apart are numbered once a step, on every device.
    """
    model, layout, parts = config.model, config.layout, config.train.micro_batches
    dtype = jnp.dtype(model.dtype)
    size = _tokens(config) * model.hidden_size // layout.tp
    together, alone = _RINGS_AGAIN[model.remat]
    if layout.ring == "rsa":  # a ring of keys and one of values
        again, rings = alone, 2
    else:  # both in one permute
        again, rings, size = together, 1, 2 * size
    hops = parts * model.num_layers * (layout.cp - 1)
    forward, gradients = hops * (2 * rings + again), hops * rings
    yield Collective(PERMUTE, (Axis.CP,), forward, forward * size * dtype.itemsize)
    wide = jnp.promote_types(dtype, jnp.float32).itemsize
    yield Collective(PERMUTE, (Axis.CP,), gradients, gradients * size * wide)
    if config.data.documents == "apart":
        yield Collective(ALL_GATHER, (Axis.CP,), 1, 4 * parts * _tokens(config) * layout.cp)


def _activations(config: Config) -> Iterator[Collective]:
    """Of b*T/cp*D each: four a layer (or four and four), two beside: embedding and output layer."""
    model, parts = config.model, config.train.micro_batches
    size = _tokens(config) * model.hidden_size * jnp.dtype(model.dtype).itemsize
    reduce_again, gather_again, scatter_again = _AGAIN[model.remat]

    def times(kind: str, a_layer: int, beside: int) -> Collective:
        count = parts * (model.num_layers * a_layer + beside)
        return Collective(kind, (Axis.TP,), count, count * size)

    if config.layout.sequence_parallel:
        yield times(ALL_GATHER, 4 + gather_again, 2)
        yield times(REDUCE_SCATTER, 4 + scatter_again, 2)
    else:
        yield times(ALL_REDUCE, 4 + reduce_again, 2)


def _loss(config: Config) -> Iterator[Collective]:
    """A maximum and two sums a token over tp; over dp and cp the count of targets and the loss."""
    wide = jnp.promote_types(config.model.dtype, jnp.float32).itemsize
    parts = config.train.micro_batches
    yield Collective(ALL_REDUCE, (Axis.TP,), 2 * parts, 3 * parts * _tokens(config) * wide)
    count = jnp.zeros((), bool).sum().dtype.itemsize
    yield Collective(ALL_REDUCE, (Axis.DP, Axis.CP), 2, count + wide)


def _gradients(config: Config, infos: Mapping[str, ParamInfo]) -> Iterator[Collective]:
    """Every gradient once over the axes that cut tokens; and the scalar of the norm over tp."""
    wide = jnp.promote_types(config.model.dtype, jnp.float32).itemsize
    layout: Layout = config.layout
    for info in infos.values():
        block = math.prod(info.held) // math.prod(layout.sizes[Axis(axis)] for axis in info.axes)
        over_tp = layout.sequence_parallel and Axis.TP not in info.axes
        axes = (Axis.DP, Axis.CP, *((Axis.TP,) if over_tp else ()))
        yield Collective(ALL_REDUCE, axes, 1, block * wide)
    yield Collective(ALL_REDUCE, (Axis.TP,), 1, wide)
