"""The layers of a stack, one after another: scanned, or unrolled.

XLA moves collectives between unrolled layers, but not between iterations of a loop. So a loop that
gathers layers, or reduce-scatters their gradients, overlaps that with other layers itself
(`traced_loop`). The same loop adds gradients to those of the micro-batches before.

A collective whose result the same iteration needs has nothing to overlap with. So an iteration
gathers the layer that the *next* one runs, and reduce-scatters the gradients that the *last* one
computed. Neither depends on the iteration itself. With L = 4 layers (G gathers a layer, R
reduce-scatters its gradients; entries above each other run at the same time):

    forward         | iter 0 | iter 1 | iter 2 |
           G0       |   G1   |   G2   |   G3   |
                    |  run 0 |  run 1 |  run 2 | run 3

    backward        | iter 2 | iter 1 | iter 0 |
           G2       | G1, R3 | G0, R2 | G0, R1 | R0
           back 3   | back 2 | back 1 | back 0 |

In backward G waits for the gradient of x that enters the iteration, and the one that leaves it
waits for R. Where XLA joins two iterations of a loop that fetches layers, they still move one layer
at a time.

The last layer runs outside of the loop: forward has nothing left to gather during it, backward has
nothing to reduce-scatter yet, and its parameters stay for backward. So each layer is gathered twice
and its gradients are sent once, as without the loop. (Layer 0 is gathered once too often, because
all iterations do the same.) Besides the layer that runs, a device holds the parameters and
gradients of one more.

With ZeRO 1 and 2 forward of the first micro-batch does the same, but holds the blocks of all
layers, so that backward and other micro-batches gather nothing (`zero.py`).

A loop that moves nothing but adds to sums runs all layers, and each iteration of backward adds its
layer's gradients. JAX's derivative of `lax.scan` would stack the gradients of all layers and then
add the stack to the sum over micro-batches, which takes one more stack.

Letters: L layers, Z devices along the batch's axes, n elements of a block with its padding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import after
from jaxptd.pipeline import pools
from jaxptd.pipeline.pools import LayerInputs, X
from jaxptd.pipeline.split_backward import TracedLayer, trace_layer
from jaxptd.remat import with_remat
from jaxptd.zero.plan import WHOLE
from jaxptd.zero.zero import (
    behind_barriers,
    gathered,
    is_lazy,
    missing_blocks,
    of_trained,
    read_with_slot,
    reduce_scattered,
    regathered,
    with_blocks,
    with_gathered,
    zeros_for_gathered,
)

LAYERS = "layers"  # named scope of the loop over layers
LayerFunction = Callable[[tuple[Any, Any], LayerInputs, Any], tuple[Any, Any]]


def run_blocks(
    blocks: Any,
    x: X,
    token_info: Any,
    *,
    cache: Any,
    scanned: bool,
    offload: bool = False,
    common: Any = None,
    first: int,
) -> tuple[X, Any]:
    """x -> x after all layers of a stack, scanned or unrolled.

    Args:
        blocks: the stack; its `remats` say what its layers recompute in backward.
        x: before its first layer.
        token_info: of the tokens.
        cache: the layers' state, arrays with a leading dim L; None without any.
        scanned: whether layers run in a loop.
        offload: whether `remat: dots` saves to host memory.
        common: parameters that all layers read.
        first: the number of the first layer in the model.
    """
    counts = [count for _, count in blocks.remats]
    layer_L = jnp.arange(first, first + sum(counts), dtype=jnp.int32)
    stacks = _split((blocks, layer_L, cache), counts)
    caches = []

    def plain(params: tuple[Any, Any], inputs: LayerInputs, x: X, **others: Any) -> tuple[X, Any]:
        result: tuple[X, Any] = params[0](x, *inputs, params[1], **others)
        return result

    for (remat, count), (stack, number_L, layer_inputs) in zip(blocks.remats, stacks, strict=True):
        run = plain
        if remat != "none":
            in_scan = scanned and count > 1  # XLA runs one iteration without a loop
            wrap = partial(with_remat, remat=remat, scanned=in_scan, offload=offload)
            inside = getattr(blocks, "recomputes_inside", False)
            run = partial(plain, wrap=wrap) if inside else wrap(plain)
        inputs = LayerInputs(token_info, number_L, layer_inputs)
        with jax.named_scope(LAYERS):
            x, new = _in_turn(run, (stack, common), inputs, x, scanned=scanned)
        caches.append(new)
    return x, jax.tree.map(lambda *each: jnp.concatenate(each), *caches)


def _in_turn(
    run: LayerFunction, params: tuple[Any, Any], inputs: LayerInputs, x: X, *, scanned: bool
) -> tuple[X, Any]:
    """(x, caches) after `run((layer, common), inputs, x) -> (x, cache)` for each layer of a stack.

    params: of the stack, whose leaves have plans that differ in precision only, and common.
    inputs: their number and cache are `[L, ...]`.
    """
    leaf = jax.tree.leaves(params[0], is_leaf=is_lazy)[0]
    plan = leaf.plan if is_lazy(leaf) else WHOLE
    if scanned and plan.traces_layers:
        return traced_loop(run, ahead=int(plan.moves))(params, inputs, x)
    each = with_gathering(run) if plan.moves else run

    def layer(x: X, of_layer: tuple[Any, Array, Any]) -> tuple[X, Any]:
        layer_params, number, cache = of_layer
        if not plan.moves:  # whole, with gradients in a precision of their own
            layer_params = jax.tree.map(read_with_slot, layer_params, is_leaf=is_lazy)
        return each((layer_params, params[1]), LayerInputs(inputs.token_info, number, cache), x)

    over: Any = lax.scan if scanned else _unrolled
    results: tuple[X, Any] = over(layer, x, (params[0], inputs.number, inputs.cache))
    return results


def _unrolled(run: Any, x: X, xs: Any) -> tuple[X, Any]:
    """Runs `run` over the leading dim of xs as `lax.scan` does, without a loop.

    x is written to memory before the first layer, as before a loop: a matmul can add a layer's
    input to its result as it writes, but XLA allows that only if the input is in memory.
    """
    results, x = [], lax.optimization_barrier(x)
    for block in _split(xs, [1] * len(jax.tree.leaves(xs)[0])):
        x, result = run(x, jax.tree.map(lambda a: a[0], block))
        results.append(result)
    return x, jax.tree.map(lambda *each: jnp.stack(each), *results)


def _split(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Splits arrays `[L, ...]` along L; the transpose is one concatenation, not padded sums."""
    if len(sizes) == 1:
        return [tree]
    leaves, treedef = jax.tree.flatten(tree)
    pieces = zip(*(lax.split(x, sizes) for x in leaves), strict=True)
    return [jax.tree.unflatten(treedef, piece) for piece in pieces]


