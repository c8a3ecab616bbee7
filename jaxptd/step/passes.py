"""The ways of a step's micro-batches through the model: all layers on each device, or by stages.

Two classes, one small interface: `GradientAccumulation` differentiates a scan over micro-batches,
`PipelineSchedule` (pipelined.py) runs a pipeline's plan. Their methods run inside the shard_map, on
parameters that vary over all axes over which gradients are summed later. Losses and gradients that
they return are this device's partial sums.

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

from jaxptd.layers.dropout import TokenInfo
from jaxptd.models.decoder import POSITION
from jaxptd.models.model import GenerationState, Model, run_layers
from jaxptd.params import Blueprint, Params
from jaxptd.pipeline import pools
from jaxptd.pipeline.pools import X
from jaxptd.step.batch import Batch
from jaxptd.zero.zero import (
    StepParams,
    Zero,
    added,
    attached,
    first_microbatch_params,
    grad_slots_of,
    middle_microbatch_params,
    with_held,
    with_sums,
    with_wide_gradients,
)


class MicroBatches(NamedTuple):
    """A step's micro-batches, `[M, B, ...]` each, or one of them, `[B, ...]`.

    batch: its arrays. sample: the number of each sample in the global batch. segments: for each
    sequence of a sample, its source first, `TokenInfo.segment_BCT`. places: of the tokens, where
    samples differ, `TokenInfo.position_BCT`.
    """

    batch: Batch
    sample: Array
    segments: tuple[Array | None, ...]
    places: Array | None = None

    def token_info(self, shared: TokenInfo) -> TokenInfo:
        """The tokens of one micro-batch; it has the positions and the seed of `shared`."""
        *before, segment_BCT = self.segments
        of_source = self._replace(segments=tuple(before))
        source = shared.source and of_source.token_info(shared.source)
        return shared._replace(
            sample_B=self.sample,
            segment_BCT=segment_BCT,
            source=source,
            position_T=self.batch.get(POSITION, shared.position_T),
            position_BCT=self.places,
            choice_BTLK=self.batch.get("choices"),
        )


Losses = dict[str, Array]  # by name: sums over targets, or weights
Terms = Callable[[Model], Callable[..., Losses]]
LOSSES: Terms = operator.attrgetter("losses")
EVALUATED: Terms = operator.attrgetter("evaluated")
Output = Callable[[Any, X], Any]  # (the model, x after all layers) -> logits, or more


def output(model: Model, x: X) -> Array:
    """The logits."""
    return model.output(x)


class ForwardBackward(Protocol):
    """Runs micro-batches through the model."""

    def gradients(
        self, params: StepParams, micro: MicroBatches, token_info: TokenInfo, weights: Losses
    ) -> tuple[Losses, Params]:
        """The sum of each loss times its weight, and the gradients of their total.

        Float32 at least. For layers that ZeRO gathers one by one, the gradients are those of this
        device's shards.
        """

    def losses(
        self,
        params: StepParams,
        micro: MicroBatches,
        token_info: TokenInfo,
        of: Terms = EVALUATED,
    ) -> Losses:
        """The sum of each loss over all tokens, and of each score; or of other terms."""

    def gathered(self, params: StepParams) -> StepParams:
        """This device's parameters -> the parameters that `empty_state` and `logits` take."""

    def empty_state(self, params: StepParams, batch: int) -> GenerationState:
        """The state before the first token, for the layers of this device: `Model.empty_state`."""

    def logits(
        self,
        params: StepParams,
        batch: Batch,
        token_info: TokenInfo,
        state: GenerationState,
        of: Output = output,
    ) -> tuple[Any, GenerationState]:
        """The logits, the same on every stage, and the state with these tokens.

        of: what to return in place of logits.
        """


def in_total(losses: Losses, weights: Losses) -> tuple[Array, Losses]:
    """The sum of the losses that have a weight, each multiplied by it, and its terms."""
    weighted = {name: losses[name] * weight for name, weight in weights.items()}
    return functools.reduce(operator.add, weighted.values()), weighted


