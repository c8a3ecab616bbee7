"""Parameters that are sharded over data parallel devices: in the state, and in a layer that runs.

The block that layers hold on a device is flattened and split into one shard for each device along
dp x cp, all of the same size, the last ones padded with zeros: any shape splits evenly.

A layer's parameters are gathered, or copied from the host, only while it runs (figure in
`zero.py`). Its tree has a `LazyParam` for each of them. An example with three, u and w gathered
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
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import compute_on, layout
from jax.typing import ArrayLike, DTypeLike

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.layout import BATCH_AXES
from jaxptd.params import ParamInfo
from jaxptd.zero.plan import ParamPlan, ShardShape


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedInfo(ShardShape):
    """Describes a sharded parameter, and converts its arrays."""

    info: ParamInfo

    def from_stacked(self, x: Array) -> Array:
        """Stacked -> the state's form."""
        return self._flatten_all(self.info.from_stacked(x))

    def from_canonical(self, x: ArrayLike) -> Array:
        """Canonical -> the state's form."""
        return self._flatten_all(self.info.from_canonical(x))

    def to_canonical(self, x: Array) -> Array:
        """The state's form -> canonical."""
        return self.info.to_canonical(self._unflatten_all(x))

    def _flatten_all(self, x: Array) -> Array:
        """The form of layers -> the state's form, both global."""
        lead = self.info.stored_shape[: self.lead]
        pairs = itertools.chain.from_iterable(zip(self._splits, self.block_shape, strict=True))
        blocks = x.reshape(*lead, *pairs).transpose(self._order)
        return self.flatten(blocks.reshape(*lead, -1, *self.block_shape)).reshape(self.stored_shape)

    def _unflatten_all(self, x: Array) -> Array:
        """The state's form -> the form of layers, both global."""
        lead = self.info.stored_shape[: self.lead]
        blocks = self.unflatten(x.reshape(*lead, -1, self.padded_size))
        blocks = blocks.reshape(*lead, *self._splits, *self.block_shape)
        return blocks.transpose(np.argsort(self._order)).reshape(self.info.stored_shape)

    @property
    def _order(self) -> list[int]:
        """[.., split, block, split, block] -> [.., split, split, block, block]."""
        end = self.lead + 2 * len(self.block_shape)
        return [*range(self.lead), *range(self.lead, end, 2), *range(self.lead + 1, end, 2)]

    # ---- on a device ----------------------------------------------------------------------------

    def gather(self, shard: Array, dtype: DTypeLike) -> Array:
        """shard[.., n/Z] -> the block, all-gathered in `dtype`. Partner: `reduce_scatter`."""
        flat = lax.all_gather(shard.astype(dtype), BATCH_AXES, axis=shard.ndim - 1, tiled=True)
        return self.unflatten(flat)

    def reduce_scatter(self, gradient: Array) -> Array:
        """The block's gradient -> this shard of its sum over Z. Partner: `gather`."""
        flat = self.flatten(gradient)
        return lax.psum_scatter(flat, BATCH_AXES, scatter_dimension=flat.ndim - 1, tiled=True)

    def local_shape(self, shard: Array) -> tuple[int, ...]:
        """The shape of the block, or of all layers' blocks, that a shard is of."""
        return (*shard.shape[:-1], *self.block_shape)

    def unflatten(self, flat: Array) -> Array:
        """[.., n] -> the block, without the padding."""
        size = math.prod(self.block_shape)
        return flat[..., :size].reshape(*flat.shape[:-1], *self.block_shape)

    def flatten(self, block: Array) -> Array:
        """The block -> [.., n], padded."""
        lead = block.shape[: block.ndim - len(self.block_shape)]
        rows = block.reshape(*lead, -1)
        return jnp.pad(rows, [(0, 0)] * len(lead) + [(0, self.padded_size - rows.shape[-1])])


# ---- shards in the host's memory -----------------------------------------------------------------
# Copies between host and device memory, and functions that the host's CPUs compute.
#
# The memory of an array is in its JAX type.


