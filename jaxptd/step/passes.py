"""The ways of a step's micro-batches through the model: all layers on each device, or by stages.

Two classes, one small interface: `Unpipelined` differentiates a scan over micro-batches,
`Pipelined` runs a pipeline's plan. Their methods run inside the shard_map, on parameters that vary
over all axes over which gradients are summed later. Losses and gradients that they return are this
device's partial sums.

Letters: M micro-batches, B batch, T position, V vocabulary, L layers.
"""

import dataclasses
import functools
import operator
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import all_gather, as_varying, reduce_scatter, varying_axes
from jaxptd.config import ModelConfig
from jaxptd.layers.attention import Cache
from jaxptd.layers.block import with_remat
from jaxptd.layers.dropout import Places
from jaxptd.mesh import Axis
from jaxptd.models.model import State, run_layers
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

    batch: its arrays. sample: the number of each sequence in the global batch.
    segment: the document of each token, as `Places.segment_BCT`; None where documents are joined.
    """

    batch: Batch
    sample: Array
    segment: Array | None

    def places(self, shared: Places) -> Places:
        """The places of one micro-batch's tokens; `shared` has what all micro-batches share."""
        return shared._replace(sample_B=self.sample, segment_BCT=self.segment)


Losses = dict[str, Array]  # by name: sums over targets, or weights


class Passes(Protocol):
    """Runs micro-batches through the model."""

    def gradients(
        self, params: StepParams, micro: Micro, places: Places, weights: Losses
    ) -> tuple[Losses, Params]:
        """The sum of each loss times its weight, and the gradients of their total.

        Float32 at least. For layers that ZeRO gathers one by one, the gradients are those of this
        device's shards.
        """

    def losses(self, params: StepParams, micro: Micro, places: Places) -> Losses:
        """The sum of each loss over all tokens."""

    def gathered(self, params: StepParams) -> StepParams:
        """This device's parameters -> the parameters that `empty_state` and `logits` take."""

    def empty_state(self, params: StepParams, batch: int) -> State:
        """The state before the first token, for the layers of this device: `Model.empty_state`."""

    def logits(
        self, params: StepParams, batch: Batch, places: Places, state: State
    ) -> tuple[Array, State]:
        """The logits, the same on every stage, and the state with these tokens."""


def in_total(losses: Losses, weights: Losses) -> tuple[Array, Losses]:
    """The sum of all losses, each times its weight, and these products."""
    found = {name: loss * weights[name] for name, loss in losses.items()}
    return total(found), found


def total(losses: Losses) -> Array:
    """The sum of all losses."""
    return functools.reduce(operator.add, losses.values())


def wide_zeros(p: Array) -> Array:
    """Zeros to add gradients of p to: float32 at least, varying over the same axes."""
    zeros = jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))
    return as_varying(zeros, sorted(varying_axes(p)))


