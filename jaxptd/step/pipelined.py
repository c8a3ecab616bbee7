"""A step's micro-batches through a pipeline: `PipelineSchedule` runs a plan on its stages.

Letters: as in `passes.py`, whose interface it has.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax

from jaxptd.collectives import all_gather, as_varying, reduce_scatter
from jaxptd.config import ModelConfig
from jaxptd.layers.dropout import TokenInfo
from jaxptd.mesh import Axis
from jaxptd.models.model import COMMON, GenerationState, Model, X
from jaxptd.models.stages import stage_dim
from jaxptd.params import Blueprint, Params
from jaxptd.pipeline import executor, pools, training
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.pools import LayerInputs, ModelArrays, ModelFunctions
from jaxptd.remat import with_remat
from jaxptd.step.batch import Batch
from jaxptd.step.passes import (
    EVALUATED,
    LOSSES,
    ForwardBackward,
    GradientAccumulation,
    Losses,
    MicroBatches,
    Output,
    Terms,
    in_total,
    output,
)
from jaxptd.step.resolved import ResolvedConfig
from jaxptd.zero.shards import on_device, on_host
from jaxptd.zero.zero import (
    StepParams,
    Zero,
    attached,
    gathered,
    grad_slots_of,
    is_frozen,
    read_with_slot,
    reduce_scattered,
    regathered,
    with_wide_gradients,
    without_gradient,
)

# ---- where a pipeline keeps what layers save -----------------------------------------------------
# Where a pipeline's pools keep what layers save for backward: on the device, or on the host.

Keep = Callable[[Any], Any]  # arrays that layers save -> as pools keep them


def keepers(model: ModelConfig, plan: Plan, *, offload: bool) -> list[Keep]:
    """One function for each of `Plan.kinds`; none without offloading.

    offload: what `remat: dots` saves is kept in host memory; other kinds' arrays are not.
    """
    if not offload:
        return []
    stacks = [model.remats(plan.depth(stack)) for stack in plan.stacks]
    return [on_host if remat == "dots" else _as_it_is for each in stacks for remat, _ in each]


def _as_it_is(x: Any) -> Any:
    return x


# ---- the passes of a pipeline --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """Runs its stage's layers on every device.

    The stage with the model's first part embeds, the stage with its last part computes the loss.
    Parameters outside the layers, of embedding and head ("ends") and those that all layers read
    ("common"), are all-gathered over the stages before the first tick, their gradients
    reduce-scattered after the last: no stage has a second copy of tied weights or of their moments.
    """

    blueprint: Blueprint
    model: ModelConfig
    plan: Plan
    zero: Zero

    def gradients(
        self, params: StepParams, micro: MicroBatches, token_info: TokenInfo, weights: Losses
    ) -> tuple[Losses, Params]:
        given = with_wide_gradients(self.gathered(params), self.zero.plans)
        outside = partial(self._outside, given)

        def head(ends: Params, micro: MicroBatches, x: X) -> tuple[Array, Losses]:
            return in_total(self._terms(LOSSES, token_info, outside(ends), micro, x), weights)

        keep = keepers(self.model, self.plan, offload=self.blueprint.build({}).offload)
        functions = self._functions(outside, self._trained_layers(), head)._replace(keep=keep)
        arrays = self._arrays(given, micro, token_info)
        losses, stacks, ends, common = training.gradients(functions, self.plan, arrays)
        layers = {name: g for stack in stacks.values() for name, g in stack.items()}
        common = {name: common[name] for name in common.keys() & grad_slots_of(given).keys()}
        others = {name: self._reduce_end(name, g) for name, g in (ends | common).items()}
        return losses, layers | others

    def losses(
        self,
        params: StepParams,
        micro: MicroBatches,
        token_info: TokenInfo,
        of: Terms = EVALUATED,
    ) -> Losses:
        outside = self.blueprint.build

        def head(ends: Params, micro: MicroBatches, x: X) -> Losses:
            return self._terms(of, token_info, outside(ends), micro, x)

        functions = self._functions(outside, self._layers(), head)
        arrays = self._arrays(self.gathered(params), micro, token_info)
        return executor.forward(functions, self.plan.forward_only(), arrays)[0]

    def gathered(self, params: StepParams) -> StepParams:
        infos = self.blueprint.infos
        ends = {name: p for name, p in params.items() if infos[name].stack is None}
        return params | {name: self._gathered_end(name, p) for name, p in ends.items()}

    def empty_state(self, params: StepParams, batch: int) -> GenerationState:
        return self.blueprint.build(params).empty_state(batch)

    def logits(
        self,
        params: StepParams,
        batch: Batch,
        token_info: TokenInfo,
        state: GenerationState,
        of: Output = output,
    ) -> tuple[Any, GenerationState]:
        """Runs one micro-batch, and sends the logits from the last stage to all others."""
        outside = self.blueprint.build

        def head(ends: Params, micro: MicroBatches, x: X) -> Any:
            return of(outside(ends), x)

        segments, info = [token_info.segment_BCT], token_info.source
        while info is not None:
            segments, info = [info.segment_BCT, *segments], info.source
        one = MicroBatches(batch, token_info.sample_B, tuple(segments))
        micro = jax.tree.map(lambda x: x[None], one)
        functions = self._functions(outside, self._layers(), head)
        arrays = self._arrays(params, micro, token_info)
        plan = self.plan.forward_only(micro_batches=1)
        logits, state = executor.forward(functions, plan, arrays, state)
        return lax.psum(logits, Axis.PP), state

    # ---- the model's functions --------------------------------------------------------------

    def _functions(
        self, outside: Callable[[Params], Model], layers: Any, head: Any
    ) -> ModelFunctions:
        def embed(ends: Params, micro: MicroBatches, token_info: TokenInfo) -> X:
            return outside(ends).embed(micro.batch, token_info)

        return ModelFunctions(
            embed=embed,
            layers=layers,
            head=head,
            token_info=MicroBatches.token_info,
            gathered=gathered,
            regathered=regathered,
            reduce_scattered=_sent,
            fetched=on_device,
            unroll=not self.model.scan_layers,
        )

    def _outside(self, params: StepParams, ends: Params) -> Model:
        """The model without its layers; ends: its gradient slots, among `params`."""
        named = {name: p for name, p in params.items() if name in ends or self._is_fixed(name, p)}
        return self.blueprint.build(attached(named, ends))

    def _layers(self) -> list[Callable]:
        """The layer of each stack: (parameters and common ones, inputs, x) -> (x, cache)."""
        return [partial(self._layer, stack) for stack in self.plan.stacks]

    def _trained_layers(self) -> list[Callable]:
        """The layers of each of `Plan.kinds`, which save what the model's policy says: -> x."""
        runs: list[Callable] = []
        for stack, layer in zip(self.plan.stacks, self._layers(), strict=True):
            run = partial(_without_cache, layer)
            remats = [] if self.plan.recompute else self.model.remats(self.plan.depth(stack))
            scanned = self.model.scan_layers
            for remat, _ in remats or [("none", 0)]:
                wrap = partial(with_remat, remat=remat, scanned=scanned)
                if remat == "none":
                    runs.append(run)
                elif self.model.period > 1:  # its layers recompute by themselves
                    runs.append(partial(_without_cache, partial(layer, wrap=wrap)))
                else:
                    runs.append(wrap(run))
        return runs

    def _layer(
        self,
        stack: str,
        params: tuple[Params, Params],
        inputs: LayerInputs,
        x: X,
        **others: Any,
    ) -> tuple[X, Any]:
        layer_params, common = params
        model = self.blueprint.build(layer_params | common)
        result: tuple[X, Any] = model.stacks[stack](x, *inputs, model.common, **others)
        return result

    def _terms(
        self, of: Terms, token_info: TokenInfo, outside: Model, micro: MicroBatches, x: X
    ) -> Losses:
        return of(outside)(x, micro.batch, micro.token_info(token_info))

    # ---- parameters -------------------------------------------------------------------------

    def _arrays(
        self, params: StepParams, micro: MicroBatches, token_info: TokenInfo
    ) -> ModelArrays:
        layers: dict[str, StepParams] = {stack: {} for stack in self.plan.stacks}
        ends: StepParams = {}
        common: Params = {}
        for name, p in params.items():
            stack = self.blueprint.infos[name].stack
            others = common if name.startswith(f"{COMMON}.") else ends
            (others if stack is None else layers[stack])[name] = p
        common = {name: read_with_slot(p) for name, p in common.items()}
        grad_slots = grad_slots_of(ends)
        of_layers = {stack: grad_slots_of(each) for stack, each in layers.items()}
        zeros = pools.wide_zeros((of_layers, grad_slots, common))
        return ModelArrays(layers, grad_slots, micro, token_info, common, zeros)

    def _gathered_end(self, name: str, p: Any) -> Any:
        """`_gather_end` of an array, or of a frozen parameter."""
        if is_frozen(p):
            return without_gradient(self._gather_end(name, p.block), p.plan)
        return self._gather_end(name, p)

    def _gather_end(self, name: str, x: Array) -> Array:
        """A parameter outside the layers, gathered over the stages. Partner: `_reduce_end`."""
        if (dim := stage_dim(self.blueprint.infos[name])) is None:
            return as_varying(x, [Axis.PP])
        return all_gather(x.astype(self.zero.plans[name].gather_dtype), Axis.PP, dim)

    def _is_fixed(self, name: str, p: Any) -> bool:
        """True for a frozen parameter outside the layers, besides those that all layers read."""
        outside = self.blueprint.infos[name].stack is None
        return outside and is_frozen(p) and not name.startswith(f"{COMMON}.")

    def _reduce_end(self, name: str, gradient: Array) -> Array:
        """The gradient's sum over stages, sharded, if the parameter is; else the partial sum."""
        dim = stage_dim(self.blueprint.infos[name])
        return gradient if dim is None else reduce_scatter(gradient, Axis.PP, dim)


def _sent(gradients: Params, layer: StepParams) -> Params:
    """`reduce_scattered` of a layer's gradients by name, without those of frozen parameters."""
    sent = reduce_scattered(gradients, layer)
    return {name: g for name, g in sent.items() if g is not None}


def _without_cache(layer: Callable, params: Any, inputs: LayerInputs, x: X) -> X:
    """x after a layer, without the layer's cache."""
    return layer(params, inputs, x)[0]


def make_passes(resolved: ResolvedConfig) -> ForwardBackward:
    """Chooses the way of micro-batches through the model."""
    if resolved.plan is None:
        return GradientAccumulation(resolved.blueprint, resolved.zero)
    return PipelineSchedule(resolved.blueprint, resolved.model, resolved.plan, resolved.zero)
