"""ZeRO: state that data parallel devices would duplicate, sharded over them.

From stage 1 on, the state (parameters, moments) is held in shards (`shards.py`). The stages differ
in how a step treats the layers' parameters w. Parameters outside the layers (embeddings, the last
norm, those that all layers read) are treated as at stage 1. `[=]` is a device's shard, `[====]` the
block that all Z shards make up, dw its gradient of one micro-batch:

    stage 1  begin_step  w[=] -- all-gather --> w[====]
             forward     reads w[====]
             backward    reads w[====], adds dw[====] to a sum
             end_step    sum[====] -- reduce-scatter --> sum[=]

    stage 2  begin_step  w[=] -- all-gather --> w[====]
             forward     reads w[====]
             backward    reads w[====]; dw[====] -- reduce_scattered --> dw[=], added to a sum

             with one micro-batch and layers in a loop:
             forward     w[=] -- gathered --> w[====], read and kept for backward

    stage 3  forward     w[=] -- gathered --> w[====], read and freed
             backward    w[=] -- regathered --> w[====], read and freed;
                         dw[====] -- reduce_scattered --> dw[=], added to a sum

Gathers move the precision that layers compute in; gradients are summed in float32. Arrows with the
name of a function of `gathering.py` carry all parameters of one layer, in one message for each
precision and set of axes that shard them.

Letters: L layers, Z devices along dp x cp.
Source: Rajbhandari et al., arXiv 1910.02054.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jax import Array

from jaxptd.params import ParamInfo, Params, Stored
from jaxptd.zero.gathering import Gatherable
from jaxptd.zero.shapes import StateShapes
from jaxptd.zero.shards import ShardedInfo

StepParams = dict[str, Any]  # parameters as a step's passes take them: arrays or `Gatherable`s


@dataclasses.dataclass(frozen=True)
class Zero(StateShapes):
    """Shards the state, and gathers parameters for a step."""

    infos: Mapping[str, ParamInfo]

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """Shapes, shardings and conversions of the parameters, as the state holds them."""
        if self.stage == 0:
            return self.infos
        return {n: ShardedInfo(info, self.sizes, self.lead(n)) for n, info in self.infos.items()}

    def begin_step(self, params: Params, *, training: bool = True) -> StepParams:
        """The state's parameters -> parameters for a step's passes.

        Args:
            params: as the state holds them; they vary over the axes of their gradients' sums.
            training: whether gradients will be computed.
        """
        return {name: self._begin(name, p, training) for name, p in params.items()}

    def end_step(self, gradients: Params) -> Params:
        """Gradients that the passes return -> gradients of what the state holds.

        Gradients of sharded parameters are summed over dp x cp; those of layers that are gathered
        one by one already are.
        """
        return {name: self._end(name, g) for name, g in gradients.items()}

    def _begin(self, name: str, p: Array, training: bool) -> Any:
        stored, dtype = self.stored[name], self.gather_dtype(name)
        if not isinstance(stored, ShardedInfo):
            return p.astype(dtype) if self.copies else p
        early = self.gathered_early(name) or (self.stage == 2 and not training)
        block = stored.gather(p, dtype) if early else None
        per_layer = self.per_layer(name) and (training or not early)
        return Gatherable(p, block, stored, dtype, self.stage == 2) if per_layer else block

    def _end(self, name: str, gradient: Array) -> Array:
        stored = self.stored[name]
        if not isinstance(stored, ShardedInfo) or self.per_layer(name):
            return gradient
        return stored.reduce_scatter(gradient)
