"""A layer's parameters, gathered or copied from the host only while it runs; figure in `zero.py`.

A layer's tree has a `LazyParam` for each such parameter. An example with three, u and w gathered
in bfloat16 and b in float32, whose shards have 6, 4 and 1 elements, on Z = 2 devices:

    gathered          the shards of u and w, [6] and [4], concatenated: [10]; one all-gather in
                      bfloat16: [2, 10]; its columns, [2, 6] and [2, 4], unflattened to the blocks
                      of u and w. The shard of b, [1]: another all-gather, in float32.
    regathered        the same for backward, behind barriers.
    reduce_scattered  gradients of the three blocks, in float32, flattened to [2, 6], [2, 4] and
                      [2, 1] and concatenated: [2, 11]; one reduce-scatter: [1, 11], the sums over
                      devices of this device's shards; its columns are the shards' gradients.

Parameters that vary over different mesh axes (sharded over tp, or not) make separate messages: the
result of a concatenation varies over the axes of all its operands. In a loop over layers a matrix
is a message of its own (`own_collective`), or trips would copy it into the message and out of it;
vectors are together, since many small messages take longer than their copies. Between unrolled
layers XLA moves messages, and joins those of several layers: there a layer has few.

With `layout.offload: parameters` shards are in host memory, and `gathered` copies a layer's to the
device first. Parameters that are not sharded are only copied. A gradient has the memory of the
device, so it belongs to a `grad_slot`, an array that nothing reads, and not to the array on the
host.

So do gradients in another precision than their parameters': of layers in a loop at stage 0, and of
tables outside the layers. There a `LazyParam` is neither gathered nor copied; see
`zero.py`.

Letters: L layers, Z devices along dp x cp, n elements of a block with its padding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.mesh import BATCH_AXES
from jaxptd.pipeline.pools import LayerInputs
from jaxptd.pipeline.split_backward import trace_layer
from jaxptd.zero.plan import ParamPlan
from jaxptd.zero.shards import ShardedInfo, on_device


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard", "grad_slot", "block", "sum"],
    meta_fields=["info", "plan"],
)
@dataclasses.dataclass(frozen=True)
class LazyParam:
    """A layer's parameter during a step, as a leaf of the layer's module until the layer runs.

    Args:
        shard: this device's shard, `[L, n/Z]`, or `[n/Z]` of one layer; without `info` the block.
            On the device, or on the host.
        grad_slot: what the gradient belongs to, an array of its shape and type; nothing reads it.
        block: the gathered block, if it was gathered before.
        info: how the block is sharded; None: not at all.
        plan: what this micro-batch does with it.
        sum: of the gradients in the micro-batches before, if a loop adds to it, or the last
            micro-batch reduces it: of gradient slots, or of blocks. See `zero.py`.
    """

    shard: Array
    grad_slot: Array
    block: Array | None
    info: ShardedInfo | None
    plan: ParamPlan
    sum: Array | None = None


def grad_slot(like: Array, plan: ParamPlan, shape: tuple[int, ...] | None = None) -> Array:
    """Zeros that a gradient belongs to, which vary as `like`; shape: like its own if None."""
    zeros = jnp.zeros(like.shape if shape is None else shape, plan.grad_dtype)
    return as_varying(zeros, sorted(varying_axes(like)))


def is_lazy(leaf: Any) -> bool:
    """True for a `LazyParam`."""
    return isinstance(leaf, LazyParam)


def blocks_of(stack: Any) -> Any:
    """A stack of whole blocks: the shard of each `LazyParam`."""
    return jax.tree.map(lambda leaf: leaf.shard if is_lazy(leaf) else leaf, stack, is_leaf=is_lazy)


# ---- one layer ----------------------------------------------------------------------------------


def gathered(layer: Any) -> Any:
    """Replaces each `LazyParam` of a layer by its block: one all-gather for each group."""
    return with_gathered(layer, missing_blocks(layer))


def regathered(layer: Any) -> Any:
    """Gathers a layer again, for backward."""
    return gathered(behind_barriers(layer))


def missing_blocks(layer: Any) -> list[Array]:
    """Gathers the blocks of the `LazyParam`s that have none, in the order of the leaves."""
    every = jax.tree.leaves(layer, is_leaf=is_lazy)
    leaves = [leaf for leaf in every if is_lazy(leaf) and leaf.block is None]
    blocks = []
    for leaf in leaves:
        shard = on_device(leaf.shard) if leaf.plan.where == "host" else leaf.shard
        blocks.append(shard.astype(leaf.plan.gather_dtype))
    sharded = [i for i, leaf in enumerate(leaves) if leaf.info is not None]
    for group in _groups(leaves, sharded, lambda i: (blocks[i], leaves[i].plan.gather_dtype)):
        rows = lax.all_gather(jnp.concatenate([blocks[i] for i in group]), BATCH_AXES)
        columns = _split(rows, [leaves[i].info.shard_size for i in group])
        for i, flat in zip(group, columns, strict=True):
            blocks[i] = leaves[i].info.unflatten(flat.reshape(-1))
    return blocks


def with_gathered(layer: Any, blocks: Sequence[Array]) -> Any:
    """Replaces each `LazyParam` by its block; blocks: what `missing_blocks` gathered."""
    following = iter(blocks)

    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    there = [leaf.block if is_lazy(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, [next(following) if x is None else x for x in there])


def zeros_for_gathered(stack: Any, blocks: Sequence[Array]) -> list[Array]:
    """Zeros `[L, ...]` for the blocks of all layers, if they are held; else none.

    blocks: of one layer, as `missing_blocks` gathers them.
    """
    leaves = [leaf for leaf in jax.tree.leaves(stack, is_leaf=is_lazy) if leaf.block is None]
    return [
        as_varying(jnp.zeros((len(leaf.shard), *block.shape), block.dtype), varying_axes(block))
        for leaf, block in zip(leaves, blocks, strict=True)
        if leaf.plan.gather == "first_microbatch"
    ]


def with_blocks(stack: Any, held: Sequence[Array]) -> Any:
    """A stack whose held blocks are there; held: these blocks, `[L, ...]`."""
    if not held:
        return stack
    leaves, tree = jax.tree.flatten(stack, is_leaf=is_lazy)
    blocks = zip(leaves, held, strict=True)
    return jax.tree.unflatten(tree, [dataclasses.replace(x, block=block) for x, block in blocks])


def behind_barriers(layer: Any) -> Any:
    """A layer for `missing_blocks` in backward, from which XLA gathers again.

    Without barriers XLA would find that forward gathered the same, and keep that result. Each array
    has a barrier of its own: all results of one barrier vary over the same axes.
    """
    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    barrier = partial(jax.tree.map, lax.optimization_barrier)
    return jax.tree.unflatten(tree, [barrier(leaf) if is_lazy(leaf) else leaf for leaf in leaves])


def reduce_scattered(gradients: Any, layer: Any) -> Any:
    """Gradients of `gathered(layer)` -> `grad_slots_of(layer)`: a reduce-scatter for each group.

    Gradients of shards are summed over Z; those of blocks and of other leaves stay as they are.
    """
    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    grads = jax.tree.leaves(gradients)
    scattered = []
    for i, leaf in enumerate(leaves):
        if is_lazy(leaf):
            grads[i] = grads[i].astype(leaf.grad_slot.dtype)
            if leaf.plan.reduce == "last_microbatch":  # those of the micro-batches before, too
                grads[i] = leaf.sum + grads[i]
            scattered += [i] if leaf.plan.reduce != "end" else []
    for group in _groups(leaves, scattered, lambda i: (leaves[i].grad_slot, grads[i].dtype)):
        flats = [leaves[i].info.flatten(grads[i]) for i in group]
        widths = [leaves[i].info.shard_size for i in group]
        rows = [flat.reshape(-1, n) for flat, n in zip(flats, widths, strict=True)]
        sums = lax.psum_scatter(jnp.concatenate(rows, axis=1), BATCH_AXES, tiled=True)
        for i, shard in zip(group, _split(sums, widths), strict=True):
            grads[i] = shard.reshape(-1)
    return jax.tree.unflatten(tree, grads)


def _groups(
    leaves: Sequence[Any], indices: Sequence[int], key: Callable[[int], tuple[Array, Any]]
) -> list[list[int]]:
    """Groups indices of leaves by precision, and by the axes over which their arrays vary.

    Each leaf that is alone makes a group of its own; not one whose gradients the last micro-batch
    scatters: the kernel that adds them up writes the message.
    """
    groups: dict[Any, list[int]] = {}
    for i in indices:
        array, dtype = key(i)
        plan, alike = leaves[i].plan, (varying_axes(array), jnp.dtype(dtype))
        alone = plan.own_collective and plan.reduce != "last_microbatch"
        groups.setdefault(i if alone else alike, []).append(i)
    return list(groups.values())


def _split(rows: Array, widths: list[int]) -> list[Array]:
    """[Z, sum of widths] -> one array of columns for each width."""
    ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    return jnp.split(rows, ends, axis=1)


def with_gathering(
    run: Callable[[Any, LayerInputs, Any], Any],
) -> Callable[[Any, LayerInputs, Any], Any]:
    """Makes `run(layer, inputs, x)` gather the layer's parameters, and free them afterwards.

    For backward it keeps what `run` keeps, but no parameter: backward gathers the layer again.
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
    """Gradients in the layer's tree, in its slots; those of shards are None, which is zero."""
    tree: Any
    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    given = [
        dataclasses.replace(leaf, grad_slot=g, shard=None, block=None, sum=None)
        if is_lazy(leaf)
        else g
        for leaf, g in zip(leaves, tree.flatten_up_to(gradients), strict=True)
    ]
    return jax.tree.unflatten(tree, given)
