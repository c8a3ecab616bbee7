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

import jax.numpy as jnp
from jax import Array

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.params import ParamInfo, Params, Stored
from jaxptd.zero.accumulation import with_wide_sums
from jaxptd.zero.gathering import LazyParam
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
        info = stored if isinstance(stored, ShardedInfo) else None
        scattered, alone = self.is_scattered(name), self.is_alone(name)
        if self.is_fetched(name):
            grad_slot = p if scattered and not is_on_host(p) else self._grad_slot(name, p)
            return LazyParam(
                p,
                grad_slot,
                None,
                info,
                dtype,
                scattered,
                own_collective=alone,
                accumulate_in_loop=self.accumulate_in_loops,
            )
        p = on_device(p)
        if (
            self.accumulate_in_loops
            and training
            and info is None
            and self.infos[name].stack is not None
        ):
            return with_wide_sums(p.astype(dtype) if self.copies else p)
        if self.is_narrowed(name) and training:
            return LazyParam(p, self._grad_slot(name, p), None, None, dtype, scattered)
        if info is None:
            return p.astype(dtype) if self.copies else p
        early = self.gathered_early(name) or not training
        block = info.gather(p, dtype) if early else None
        if not (scattered and training):
            return block
        return LazyParam(
            p,
            grad_slot=p,
            block=block,
            info=info,
            dtype=dtype,
            scattered=scattered,
            keep_gathered=not early,
            reduce_in_last_microbatch=self.reduce_in_last_microbatch,
            own_collective=alone,
            accumulate_in_loop=self.accumulate_in_loops,
        )

    def _grad_slot(self, name: str, p: Array) -> Array:
        """Zeros that a gradient belongs to: of a shard, or of the block that layers read."""
        stored, shape, dtype = self.stored[name], p.shape, p.dtype
        if not self.is_scattered(name):
            dtype = dtype if self.accumulate_in_loops else jnp.dtype(self.gather_dtype(name))
            if isinstance(stored, ShardedInfo):
                shape = (*p.shape[:-1], *stored.block_shape)
        return as_varying(jnp.zeros(shape, dtype), sorted(varying_axes(p)))

    def _end(self, name: str, gradient: Array) -> Array:
        stored = self.stored[name]
        if not isinstance(stored, ShardedInfo) or self.is_scattered(name):
            return gradient
        return stored.reduce_scatter(gradient)
