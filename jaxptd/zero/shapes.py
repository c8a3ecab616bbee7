"""ZeRO's state as shapes and axes, without its arrays; `shards.py` and `zero.py` have those.

Letters: L layers, Z devices along dp x cp, n elements of a block with its padding.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Self

from jaxptd.config import Config, Dtype, itemsize
from jaxptd.layout import BATCH_AXES, Axis
from jaxptd.shapes import ParamShape, Spec, StoredShape


@dataclasses.dataclass(frozen=True, eq=False)
class ShardShape:
    """Shapes of a sharded parameter: `[L, ..]` if layers are sharded one by one, else flat.

    Args:
        info: of the parameter as layers hold it.
        sizes: devices along each axis.
        lead: leading dims that are not flattened: 1 if layers are sharded one by one, else 0.
    """

    info: ParamShape
    sizes: Mapping[Axis, int]
    lead: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The canonical shape."""
        return self.info.shape

    @property
    def is_canonical(self) -> bool:
        return False

    @cached_property
    def axes(self) -> frozenset[str]:
        """The mesh axes that the parameter is sharded over."""
        return self.info.axes | {*BATCH_AXES}

    @cached_property
    def _splits(self) -> list[int]:
        """The number of blocks along each dim that is flattened."""
        dims = self.info.axes_of_dims[self.lead :]
        return [math.prod(self.sizes[Axis(axis)] for axis in axes) for axes in dims]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape that layers hold on one device, without the leading dim."""
        sizes = self.info.stored_shape[self.lead :]
        return tuple(n // split for n, split in zip(sizes, self._splits, strict=True))

    @property
    def shard_size(self) -> int:
        """Elements of one shard."""
        return -(-math.prod(self.block_shape) // math.prod(self.sizes[axis] for axis in BATCH_AXES))

    @cached_property
    def padded_size(self) -> int:
        """Elements of all shards of a block."""
        return self.shard_size * math.prod(self.sizes[axis] for axis in BATCH_AXES)

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """The global shape that the state holds."""
        return (*self.info.stored_shape[: self.lead], math.prod(self._splits) * self.padded_size)

    @property
    def spec(self) -> Spec:
        """The axes that shard each dim of the state's form."""
        axes = [axis for axes in self.info.axes_of_dims[self.lead :] for axis in axes]
        return (*self.info.spec[: self.lead], (*axes, *BATCH_AXES))


@dataclasses.dataclass(frozen=True)
class StateShapes:
    """The forms in which a state holds its parameters, and the precision of their gathers.

    Args:
        stage: 0 to 3, as a step runs it.
        infos: of the parameters.
        sizes: devices along each axis.
        dtype: that layers compute in.
        copies: whether a step casts parameters at its beginning even at stage 0.
        fetches: whether a device has a layer's parameters only while the layer runs.
        by_layer: whether shards of layers are of one layer each at stage 1, too.
        holds: whether the first micro-batch gathers layers one by one, and holds each for the step.
        reduce_in_last_microbatch: whether stage 1 reduce-scatters gradients of layers beside the
            last micro-batch.
        loops: whether layers run in a loop.
        accumulate_in_loops: whether that loop adds gradients to those of the micro-batches before.
        narrows: whether gradients of layers have the precision that layers compute in at stage 0,
            too, until they are added up.
    """

    stage: int
    infos: Mapping[str, ParamShape]
    sizes: Mapping[Axis, int]
    dtype: Dtype
    copies: bool = False
    fetches: bool = False
    by_layer: bool = False
    holds: bool = False
    reduce_in_last_microbatch: bool = False
    loops: bool = False
    accumulate_in_loops: bool = False
    narrows: bool = False

    @classmethod
    def of(cls, config: Config, infos: Mapping[str, ParamShape], *, by_layer: bool) -> Self:
        """The state of a config with these parameters, as its layout asks for it."""
        layout = config.layout
        return cls(
            config.zero,
            infos,
            layout.sizes,
            config.model.dtype,
            copies=layout.hosts_parameters,
            fetches=layout.fetches_layers,
            by_layer=by_layer,
            holds=config.holds_blocks,
            reduce_in_last_microbatch=config.scatters_last,
            loops=config.model.scan_layers,
            accumulate_in_loops=config.sums_in_loops,
            narrows=config.narrows,
        )

    @cached_property
    def stored(self) -> Mapping[str, StoredShape]:
        """Shapes and shardings of the parameters, as the state holds them."""
        if self.stage == 0:
            return self.infos
        return {n: ShardShape(info, self.sizes, self.lead(n)) for n, info in self.infos.items()}

    def is_fetched(self, name: str) -> bool:
        """True for parameters that are gathered, or copied from the host, layer by layer."""
        return self.fetches and self.infos[name].stack is not None

    def is_scattered(self, name: str) -> bool:
        """True for parameters whose gradients are reduce-scattered layer by layer."""
        return (self.stage >= 2 or self.reduce_in_last_microbatch) and self.infos[
            name
        ].stack is not None

    def is_alone(self, name: str) -> bool:
        """True for parameters of layers that are messages of their own: a loop's matrices."""
        return self.loops and bool(self.infos[name].matrix)

    def is_narrowed(self, name: str) -> bool:
        """True for parameters that are cast layer by layer, so that their gradients are narrow."""
        narrower = itemsize(self.gather_dtype(name)) < itemsize("float32")
        return self.narrows and narrower and self.infos[name].stack is not None

    def gathered_early(self, name: str) -> bool:
        """True for parameters that are gathered at the beginning of a step, not layer by layer."""
        alone = self.fetches or self.holds
        return not (alone and self.infos[name].stack is not None)

    def lead(self, name: str) -> int:
        """`ShardShape.lead` of a parameter."""
        by_layer = self.by_layer and self.infos[name].stack is not None
        return int(self.is_fetched(name) or self.is_scattered(name) or by_layer)

    def gather_dtype(self, name: str) -> Dtype:
        """The precision in which a parameter is gathered.

        A grid sums gradients inside a layer, in the precision of the parameter: float32 then.
        """
        info = self.infos[name]
        summed = info.stack is not None and Axis.ROW in info.axes
        if info.cast and not summed:
            return self.dtype
        return max(self.dtype, "float32", key=itemsize)