# ---- an unrolled layer that gathers its own parameters -------------------------------------------


def with_gathering(
    run: Callable[[Any, LayerInputs, Any], Any],
) -> Callable[[Any, LayerInputs, Any], Any]:
    """Makes `run(layer, inputs, x)` gather the layer's parameters, and free them afterwards.

    It saves for backward what `run` saves, except parameters, which backward gathers again.
    """

    @jax.custom_vjp
    def gathering(layer: Any, inputs: LayerInputs, x: Array) -> Any:
        return run(gathered(layer), inputs, x)

    def forward(layer: Any, inputs: LayerInputs, x: Array) -> tuple[Any, tuple]:
        blocks = gathered(layer)
        traced, _ = trace_layer(run, blocks, inputs, x)
        y, kept = traced.forward(blocks, inputs, x)
        return y, (jax.tree_util.Partial(traced.backward, kept), layer, inputs)

    def backward(residuals: tuple, dy: Any) -> tuple:
        back, layer, inputs = residuals
        gradients, dx = back(regathered(layer), inputs, dy)
        return as_layer(layer, reduce_scattered(gradients, layer)), None, dx

    gathering.defvjp(forward, backward)
    return gathering


def as_layer(layer: Any, gradients: Any) -> Any:
    """Puts gradients into the slots of a layer's tree; its other arrays are None, which is zero."""
    tree: Any
    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    given = [
        dataclasses.replace(leaf, grad_slot=g, shard=None, block=None, sum=None)
        if is_lazy(leaf)
        else g
        for leaf, g in zip(leaves, tree.flatten_up_to(gradients), strict=True)
    ]
    return jax.tree.unflatten(tree, given)


