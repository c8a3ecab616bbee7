"""A loop over layers that adds their gradients to sums, in one of several micro-batches.

What JAX makes of `lax.scan` stacks the gradients of all layers, and adds the stack to the sum over
micro-batches afterwards. Here a trip of backward adds a layer's as it has them: one stack less.

Letters: L layers.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.pipeline.model import LayerInputs
from jaxptd.pipeline.split_backward import TracedLayer, trace_layer
from jaxptd.zero import sums
from jaxptd.zero.gathering import as_layer, blocks_of
from jaxptd.zero.prefetching import Loop, Run, inputs_at, layer_at, with_backward


def summing(run: Run) -> Loop:
    """Makes a loop over a stack of layers of `run((layer, common), inputs, x) -> (x, cache)`.

    As `prefetching`, for a stack whose `Gatherable`s have whole blocks and sums to add to. For
    backward it keeps what `run` keeps, and no parameter.
    """

    def loop(stack: Any, common: Any, inputs: LayerInputs, x: Any) -> tuple[Any, Any]:
        def trip(x: Any, own: tuple[Any, ...]) -> tuple[Any, Any]:
            return run((own[0], common), LayerInputs(inputs.places, *own[1:]), x)

        return lax.scan(trip, x, (blocks_of(stack), *inputs[1:]))

    def forward(stack: Any, common: Any, inputs: LayerInputs, x: Any) -> tuple[tuple, Any]:
        params = layer_at(blocks_of(stack), 0), common
        traced, _ = trace_layer(run, params, inputs_at(inputs, 0), x)

        def trip(x: Any, i: Array) -> tuple[Any, list[Array]]:
            params = layer_at(blocks_of(stack), i), common
            (x, _), kept = traced.forward(params, inputs_at(inputs, i), x)
            return x, kept

        x, kept = lax.scan(trip, x, jnp.arange(len(inputs.number), dtype=jnp.int32))
        back = partial(_backward, traced)
        return (x, None), jax.tree_util.Partial(back, stack, common, inputs, kept)

    return with_backward(loop, forward)


def _backward(
    traced: TracedLayer, stack: Any, common: Any, inputs: LayerInputs, kept: Any, dy: Any
) -> tuple[Any, Any, Any]:
    """(sums with the gradients of the stack, gradients of common, of x)."""

    def trip(carry: tuple, each: tuple[Array, list[Array]]) -> tuple[tuple, None]:
        total, dx, found = carry
        i, kept = each
        params = layer_at(blocks_of(stack), i), common
        (of_layer, more), dx = traced.backward(kept, params, inputs_at(inputs, i), (dx, None))
        found = sums.with_layer(found, of_layer, stack, i)
        return (jax.tree.map(jnp.add, total, more), dx, found), None

    start = jax.tree.map(jnp.zeros_like, common), dy, sums.start(stack)
    numbers = jnp.arange(len(inputs.number), dtype=jnp.int32)
    (total, dx, found), _ = lax.scan(trip, start, (numbers, kept), reverse=True)
    return as_layer(stack, found), total, dx
