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
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import all_gather, as_varying, reduce_scatter
from jaxptd.config import ModelConfig
from jaxptd.layers.block import with_remat
from jaxptd.layers.dropout import Places, Segments
from jaxptd.mesh import Axis
from jaxptd.models.model import COMMON, Model, State, X, run_layers
from jaxptd.models.stages import stage_dim
from jaxptd.params import Blueprint, Params
from jaxptd.pipeline import executor, pools, training
from jaxptd.pipeline.model import LayerInputs, ModelArrays, ModelFunctions
from jaxptd.pipeline.plan import Plan
from jaxptd.step.batch import Batch
from jaxptd.step.keeping import keepers
from jaxptd.step.resolved import Resolved
from jaxptd.zero.gathering import gathered, handles_of, reduce_scattered, regathered, with_handles
from jaxptd.zero.host import on_device
from jaxptd.zero.last import before_last, for_last, waits_for_last
from jaxptd.zero.zero import StepParams


class Micro(NamedTuple):
    """A step's micro-batches, `[M, B, ...]` each, or one of them, `[B, ...]`.

    batch: its arrays. sample: the number of each sequence in the global batch.
    segments: the documents of each sequence of tokens, as `Places.segments`.
    """

    batch: Batch
    sample: Array
    segments: Segments

    def places(self, shared: Places) -> Places:
        """The places of one micro-batch's tokens; `shared` has what all micro-batches share."""
        return shared.of(self.sample, self.segments)


Losses = dict[str, Array]  # by name: sums over targets, or weights
Terms = Callable[[Model], Callable[..., Losses]]
LOSSES: Terms = operator.attrgetter("losses")
EVALUATED: Terms = operator.attrgetter("evaluated")


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
        """The sum of each loss over all tokens, and of each score."""

    def gathered(self, params: StepParams) -> StepParams:
        """This device's parameters -> the parameters that `empty_state` and `logits` take."""

    def empty_state(self, params: StepParams, batch: int) -> State:
        """The state before the first token, for the layers of this device: `Model.empty_state`."""

    def logits(
        self, params: StepParams, batch: Batch, places: Places, state: State
    ) -> tuple[Array, State]:
        """The logits, the same on every stage, and the state with these tokens."""


def in_total(losses: Losses, weights: Losses) -> tuple[Array, Losses]:
    """The sum of all losses that have a weight, each times its own, and these products."""
    found = {name: losses[name] * weight for name, weight in weights.items()}
    return total(found), found


def total(losses: Losses) -> Array:
    """The sum of all losses."""
    return functools.reduce(operator.add, losses.values())