# ---- a loop that traces its layers' backward pass itself -----------------------------------------

Loop = Callable[[tuple[Any, Any], LayerInputs, Any], tuple[Any, Any]]


def traced_loop(run: LayerFunction, *, ahead: int) -> Loop:
    """Makes a loop (params, inputs, x) -> (x, caches), as `_in_turn`, over layers of `LazyParam`s.

    It saves for backward what `run` saves, and the gathered parameters of the last layer. If the
    micro-batch holds blocks, it saves those of all layers and returns them instead of caches.

    ahead: 1 if an iteration gathers the next layer and sends the gradients of the last one; 0 if
    nothing moves.
    """

    def loop(params: tuple[Any, Any], inputs: LayerInputs, x: Any) -> tuple[Any, Any]:
        start = x, missing_blocks(params[0], partial(layer_at, i=0))
        (x, _, held), first, last = _forward(
            lambda *each: (run(*each), ()), params, inputs, start, ahead=ahead
        )
        if held or not last:
            return x, held or first[0]
        both = jax.tree.map(lambda some, one: jnp.concatenate([some, one[None]]), first, last[0])
        return x, both[0]

    def forward(params: tuple[Any, Any], inputs: LayerInputs, x: Any) -> tuple[tuple, Any]:
        first = missing_blocks(params[0], partial(layer_at, i=0))
        traced, _ = trace_layer(run, *arguments_at(params, inputs, 0, first), x)
        (x, blocks, held), (_, kept), last = _forward(
            traced.forward, params, inputs, (x, first), ahead=ahead
        )
        params, blocks = (with_blocks(params[0], held), params[1]), [] if held else blocks
        back = partial(_backward, traced)
        return (x, held or None), jax.tree_util.Partial(back, params, inputs, blocks, kept, last)

    differentiated: Any = jax.custom_vjp(loop)
    differentiated.defvjp(forward, lambda back, dy: back(dy))
    both_ways: Loop = differentiated
    return both_ways


def layer_at(stack: Any, i: Any) -> Any:
    """Layer i of arrays `[L, ...]`."""
    return jax.tree.map(partial(lax.dynamic_index_in_dim, index=i, keepdims=False), stack)


def arguments_at(
    params: tuple[Any, Any], inputs: LayerInputs, i: Any, blocks: list[Array]
) -> tuple[tuple[Any, Any], LayerInputs]:
    """The arguments of layer i besides x; blocks: its gathered blocks."""
    stack, common = params
    layer = with_gathered(stack, blocks, partial(layer_at, i=i))
    return (layer, common), LayerInputs(inputs.token_info, *layer_at(inputs[1:], i))


def _forward(
    run: Callable[..., tuple[tuple[Any, Any], Any]],
    params: tuple[Any, Any],
    inputs: LayerInputs,
    start: tuple[Any, list[Array]],
    *,
    ahead: int,
) -> tuple[tuple[Any, list[Array], list[Array]], tuple[Any, Any], list[tuple[Any, Any]]]:
    """(x, blocks of the last layer, held blocks), results of the loop's layers, of the one after.

    Results are (cache, arrays saved for backward).

    run: returns ((x, cache), arrays to save). start: x, and the gathered blocks of the first layer.
    """
    (x, blocks), stack, end = start, params[0], len(inputs.number) - ahead
    held = zeros_for_gathered(stack, blocks)

    def hold(held: list[Array], blocks: list[Array], i: Any) -> list[Array]:
        pairs = zip(held, blocks, strict=bool(held))
        return [lax.dynamic_update_index_in_dim(of_all, one, i, 0) for of_all, one in pairs]

    def trip(carry: tuple[Any, list[Array], list[Array]], i: Array) -> tuple[tuple, Any]:
        x, blocks, held = carry
        following = missing_blocks(stack, partial(layer_at, i=i + 1))
        (x, cache), kept = run(*arguments_at(params, inputs, i, blocks), x)
        return (x, following, hold(held, following, i + 1)), (cache, kept)

    first = x, blocks, hold(held, blocks, 0)
    (x, blocks, held), results = lax.scan(trip, first, jnp.arange(end, dtype=jnp.int32))
    if not ahead:
        return (x, blocks, held), results, []
    (x, cache), kept = run(*arguments_at(params, inputs, end, blocks), x)
    return (x, blocks, held), results, [(cache, kept)]