@dataclasses.dataclass(frozen=True)
class GradientAccumulation:
    """Runs all layers on every device; `zero` says what each micro-batch does with parameters."""

    blueprint: Blueprint
    zero: Zero

    def gradients(
        self, params: StepParams, micro: MicroBatches, token_info: TokenInfo, weights: Losses
    ) -> tuple[Losses, Params]:
        def add(
            params: StepParams, total: tuple, micro: MicroBatches, *, in_place: bool = False
        ) -> tuple:
            """Adds a micro-batch's losses and gradients; also returns the blocks that it holds.

            in_place: whether loops over layers add gradients to the sums, where the plan says so.
            """

            def loss(slots: Params) -> tuple[Array, tuple[Losses, GenerationState]]:
                given = attached(params, slots)
                losses, held = self._terms(given, micro, token_info, of=LOSSES)
                sum_of_all, weighted = in_total(losses, weights)
                return sum_of_all, (weighted, held)

            losses, sums = total
            if in_place:
                params, sums = with_sums(params, sums)
            gradient = jax.value_and_grad(loss, has_aux=True)
            (_, (terms, held)), gradients = gradient(grad_slots_of(params))
            losses = jax.tree.map(jnp.add, losses, terms)
            return (losses, added(params, sums, gradients)), held

        plan, many = self.zero.layers, len(micro.sample)
        params = with_wide_gradients(params, self.zero.plans)
        waits = plan.reduce == "last_microbatch"
        first = first_microbatch_params(params) if waits else params
        slots = grad_slots_of(first)
        given, of_first = attached(first, slots), partial(jax.tree.map, lambda x: x[0])
        alike = partial(self._terms, of=LOSSES, traced=False)
        like, _ = jax.eval_shape(lambda: alike(given, of_first(micro), token_info))
        total = pools.wide_zeros(({name: like[name] for name in weights}, slots))
        begin = int(plan.gather == "first_microbatch")
        end = many - waits
        if begin:
            total, held = add(first, total, pools.get(micro, 0))
            params = with_held(params, held, self.blueprint.infos)
        middle = middle_microbatch_params(params) if waits else params
        each = partial(add, middle, in_place=True)
        if plan.gather == "layer" and plan.accumulate == "in_loop":
            return pools.apart(total, lambda *both: each(*both)[0], micro, times=many)
        if begin and end - begin == 1:  # without a loop XLA would overlap it with the first
            total = pools.apart(total, lambda *both: each(*both)[0], micro, first=1)
        elif begin < end:
            between = jax.tree.map(lambda x: x[begin:end], micro)
            total, _ = lax.scan(lambda *both: (each(*both)[0], None), total, between)
        if end == many:
            return total
        having, rest = with_sums(params, total[1], sent=True)
        total, last = (total[0], rest), partial(add, having, in_place=True)
        return pools.apart(total, lambda *both: last(*both)[0], micro, first=end)

    def losses(
        self,
        params: StepParams,
        micro: MicroBatches,
        token_info: TokenInfo,
        of: Terms = EVALUATED,
    ) -> Losses:
        terms = partial(self._terms, of=of)

        def add(total: Losses, micro: MicroBatches) -> tuple[Losses, None]:
            return jax.tree.map(jnp.add, total, terms(params, micro, token_info)[0]), None

        like, _ = jax.eval_shape(
            lambda: terms(params, jax.tree.map(lambda x: x[0], micro), token_info, traced=False)
        )
        return lax.scan(add, pools.wide_zeros(like), micro)[0]

    def gathered(self, params: StepParams) -> StepParams:
        return params

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
        model = self.blueprint.build(params)
        x, state = run_layers(model, batch, token_info, state)
        return of(model, x), state

    def _terms(
        self,
        params: StepParams,
        micro: MicroBatches,
        token_info: TokenInfo,
        *,
        of: Terms,
        **how: Any,
    ) -> tuple[Losses, GenerationState]:
        """The losses; of each stack the blocks that it holds, in the order of its parameters."""
        model = self.blueprint.build(params)
        token_info = micro.token_info(token_info)
        x, held = run_layers(model, micro.batch, token_info, **how)
        return of(model)(x, micro.batch, token_info), held