def is_on_host(x: Array) -> bool:
    """True for an array in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def on_device(tree: Any) -> Any:
    """Copies arrays in host memory to the device; others are as they were."""

    def copied(x: Array) -> Array:
        return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x

    return jax.tree.map(copied, tree)


def on_host(tree: Any) -> Any:
    """Copies arrays on the device to host memory; others are as they were."""

    def copied(x: Array) -> Array:
        return x if is_on_host(x) else jax.device_put(x, jax.memory.Space.Host)

    return jax.tree.map(copied, tree)


def computed_on_host(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, computed by the host's CPUs; its results are in host memory."""
    run: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)  # 0.10.2 has the first
    computed = run(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return computed(*on_host(jax.tree.map(_by_rows, arguments)))


def _by_rows(x: Array) -> Array:
    """x with its last dim the fastest; XLA for GPUs refuses to give the host another layout."""
    if is_on_host(x):
        return x
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


# ---- parameters of a layer, gathered while it runs -----------------------------------------------


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard", "grad_slot", "block", "sum"],
    meta_fields=["info", "plan"],
)
@dataclasses.dataclass(frozen=True)
class LazyParam:
    """A layer's parameter during a step, as a leaf of the layer's module until the layer runs.

    Args:
        shard: this device's shard, `[L, n/Z]`, or `[n/Z]` of one layer; without `info` the block on
            the host. None where the block is there.
        grad_slot: what the gradient belongs to, an array of its shape and type; nothing reads it.
        block: the block, if it is there: gathered before, or never in shards.
        info: how the block is sharded; None: not at all.
        plan: what this micro-batch does with it.
        sum: of the gradients in the micro-batches before, if a loop adds to it, or the last
            micro-batch reduces it: of gradient slots, or of blocks. See `zero.py`.
    """

    shard: Array | None
    grad_slot: Array
    block: Array | None
    info: ShardedInfo | None
    plan: ParamPlan
    sum: Array | None = None


def grad_slot(like: Array, plan: ParamPlan, shape: tuple[int, ...] | None = None) -> Array:
    """Zeros that a gradient belongs to, which vary as `like`; shape: like its own if None."""
    zeros = jnp.zeros(like.shape if shape is None else shape, plan.grad_dtype)
    return as_varying(zeros, sorted(varying_axes(like)))


def with_grad_slot(block: Array, plan: ParamPlan) -> LazyParam:
    """A block that is there, whose gradient belongs to a slot."""
    return LazyParam(None, grad_slot(block, plan), block, None, plan)


def is_lazy(leaf: Any) -> bool:
    """True for a `LazyParam`."""
    return isinstance(leaf, LazyParam)


Read = Callable[[Array], Array]


def gathered(layer: Any) -> Any:
    """Replaces each `LazyParam` of a layer by its block: one all-gather for each group."""
    return with_gathered(layer, missing_blocks(layer))


def regathered(layer: Any) -> Any:
    """Gathers a layer again, for backward."""
    return gathered(behind_barriers(layer))


def missing_blocks(layer: Any, read: Read = lambda x: x) -> list[Array]:
    """Gathers the blocks of the `LazyParam`s that have none, in the order of the leaves.

    read: gives a layer's array of one in `layer`, which may be a stack.
    """
    every = jax.tree.leaves(layer, is_leaf=is_lazy)
    leaves = [leaf for leaf in every if is_lazy(leaf) and leaf.block is None]
    blocks = []
    for leaf in leaves:
        shard = on_device(read(leaf.shard)) if leaf.plan.where == "host" else read(leaf.shard)
        blocks.append(shard.astype(leaf.plan.gather_dtype))
    sharded = [i for i, leaf in enumerate(leaves) if leaf.info is not None]
    for group in _groups(leaves, sharded, lambda i: (blocks[i], leaves[i].plan.gather_dtype)):
        rows = lax.all_gather(jnp.concatenate([blocks[i] for i in group]), BATCH_AXES)
        columns = _split(rows, [leaves[i].info.shard_size for i in group])
        for i, flat in zip(group, columns, strict=True):
            blocks[i] = leaves[i].info.unflatten(flat.reshape(-1))
    return blocks


def with_gathered(layer: Any, blocks: Sequence[Array], read: Read = lambda x: x) -> Any:
    """Replaces each `LazyParam` by its block; blocks: what `missing_blocks` gathered."""
    following = iter(blocks)
    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    there = [leaf.block if is_lazy(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, [next(following) if x is None else read(x) for x in there])


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
