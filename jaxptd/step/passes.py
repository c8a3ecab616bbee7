"""The ways of a step's micro-batches through the model: all layers on each device, or by stages.

Two classes, one small interface: `Unpipelined` differentiates a scan over micro-batches,
`Pipelined` runs a pipeline's plan. Their methods run inside the shard_map, on parameters that vary
over all axes over which gradients are summed later. Losses and gradients that they return are this
device's partial sums.

Letters: M micro-batches, B batch, T position, V vocabulary, L layers.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import all_gather, as_varying, reduce_scatter, varying_axes
from jaxptd.config import ModelConfig
from jaxptd.layers.attention import Cache
from jaxptd.layers.block import Block, with_remat
from jaxptd.layers.dropout import Places
from jaxptd.mesh import Axis
from jaxptd.params import Blueprint, Params
from jaxptd.pipeline import executor, pools, training
from jaxptd.pipeline.model import LayerInputs, ModelArrays, ModelFunctions
from jaxptd.pipeline.plan import Plan
from jaxptd.step.batch import Batch
from jaxptd.step.resolved import Resolved
from jaxptd.step.stages import stage_dim
from jaxptd.zero import StepParams, gathered, reduce_scattered, regathered, shards_of, with_shards


class Micro(NamedTuple):
    """A step's micro-batches, `[M, B, ...]` each, or one of them, `[B, ...]`.

    batch: tokens, targets, segments. sample: the number of each sequence in the global batch.
    segment: the document of each token, as `Places.segment_BCT`; None where documents are joined.
    """

    batch: Batch
    sample: Array
    segment: Array | None

    def places(self, shared: Places) -> Places:
        """The places of one micro-batch's tokens; `shared` has what all micro-batches share."""
        return shared._replace(sample_B=self.sample, segment_BCT=self.segment)


class Passes(Protocol):
    """Runs micro-batches through the model."""

    def gradients(
        self, params: StepParams, micro: Micro, places: Places, weight: Array
    ) -> tuple[Array, Params]:
        """`weight` times the sum of the losses of all tokens, and its gradients, float32 at least.

        For layers that ZeRO gathers one by one, the gradients are those of this device's shards.
        """

    def loss(self, params: StepParams, micro: Micro, places: Places) -> Array:
        """The sum of the losses of all tokens."""

    def gathered(self, params: StepParams) -> StepParams:
        """This device's parameters -> the parameters that `empty_cache` and `logits` take."""

    def empty_cache(self, params: StepParams, batch: int) -> Cache:
        """An empty cache for the layers of this device; see `GPT.empty_cache`."""

    def logits(
        self, params: StepParams, tokens_BT: Array, places: Places, cache: Cache
    ) -> tuple[Array, Cache]:
        """The logits, the same on every stage, and the cache; see `GPT.logits`."""


def wide_zeros(p: Array) -> Array:
    """Zeros to add gradients of p to: float32 at least, varying over the same axes."""
    zeros = jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))
    return as_varying(zeros, sorted(varying_axes(p)))


