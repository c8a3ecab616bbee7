"""ZeRO's state as shapes and axes, without its arrays; `shards.py` and `zero.py` have those.

Letters: L layers, Z devices along dp x cp, n elements of a block with its padding.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Self

from jaxptd.config import Config
from jaxptd.layout import BATCH_AXES, Axis
from jaxptd.shapes import ParamShape, Spec, StoredShape
from jaxptd.zero.plan import ParamPlan, layers_plan, plan_of


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
    """The forms in which a state holds its parameters.

    Args:
        infos: of the parameters.
        sizes: devices along each axis.
        plans: what a step does with each parameter.
        layers: the plan of the layers' matrices.
    """

    infos: Mapping[str, ParamShape]
    sizes: Mapping[Axis, int]
    plans: Mapping[str, ParamPlan]
    layers: ParamPlan

    @classmethod
    def of(cls, config: Config, infos: Mapping[str, ParamShape]) -> Self:
        """The state of a config with these parameters."""
        plans = {name: plan_of(config, info) for name, info in infos.items()}
        return cls(infos, config.layout.sizes, plans, layers_plan(config))

    @cached_property
    def stored(self) -> Mapping[str, StoredShape]:
        """Shapes and shardings of the parameters, as the state holds them."""
        if self.layers.shards == "none":
            return self.infos
        return {n: ShardShape(info, self.sizes, self.lead(n)) for n, info in self.infos.items()}

    def lead(self, name: str) -> int:
        """`ShardShape.lead` of a parameter."""
        return int(self.plans[name].shards == "layer")