@dataclasses.dataclass(frozen=True)
class Unpipelined:
    """Runs all layers on every device."""

    blueprint: Blueprint

    def gradients(
        self, params: StepParams, micro: Micro, places: Places, weights: Losses
    ) -> tuple[Losses, Params]:
        def loss(params: StepParams, handles: Params, micro: Micro) -> tuple[Array, Losses]:
            given = with_handles(params, handles), micro, places
            return in_total(self._terms(*given, of=LOSSES), weights)

        def add(params: StepParams, total: tuple, micro: Micro) -> tuple[tuple, None]:
            gradient = jax.value_and_grad(partial(loss, params), has_aux=True)
            (_, found), gradients = gradient(handles_of(params), micro)
            return jax.tree.map(jnp.add, total, (found, gradients)), None

        terms = partial(self._terms, of=LOSSES)
        like = jax.eval_shape(terms, params, pools.get(micro, 0), places)
        zeros = jax.tree.map(pools.zeros, {name: like[name] for name in weights})
        early = before_last(params)
        start = zeros, pools.wide_zeros(handles_of(early))
        if not waits_for_last(params):
            return lax.scan(partial(add, params), start, micro)[0]
        others, number = jax.tree.map(lambda x: x[:-1], micro), len(micro.sample) - 1
        losses, sums = lax.scan(partial(add, early), start, others)[0]
        params, rest = for_last(params, sums)

        def last(total: tuple, now: pools.Instruction) -> tuple:
            return add(params, total, pools.get(micro, now["micro"]))[0]

        return pools.apart((losses, rest), {"micro": jnp.int32(number)}, last)

    def losses(self, params: StepParams, micro: Micro, places: Places) -> Losses:
        terms = partial(self._terms, of=EVALUATED)

        def add(total: Losses, micro: Micro) -> tuple[Losses, None]:
            return jax.tree.map(jnp.add, total, terms(params, micro, places)), None

        like = jax.eval_shape(terms, params, pools.get(micro, 0), places)
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

    def _terms(self, params: StepParams, micro: Micro, places: Places, *, of: Terms) -> Losses:
        model = self.blueprint.build(params)
        places = micro.places(places)
        x, _ = run_layers(model, micro.batch, places)
        return of(model)(x, micro.batch, places)


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """Runs its stage's layers on every device.

    The stage with the model's first part embeds, the stage with its last part computes the loss.
    Parameters outside the layers, of embedding and head ("ends") and those that all layers read
    ("common"), are all-gathered over the stages before the first tick, their gradients
    reduce-scattered after the last: no stage has a second copy of tied weights or of their moments.
    """

    blueprint: Blueprint
    model: ModelConfig
    plan: Plan

    def gradients(
        self, params: StepParams, micro: Micro, places: Places, weights: Losses
    ) -> tuple[Losses, Params]:
        def head(ends: Params, micro: Micro, x: X) -> tuple[Array, Losses]:
            return in_total(self._terms(LOSSES, places, ends, micro, x), weights)

        keep = keepers(self.model, self.plan, offload=self.blueprint.build({}).offload)
        functions = self._functions(self._trained_layers(), head)._replace(keep=keep)
        arrays = self._arrays(self.gathered(params), micro, places)
        losses, stacks, ends, common = training.gradients(functions, self.plan, arrays)
        layers = {name: g for stack in stacks.values() for name, g in stack.items()}
        others = {name: self._reduce_end(name, g) for name, g in (ends | common).items()}
        return losses, layers | others

    def losses(self, params: StepParams, micro: Micro, places: Places) -> Losses:
        functions = self._functions(self._layers(), partial(self._terms, EVALUATED, places))
        arrays = self._arrays(self.gathered(params), micro, places)
        return executor.forward(functions, self.plan.forward_only(), arrays)[0]

    def gathered(self, params: StepParams) -> StepParams:
        infos = self.blueprint.infos
        return {
            name: self._gather_end(name, p) if infos[name].stack is None else p
            for name, p in params.items()
        }

    def empty_state(self, params: StepParams, batch: int) -> State:
        return self.blueprint.build(params).empty_state(batch)

    def logits(
        self, params: StepParams, batch: Batch, places: Places, state: State
    ) -> tuple[Array, State]:
        """Runs one micro-batch, and sends the logits from the last stage to all others."""

        def head(ends: Params, micro: Micro, x: X) -> Array:
            return self.blueprint.build(ends).output(x)

        one = Micro(batch, places.sample_B, places.segments)
        micro = jax.tree.map(lambda x: x[None], one)
        functions = self._functions(self._layers(), head)
        arrays = self._arrays(params, micro, places)
        plan = self.plan.forward_only(micro_batches=1)
        logits_BTV, state = executor.forward(functions, plan, arrays, state)
        return lax.psum(logits_BTV, Axis.PP), state

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
            fetched=on_device,
            unroll=not self.model.scan_layers,
        )

    def _embed(self, ends: Params, micro: Micro, places: Places) -> X:
        return self.blueprint.build(ends).embed(micro.batch, places)

    def _layers(self) -> list[Callable]:
        """The layer of each stack: (parameters and common ones, inputs, x) -> (x, cache)."""
        return [partial(self._layer, stack) for stack in self.plan.stacks]

    def _trained_layers(self) -> list[Callable]:
        """The layers of each of `Plan.kinds`, which save what the model's policy says: -> x."""
        found = []
        for stack, layer in zip(self.plan.stacks, self._layers(), strict=True):
            run = partial(_without_cache, layer)
            remats = [] if self.plan.recompute else self.model.remats(self.plan.depth(stack))
            scanned = self.model.scan_layers
            found += [with_remat(run, remat, scanned=scanned) for remat, _ in remats] or [run]
        return found

    def _layer(
        self, stack: str, params: tuple[Params, Params], inputs: LayerInputs, x: X
    ) -> tuple[X, Any]:
        own, common = params
        model = self.blueprint.build(own | common)
        found: tuple[X, Any] = model.stacks[stack](x, *inputs, model.common)
        return found

    def _terms(self, of: Terms, places: Places, ends: Params, micro: Micro, x: X) -> Losses:
        return of(self.blueprint.build(ends))(x, micro.batch, micro.places(places))

    # ---- parameters -------------------------------------------------------------------------

    def _arrays(self, params: StepParams, micro: Micro, places: Places) -> ModelArrays:
        layers: dict[str, StepParams] = {stack: {} for stack in self.plan.stacks}
        ends: Params = {}
        common: Params = {}
        for name, p in params.items():
            stack = self.blueprint.infos[name].stack
            others = common if name.startswith(f"{COMMON}.") else ends
            (others if stack is None else layers[stack])[name] = p
        zeros = pools.wide_zeros((handles_of(layers), ends, common))
        return ModelArrays(layers, ends, micro, places, common, zeros)

    def _gather_end(self, name: str, x: Array) -> Array:
        """A parameter outside the layers, gathered over the stages. Partner: `_reduce_end`."""
        dim = stage_dim(self.blueprint.infos[name])
        return as_varying(x, [Axis.PP]) if dim is None else all_gather(x, Axis.PP, dim)

    def _reduce_end(self, name: str, gradient: Array) -> Array:
        """The gradient's sum over stages, sharded, if the parameter is; else the partial sum."""
        dim = stage_dim(self.blueprint.infos[name])
        return gradient if dim is None else reduce_scatter(gradient, Axis.PP, dim)


def _without_cache(layer: Callable, params: Any, inputs: LayerInputs, x: X) -> X:
    """x after a layer, without the layer's cache."""
    return layer(params, inputs, x)[0]


def make_passes(resolved: Resolved) -> Passes:
    """Chooses the way of micro-batches through the model."""
    if resolved.plan is None:
        return Unpipelined(resolved.blueprint)
    return Pipelined(resolved.blueprint, resolved.model, resolved.plan)