def _backward(
    traced: TracedLayer, params: tuple[Any, Any], inputs: LayerInputs, *saved: Any
) -> tuple[tuple[Any, Any], None, Any]:
    """(gradients of the stack and of common, None, the gradient of x).

    saved: blocks of the last layer, arrays that the loop's layers saved, those of the layer after
    the loop if there is one, and dy.
    """
    blocks, kept, last, (dx, _) = saved
    (stack, common), end = params, len(inputs.number) - len(last)

    def back(i: Any, blocks: list[Array], kept: list[Array], dx: Any) -> tuple[Any, ...]:
        """(blocks of the layer before, gradients of layer i, of common, of x)."""
        before = []
        if blocks:  # else no layer is gathered
            row = layer_at(stack, jnp.maximum(i - 1, 0))
            before = missing_blocks(after(behind_barriers(row), dx))
        arguments = arguments_at(params, inputs, i, blocks)
        (of_layer, of_common), dx = traced.backward(kept, *arguments, (dx, None))
        return before, of_trained(of_layer, stack), of_common, dx

    first: tuple[Any, ...] = [], None, jax.tree.map(jnp.zeros_like, common), dx
    if last:  # outside of a loop XLA would keep forward's values and not recompute them
        blocks, of_last = jax.tree.map(lax.optimization_barrier, (blocks, last[0][1]))
        first = back(end, blocks, of_last, dx)
    # Gradients are added to sums, or written over zeros: the last micro-batch scatters their sums.
    puts = jax.tree.map(
        lambda leaf: (
            pools.put if leaf.sum is None or leaf.plan.reduce == "last_microbatch" else pools.add
        ),
        stack,
        is_leaf=is_lazy,
    )
    sums = jax.tree.map(_first_sum, puts, stack)

    def send(sums: Any, gradients: Any, i: Any) -> tuple[Any, Any]:
        """(the stack's gradients with those of layer i, the part of these that is sent)."""
        sent = reduce_scattered(gradients, layer_at(stack, i))
        return jax.tree.map(lambda put, pool, x: put(pool, x, i), puts, sums, sent), sent

    def trip(carry: tuple, each: tuple[Array, list[Array]]) -> tuple[tuple, None]:
        blocks, gradients, total, dx, sums = carry
        i, kept = each
        blocks, of_layer, of_common, dx = back(i, blocks, kept, dx)
        if last:
            sums, sent = send(sums, gradients, i + 1)
            dx = after(dx, sent) if blocks else dx
        else:
            sums = jax.tree.map(lambda put, pool, x: put(pool, x, i), puts, sums, of_layer)
            of_layer = None
        return (blocks, of_layer, jax.tree.map(jnp.add, total, of_common), dx, sums), None

    others = jnp.arange(end, dtype=jnp.int32), kept
    (_, gradients, total, dx, sums), _ = lax.scan(trip, (*first, sums), others, reverse=True)
    sums = send(sums, gradients, 0)[0] if last else sums
    return (as_layer(stack, sums), total), None, dx


def _first_sum(put: Callable, leaf: Any) -> Any:
    """The sum that a loop begins with for a parameter; None of a frozen one."""
    return jax.tree.map(jnp.zeros_like, leaf.grad_slot) if put is pools.put else leaf.sum
