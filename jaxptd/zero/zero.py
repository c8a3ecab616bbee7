"""ZeRO: state that data parallel devices would duplicate, sharded over them.

From stage 1 on, the state (parameters, moments) is held in shards (`shards.py`). The stages differ
in how a step treats the layers' parameters w. Parameters outside the layers (embeddings, the last
norm, those that all layers read) are treated as at stage 1. `[=]` is a device's shard, `[====]` the
block that all Z shards make up, dw its gradient of one micro-batch:

    stage 0  forward     reads w[====]
             backward    reads w[====], adds dw[====] to a sum; those of a loop's layers are stacked
                         in the precision that layers compute in

    stage 1  begin_step  w[=] -- all-gather --> w[====]
             forward     reads w[====]
             backward    reads w[====], adds dw[====] to a sum
             end_step    sum[====] -- reduce-scatter --> sum[=]

    stage 2  begin_step  w[=] -- all-gather --> w[====]
             forward     reads w[====]
             backward    reads w[====]; dw[====] -- reduce_scattered --> dw[=], added to a sum

    stage 3  forward     w[=] -- gathered --> w[====], read and freed
             backward    w[=] -- regathered --> w[====], read and freed;
                         dw[====] -- reduce_scattered --> dw[=], added to a sum

Layers in a loop are gathered at stages 1 and 2 while the first micro-batch runs forward, and at
stage 1 sums are reduce-scattered while the last one runs backward: `accumulation.py`.

With `layout.offload: parameters` w[=] is in host memory (at stage 0 w[====]), and at every stage a
layer is fetched as at stage 3: copied to the device, then gathered. Gradients are as above.

Gathers move the precision that parameters are read in; gradients are summed in float32. Arrows with
the name of a function of `gathering.py` carry all parameters of one layer, in few messages
(`gathering.py` says which).

Letters: L layers, Z devices along dp x cp.
Source: Rajbhandari et al., arXiv 1910.02054.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jax import Array

from jaxptd.params import ParamInfo, Params, Stored
from jaxptd.zero.gathering import LazyParam, grad_slot
from jaxptd.zero.shapes import StateShapes
from jaxptd.zero.shards import ShardedInfo, is_on_host, on_device

StepParams = dict[str, Any]  # parameters as a step's passes take them: arrays or `LazyParam`s


@dataclasses.dataclass(frozen=True)
class Zero(StateShapes):
    """Shards the state, and gathers parameters for a step."""

    infos: Mapping[str, ParamInfo]

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """Shapes, shardings and conversions of the parameters, as the state holds them."""
        if self.layers.shards == "none":
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
        summed: Params = {}
        for name, gradient in gradients.items():
            stored, whole = self.stored[name], self.plans[name].reduce == "end"
            if whole and isinstance(stored, ShardedInfo):
                gradient = stored.reduce_scatter(gradient)
            summed[name] = gradient
        return summed

    def _begin(self, name: str, p: Array, training: bool) -> Any:
        stored, plan = self.stored[name], self.plans[name]
        info = stored if isinstance(stored, ShardedInfo) else None
        if plan.gather == "layer":
            scattered = plan.reduce != "end" and not is_on_host(p)
            shape = p.shape if info is None or plan.reduce != "end" else info.local_shape(p)
            return LazyParam(p, p if scattered else grad_slot(p, plan, shape), None, info, plan)
        block: Any = (p := on_device(p))
        if info is not None:
            held = training and plan.gather == "first_microbatch"
            block = None if held else info.gather(p, plan.gather_dtype)
        elif plan.where == "host":
            block = p.astype(plan.gather_dtype)
        if not training:
            return block
        if plan.reduce != "end":
            return LazyParam(p, p, block, info, plan)
        # A loop adds a layer's gradients to sums, or stacks them in a precision of their own.
        differs = plan.accumulate == "in_loop" or plan.narrows
        return LazyParam(block, grad_slot(block, plan), None, None, plan) if differs else block
