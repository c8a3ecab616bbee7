"""The ways of a step's micro-batches through the model: all layers on each device, or by stages.

Two classes, one small interface: `Unpipelined` differentiates a scan over micro-batches,
`Pipelined` (pipelined.py) runs a pipeline's plan. Their methods run inside the shard_map, on
parameters that vary over all axes over which gradients are summed later. Losses and gradients that
they return are this device's partial sums.

Letters: M micro-batches, B batch, T position, V vocabulary, L layers.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.layers.dropout import Places, Segments
from jaxptd.models.model import Model, State, run_layers
from jaxptd.params import Blueprint, Params
from jaxptd.pipeline import pools
from jaxptd.step.batch import Batch
from jaxptd.zero.gathering import handles_of, with_handles
from jaxptd.zero.last import before_last, waits_for_last
from jaxptd.zero.narrowing import attached, with_wide_gradients
from jaxptd.zero.sums import added, fetches, with_sums
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
        def add(params: StepParams, total: tuple, micro: Micro) -> tuple:
            return self._with_gradients(params, total, micro, places, weights)

        def add_to_sums(params: StepParams, total: tuple, micro: Micro) -> tuple:
            having, rest = with_sums(params, total[1])
            return add(having, (total[0], rest), micro)

        def number(now: pools.Instruction) -> Micro:
            found: Micro = pools.get(micro, now["micro"])
            return found

        def each(total: tuple, now: pools.Instruction) -> tuple:
            return add_to_sums(params, total, number(now))

        def last(total: tuple, now: pools.Instruction) -> tuple:
            return add(having, total, number(now))

        terms = partial(self._terms, of=LOSSES)
        like = jax.eval_shape(terms, params, pools.get(micro, 0), places)
        params = with_wide_gradients(params, self.blueprint.infos)
        zeros = jax.tree.map(pools.zeros, {name: like[name] for name in weights})
        early, many = before_last(params), len(micro.sample)
        start = zeros, pools.wide_zeros(handles_of(early))
        if fetches(params):
            return pools.apart(start, {"micro": jnp.int32(0)}, each, times=many)
        waits = waits_for_last(params)
        others = jax.tree.map(lambda x: x[: many - waits], micro)
        total, _ = lax.scan(lambda *each: (add_to_sums(early, *each), None), start, others)
        if not waits:
            return total
        having, rest = with_sums(params, total[1])
        return pools.apart((total[0], rest), {"micro": jnp.int32(many - 1)}, last)

    def _with_gradients(
        self, params: StepParams, total: tuple, micro: Micro, places: Places, weights: Losses
    ) -> tuple:
        """Losses and gradients of handles with those of a micro-batch."""

        def loss(params: StepParams, handles: Params) -> tuple[Array, Losses]:
            given = attached(with_handles(params, handles)), micro, places
            return in_total(self._terms(*given, of=LOSSES), weights)

        gradient = jax.value_and_grad(partial(loss, params), has_aux=True)
        (_, found), gradients = gradient(handles_of(params))
        losses = jax.tree.map(jnp.add, total[0], found)
        return losses, added(params, total[1], gradients)

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