@dataclasses.dataclass(frozen=True)
class Unpipelined:
    """Runs all layers on every device."""

    blueprint: Blueprint

    def gradients(
        self, params: StepParams, micro: Micro, places: Places, weights: Losses
    ) -> tuple[Losses, Params]:
        shards = shards_of(params)

        def loss(shards: Params, micro: Micro) -> tuple[Array, Losses]:
            return in_total(self._losses(with_shards(params, shards), micro, places), weights)

        def add(total: tuple, micro: Micro) -> tuple[tuple, None]:
            (_, found), gradients = jax.value_and_grad(loss, has_aux=True)(shards, micro)
            return jax.tree.map(jnp.add, total, (found, gradients)), None

        like = jax.eval_shape(self._losses, params, pools.get(micro, 0), places)
        zeros = jax.tree.map(pools.zeros, like), jax.tree.map(wide_zeros, shards)
        return lax.scan(add, zeros, micro)[0]

    def losses(self, params: StepParams, micro: Micro, places: Places) -> Losses:
        def add(total: Losses, micro: Micro) -> tuple[Losses, None]:
            return jax.tree.map(jnp.add, total, self._losses(params, micro, places)), None

        like = jax.eval_shape(self._losses, params, pools.get(micro, 0), places)
        return lax.scan(add, jax.tree.map(pools.zeros, like), micro)[0]

    def gathered(self, params: StepParams) -> StepParams:
        return params

    def empty_state(self, params: StepParams, batch: int) -> State:
        return self.blueprint.build(params).empty_state(batch)

    def logits(
        self, params: StepParams, batch: Batch, places: Places, state: State
    ) -> tuple[Array, State]:
        model = self.blueprint.build(params)
        x, state = run_layers(model, batch, places, state)
        return model.output(x), state

    def _losses(self, params: StepParams, micro: Micro, places: Places) -> Losses:
        model = self.blueprint.build(params)
        places = micro.places(places)
        x, _ = run_layers(model, micro.batch, places)
        return model.losses(x, micro.batch, places)


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
        self, params: StepParams, micro: Micro, places: Places, weights: Losses
    ) -> tuple[Losses, Params]:
        def run(params: Params, inputs: LayerInputs, x_BTD: Array) -> Array:
            return self._layer(params, inputs, x_BTD)[0]

        def head(ends: Params, micro: Micro, x_BTD: Array) -> tuple[Array, Losses]:
            return in_total(self._losses(places, ends, micro, x_BTD), weights)

        remats = [] if self.plan.recompute else self.model.remats(self.plan.depth)
        scanned = self.model.scan_layers
        kinds = [with_remat(run, remat, scanned=scanned) for remat, _ in remats]
        functions = self._functions(kinds or [run], head)
        arrays = self._arrays(self.gathered(params), micro, places)
        losses, layers, ends = training.gradients(functions, self.plan, arrays)
        return losses, layers | {name: self._reduce_end(name, g) for name, g in ends.items()}

    def losses(self, params: StepParams, micro: Micro, places: Places) -> Losses:
        functions = self._functions([self._layer], partial(self._losses, places))
        arrays = self._arrays(self.gathered(params), micro, places)
        return executor.forward(functions, self.plan.forward_only(), arrays)[0]

    def gathered(self, params: StepParams) -> StepParams:
        infos = self.blueprint.infos
        return {
            name: p if infos[name].stacked else self._gather_end(name, p)
            for name, p in params.items()
        }

    def empty_state(self, params: StepParams, batch: int) -> State:
        return self.blueprint.build(params).empty_state(batch)

    def logits(
        self, params: StepParams, batch: Batch, places: Places, state: State
    ) -> tuple[Array, State]:
        """Runs one micro-batch, and sends the logits from the last stage to all others."""

        def head(ends: Params, micro: Micro, x_BTD: Array) -> Array:
            return self.blueprint.build(ends).output(x_BTD)

        ((name, caches),) = state.items()
        micro = Micro({name: x[None] for name, x in batch.items()}, places.sample_B[None], None)
        functions = self._functions([self._layer], head)
        arrays = self._arrays(params, micro, places)
        plan = self.plan.forward_only(micro_batches=1)
        logits_BTV, caches = executor.forward(functions, plan, arrays, caches)
        return lax.psum(logits_BTV, Axis.PP), {name: caches}

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
        return self.blueprint.build(ends).embed(micro.batch, places)

    def _layer(
        self, params: Params, inputs: LayerInputs, x_BTD: Array
    ) -> tuple[Array, Cache | None]:
        (stack,) = self.blueprint.build(params).stacks.values()
        x_BTD, cache = stack(x_BTD, *inputs)
        return x_BTD, cache

    def _losses(self, places: Places, ends: Params, micro: Micro, x_BTD: Array) -> Losses:
        model = self.blueprint.build(ends)
        return model.losses(x_BTD, micro.batch, micro.places(places))

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