@dataclasses.dataclass(frozen=True)
class Unpipelined:
    """Runs all layers on every device."""

    blueprint: Blueprint

    def gradients(
        self, params: StepParams, micro: Micro, places: Places, weight: Array
    ) -> tuple[Array, Params]:
        shards = shards_of(params)

        def loss(shards: Params, micro: Micro) -> Array:
            return self._loss_sum(with_shards(params, shards), micro, places) * weight

        def add(total: tuple, micro: Micro) -> tuple[tuple, None]:
            found = jax.value_and_grad(loss)(shards, micro)
            return jax.tree.map(jnp.add, total, found), None

        zeros = jax.tree.map(wide_zeros, shards)
        like = jax.eval_shape(self._loss_sum, params, pools.get(micro, 0), places)
        return lax.scan(add, (pools.zeros(like), zeros), micro)[0]

    def loss(self, params: StepParams, micro: Micro, places: Places) -> Array:
        def add(total: Array, micro: Micro) -> tuple[Array, None]:
            return total + self._loss_sum(params, micro, places), None

        like = jax.eval_shape(self._loss_sum, params, pools.get(micro, 0), places)
        return lax.scan(add, pools.zeros(like), micro)[0]

    def gathered(self, params: StepParams) -> StepParams:
        return params

    def empty_cache(self, params: StepParams, batch: int) -> Cache:
        return self.blueprint.build(params).empty_cache(batch)

    def logits(
        self, params: StepParams, tokens_BT: Array, places: Places, cache: Cache
    ) -> tuple[Array, Cache]:
        return self.blueprint.build(params).logits(tokens_BT, places, cache)

    def _loss_sum(self, params: StepParams, micro: Micro, places: Places) -> Array:
        model, batch = self.blueprint.build(params), micro.batch
        return jnp.sum(model.loss(batch["tokens"], batch["targets"], micro.places(places)))


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """Runs its stage's layers on every device.

    The stage with the model's first part embeds, the stage with its last part computes the loss.
    Parameters outside the layers ("ends") are all-gathered over the stages before the first tick,
    and their gradients reduce-scattered after the last: no stage holds a second copy of tied
    weights, of their gradients' sum or of their moments.
    """

    blueprint: Blueprint
    model: ModelConfig
    plan: Plan

    def gradients(
        self, params: StepParams, micro: Micro, places: Places, weight: Array
    ) -> tuple[Array, Params]:
        def run(params: Params, inputs: LayerInputs, x_BTD: Array) -> Array:
            return self._layer(params, inputs, x_BTD)[0]

        def head(ends: Params, micro: Micro, x_BTD: Array) -> Array:
            return self._loss_sum(ends, micro, x_BTD) * weight

        remats = [] if self.plan.recompute else self.model.remats(self.plan.depth)
        scanned = self.model.scan_layers
        kinds = [with_remat(run, remat, scanned=scanned) for remat, _ in remats]
        functions = self._functions(kinds or [run], head)
        arrays = self._arrays(self.gathered(params), micro, places)
        loss, layers, ends = training.gradients(functions, self.plan, arrays)
        return loss, layers | {name: self._reduce_end(name, g) for name, g in ends.items()}

    def loss(self, params: StepParams, micro: Micro, places: Places) -> Array:
        functions = self._functions([self._layer], self._loss_sum)
        arrays = self._arrays(self.gathered(params), micro, places)
        return executor.forward(functions, self.plan.forward_only(), arrays)[0]

    def gathered(self, params: StepParams) -> StepParams:
        infos = self.blueprint.infos
        return {
            name: p if infos[name].stacked else self._gather_end(name, p)
            for name, p in params.items()
        }

    def empty_cache(self, params: StepParams, batch: int) -> Cache:
        return self.blueprint.build(params).empty_cache(batch)

    def logits(
        self, params: StepParams, tokens_BT: Array, places: Places, cache: Cache
    ) -> tuple[Array, Cache]:
        """Runs one micro-batch, and sends the logits from the last stage to all others."""

        def head(ends: Params, micro: Micro, x_BTD: Array) -> Array:
            return self.blueprint.build(ends).output(x_BTD)

        micro = Micro({"tokens": tokens_BT[None]}, places.sample_B[None], None)
        functions = self._functions([self._layer], head)
        arrays = self._arrays(params, micro, places)
        plan = self.plan.forward_only(micro_batches=1)
        logits_BTV, cache = executor.forward(functions, plan, arrays, cache)
        return lax.psum(logits_BTV, Axis.PP), cache

    # ---- the model's functions --------------------------------------------------------------

    def _functions(self, layers: Any, head: Any) -> ModelFunctions:
        return ModelFunctions(
            embed=self._embed,
            layers=layers,
            head=head,
            places=Micro.places,
            gathered=gathered,
            regathered=regathered,
            reduce_scattered=reduce_scattered,
            unroll=not self.model.scan_layers,
        )

    def _embed(self, ends: Params, micro: Micro, places: Places) -> Array:
        return self.blueprint.build(ends).embed(micro.batch["tokens"], places)

    def _layer(
        self, params: Params, inputs: LayerInputs, x_BTD: Array
    ) -> tuple[Array, Cache | None]:
        block: Block = self.blueprint.build(params).blocks
        return block(x_BTD, *inputs)

    def _loss_sum(self, ends: Params, micro: Micro, x_BTD: Array) -> Array:
        model = self.blueprint.build(ends)
        return jnp.sum(model.output_loss(x_BTD, micro.batch["targets"]))

    # ---- parameters -------------------------------------------------------------------------

    def _arrays(self, params: StepParams, micro: Micro, places: Places) -> ModelArrays:
        infos = self.blueprint.infos
        layers = {name: p for name, p in params.items() if infos[name].stacked}
        ends = {name: p for name, p in params.items() if name not in layers}
        zeros = jax.tree.map(wide_zeros, (shards_of(layers), ends))
        return ModelArrays(layers, ends, micro, places, zeros)

    def _gather_end(self, name: str, x: Array) -> Array:
        """A parameter outside the layers, gathered over the stages. Partner: `_reduce_end`."""
        dim = stage_dim(self.blueprint.infos[name])
        return as_varying(x, [Axis.PP]) if dim is None else all_gather(x, Axis.PP, dim)

    def _reduce_end(self, name: str, gradient: Array) -> Array:
        """The gradient's sum over stages, sharded, if the parameter is; else the partial sum."""
        dim = stage_dim(self.blueprint.infos[name])
        return gradient if dim is None else reduce_scatter(gradient, Axis.PP, dim)


def make_passes(resolved: Resolved) -> Passes:
    """Chooses the way of micro-batches through the model."""
    if resolved.plan is None:
        return Unpipelined(resolved.blueprint)
    return Pipelined(resolved.blueprint, resolved.model, resolved.plan)
