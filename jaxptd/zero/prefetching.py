"""A loop over layers that moves parameters and gradients while other layers compute.

A collective in a trip of a loop whose result the same trip needs has nothing to run beside. So a
trip gathers the layer that the *next* trip runs, and reduce-scatters the gradients that the *last*
trip computed: both depend on nothing of the trip itself. With L = 4 layers (G gathers a layer, R
reduce-scatters its gradients; what is above each other runs at the same time):

    forward         | trip 0 | trip 1 | trip 2 |
           G0       |   G1   |   G2   |   G3   |
                    |  run 0 |  run 1 |  run 2 | run 3

    backward        | trip 2 | trip 1 | trip 0 |
           G2       | G1, R3 | G0, R2 | G0, R1 | R0
           back 3   | back 2 | back 1 | back 0 |

In backward G waits for the gradient of x that enters the trip, and the one that leaves it for R:
where XLA joins two trips of a loop that fetches layers, they still move one layer at a time.

The last layer runs outside of the loop: forward has nothing left to gather under it, backward
nothing yet to reduce-scatter, and its parameters stay for backward. So each layer is gathered twice
and its gradients are sent once, as without the loop. (Layer 0 is gathered once in vain: all trips
of a loop do the same.) Beside the layer that runs a device has another's parameters and gradients.

With ZeRO 1 and 2 forward of the first micro-batch does the same, but holds the blocks of all
layers, so that backward and other micro-batches gather nothing (`zero.py`).

Letters: L layers, Z devices along dp x cp, n elements of a block with its padding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import after
from jaxptd.pipeline.pools import LayerInputs
from jaxptd.pipeline.split_backward import TracedLayer, trace_layer
from jaxptd.zero.gathering import (
    as_layer,
    behind_barriers,
    blocks_of,
    missing_blocks,
    reduce_scattered,
    with_blocks,
    with_gathered,
    zeros_for_gathered,
)
from jaxptd.zero.zero import begun

LayerFunction = Callable[[tuple[Any, Any], LayerInputs, Any], tuple[Any, Any]]
Loop = Callable[[Any, Any, LayerInputs, Any], tuple[Any, Any]]


def prefetching(run: LayerFunction) -> Loop:
    """Makes a loop over a stack of layers of `run((layer, common), inputs, x) -> (x, cache)`.

    The loop is (stack, common, inputs, x) -> (x, caches). `stack` has parameters `[L, ...]`, each a
    `LazyParam`, and common what all layers read; number and cache of the inputs are `[L, ...]`,
    their places are for all layers. For backward it keeps what `run` keeps, and of the parameters
    those of the last layer; or of all layers where blocks are held, which are in caches' place.
    """

    def loop(stack: Any, common: Any, inputs: LayerInputs, x: Any) -> tuple[Any, Any]:
        blocks = missing_blocks(layer_at(stack, 0))
        start = x, blocks, zeros_for_gathered(stack, blocks)
        (x, _, held), first, last = _forward(run, (stack, common), inputs, start)
        if held:
            return x, held
        return x, jax.tree.map(lambda some, one: jnp.concatenate([some, one[None]]), first, last)

    def forward(stack: Any, common: Any, inputs: LayerInputs, x: Any) -> tuple[tuple, Any]:
        first = missing_blocks(layer_at(stack, 0))
        params = with_gathered(layer_at(stack, 0), first), common
        traced, _ = trace_layer(run, params, inputs_at(inputs, 0), x)

        def one(params: tuple[Any, Any], inputs: LayerInputs, x: Any) -> tuple[Any, list[Array]]:
            (x, _), kept = traced.forward(params, inputs, x)
            return x, kept

        start = x, first, zeros_for_gathered(stack, first)
        (x, blocks, held), *kept = _forward(one, (stack, common), inputs, start)
        stack, blocks = with_blocks(stack, held), [] if held else blocks
        back = partial(_backward, traced)
        return (x, held or None), jax.tree_util.Partial(back, stack, common, inputs, blocks, kept)

    return with_backward(loop, forward)


def with_backward(loop: Loop, forward: Callable[..., tuple[tuple, Callable]]) -> Loop:
    """A loop with a backward pass: what `forward`, in its place, gives beside its results.

    That is dy -> gradients of the loop's arguments.
    """
    differentiated: Any = jax.custom_vjp(loop)
    differentiated.defvjp(forward, lambda back, dy: back(dy))
    both_ways: Loop = differentiated
    return both_ways


def _forward(
    run: LayerFunction,
    params: tuple[Any, Any],
    inputs: LayerInputs,
    start: tuple[Any, list[Array], list[Array]],
) -> tuple[tuple[Any, list[Array], list[Array]], Any, Any]:
    """(x, blocks of the last layer, held blocks), results of layers before the last, its result.

    params: of the stack and common. start: x, the gathered blocks of the first layer, and room for
    the blocks that are held.
    """
    stack, common = params

    def layer(x: Any, blocks: list[Array], i: Any) -> tuple[Any, Any]:
        params = with_gathered(layer_at(stack, i), blocks), common
        return run(params, inputs_at(inputs, i), x)

    def hold(held: list[Array], blocks: list[Array], i: Any) -> list[Array]:
        pairs = zip(held, blocks, strict=bool(held))
        return [lax.dynamic_update_index_in_dim(of_all, one, i, 0) for of_all, one in pairs]

    def trip(carry: tuple[Any, list[Array], list[Array]], i: Array) -> tuple[tuple, Any]:
        x, blocks, held = carry
        following = missing_blocks(layer_at(stack, i + 1))
        x, result = layer(x, blocks, i)
        return (x, following, hold(held, following, i + 1)), result

    x, blocks, held = start
    end = len(inputs.number) - 1
    start = x, blocks, hold(held, blocks, 0)
    (x, blocks, held), results = lax.scan(trip, start, jnp.arange(end, dtype=jnp.int32))
    x, last = layer(x, blocks, end)
    return (x, blocks, held), results, last


def _backward(
    traced: TracedLayer, stack: Any, common: Any, inputs: LayerInputs, *saved: Any
) -> tuple[Any, Any, None, Any]:
    """(gradients of the stack, of common, none, of x); saved: last blocks, kept arrays, dy."""
    blocks, (kept, of_last), (dy, _) = saved
    end = len(inputs.number) - 1

    def back(i: Any, blocks: list[Array], kept: list[Array], dx: Any) -> tuple[Any, ...]:
        """(blocks of the layer before, gradients of layer i, of common, of x)."""
        row = layer_at(stack, jnp.maximum(i - 1, 0)) if blocks else []  # else all are held
        before = missing_blocks(after(behind_barriers(row), dx))
        params = with_gathered(layer_at(stack, i), blocks), common
        of_params, dx = traced.backward(kept, params, inputs_at(inputs, i), (dx, None))
        return before, *of_params, dx

    # Outside of a loop XLA would keep what forward computed, and not compute it again.
    blocks, of_last = jax.tree.map(lax.optimization_barrier, (blocks, of_last))
    last = back(end, blocks, of_last, dy)
    empty, put = begun(stack)

    def send(sums: Any, gradients: Any, i: Any) -> tuple[Any, Any]:
        """(the stack's gradients with those of layer i, what is sent of these)."""
        sent = reduce_scattered(gradients, layer_at(stack, i))
        return put(sums, sent, i), sent

    def trip(carry: tuple, each: tuple[Array, list[Array]]) -> tuple[tuple, None]:
        blocks, gradients, total, dx, sums = carry
        i, kept = each
        blocks, of_layer, of_common, dx = back(i, blocks, kept, dx)
        sums, sent = send(sums, gradients, i + 1)
        dx = after(dx, sent) if blocks else dx
        return (blocks, of_layer, jax.tree.map(jnp.add, total, of_common), dx, sums), None

    others = jnp.arange(end, dtype=jnp.int32), kept
    (_, gradients, total, dx, total_sums), _ = lax.scan(trip, (*last, empty), others, reverse=True)
    return as_layer(stack, send(total_sums, gradients, 0)[0]), total, None, dx


def layer_at(stack: Any, i: Any) -> Any:
    """Layer i of a stack."""
    return jax.tree.map(partial(lax.dynamic_index_in_dim, index=i, keepdims=False), stack)


def inputs_at(inputs: LayerInputs, i: Any) -> LayerInputs:
    """The inputs of layer i."""
    return LayerInputs(inputs.token_info, *layer_at(inputs[1:], i))


# ---- a loop that adds gradients to sums ----------------------------------------------------------
# A loop over layers that adds their gradients to sums, in one of several micro-batches.
#
# What JAX makes of `lax.scan` stacks the gradients of all layers, and adds the stack to the sum
# over micro-batches afterwards. Here a trip of backward adds a layer's as it has them: one stack
# less.
#
# Letters: L layers.


def accumulating_scan(run: LayerFunction) -> Loop:
    """Makes a loop over a stack of layers of `run((layer, common), inputs, x) -> (x, cache)`.

    As `prefetching`, for a stack whose `LazyParam`s have whole blocks and sums to add to. For
    backward it keeps what `run` keeps, and no parameter.
    """

    def loop(stack: Any, common: Any, inputs: LayerInputs, x: Any) -> tuple[Any, Any]:
        def trip(x: Any, per_layer: tuple[Any, ...]) -> tuple[Any, Any]:
            return run((per_layer[0], common), LayerInputs(inputs.token_info, *per_layer[1:]), x)

        return lax.scan(trip, x, (blocks_of(stack), *inputs[1:]))

    def forward(stack: Any, common: Any, inputs: LayerInputs, x: Any) -> tuple[tuple, Any]:
        params = layer_at(blocks_of(stack), 0), common
        traced, _ = trace_layer(run, params, inputs_at(inputs, 0), x)

        def trip(x: Any, i: Array) -> tuple[Any, list[Array]]:
            params = layer_at(blocks_of(stack), i), common
            (x, _), kept = traced.forward(params, inputs_at(inputs, i), x)
            return x, kept

        x, kept = lax.scan(trip, x, jnp.arange(len(inputs.number), dtype=jnp.int32))
        back = partial(_backward_adding, traced)
        return (x, None), jax.tree_util.Partial(back, stack, common, inputs, kept)

    return with_backward(loop, forward)


def _backward_adding(
    traced: TracedLayer, stack: Any, common: Any, inputs: LayerInputs, kept: Any, dy: Any
) -> tuple[Any, Any, None, Any]:
    """(sums with the gradients of the stack, gradients of common, none, of x)."""
    start = jax.tree.map(jnp.zeros_like, common), dy[0]
    empty, put = begun(stack)

    def trip(carry: tuple, each: tuple[Array, list[Array]]) -> tuple[tuple, None]:
        total, dx, sums = carry
        i, kept = each
        params = layer_at(blocks_of(stack), i), common
        (of_layer, of_common), dx = traced.backward(kept, params, inputs_at(inputs, i), (dx, None))
        sums = put(sums, of_layer, i)
        return (jax.tree.map(jnp.add, total, of_common), dx, sums), None

    numbers = jnp.arange(len(inputs.number), dtype=jnp.int32)
    (total, dx, total_sums), _ = lax.scan(trip, (*start, empty), (numbers, kept), reverse=True)
    return as_layer(stack, total_sums), total, None, dx
