"""ZeRO: state that data-parallel devices would duplicate, sharded over them.

From stage 1 on, the state (parameters, moments) is held in shards (`shards.py`). The stages differ
in how a step treats the layers' parameters w. Parameters outside the layers (embeddings, the last
norm, those that all layers read) are treated as at stage 1. `[=]` is a device's shard, `[====]` the
block that all Z shards make up, dw its gradient of one micro-batch:

    stage 0  forward     reads w[====]
             backward    reads w[====], adds dw[====] to a sum; a loop stacks its layers' gradients
                         in the precision that layers compute in

    stage 1  begin_step  w[=] -- all-gather --> w[====]
             forward     reads w[====]
             backward    reads w[====], adds dw[====] to a sum
             end_step    sum[====] -- reduce-scatter --> sum[=]

    stage 2  begin_step  w[=] -- all-gather --> w[====]
             forward     reads w[====]
             backward    reads w[====]; dw[====] -- reduce_scattered --> dw[=], added to a sum

    stage 3  forward     w[=] -- gathered --> w[====], read and freed
             backward    w[=] -- regathered --> w[====], read and freed;
                         dw[====] -- reduce_scattered --> dw[=], added to a sum

At stages 1 and 2, layers in a loop are gathered while the first micro-batch runs forward. At stage
1 their sums are reduce-scattered while the last one runs backward. The end of this file has both.

With `layout.offload: parameters` w[=] is in host memory (at stage 0 w[====]), and every stage
fetches a layer as stage 3 does: it is copied to the device, then gathered. Gradients are as above.

Gathers move the precision that parameters are read in; gradients are summed in float32. An arrow
with a function's name carries all parameters of one layer, in few messages.

Letters: L layers, Z devices along the batch's axes (dp, ep, cp, ulysses), n elements of a block
with its padding.
Source: Rajbhandari et al., arXiv 1910.02054.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.collectives import Axes, as_varying, varying_axes
from jaxptd.layout import Axis
from jaxptd.params import ParamInfo, Params, Stored
from jaxptd.shapes import ParamShape
from jaxptd.zero.plan import WHOLE, ParamPlan, StateShapes
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
        shard: this device's shard, `[L, n/Z]`, or `[n/Z]` of one layer. Without `info` it is the
            block on the host. None if `block` is set.
        grad_slot: the array that the gradient belongs to, of its shape and type. Nothing reads it.
            None if the parameter is frozen: it has no gradient.
        block: the block, if it was gathered before or never sharded.
        info: how the block is sharded; None if it is not.
        plan: what this micro-batch does with the parameter.
        sum: the gradients of the micro-batches before, if a loop adds to them or the last
            micro-batch reduces them: of gradient slots, or of blocks.
    """

    shard: Array | None
    grad_slot: Array | None
    block: Array | None
    info: ShardedInfo | None
    plan: ParamPlan
    sum: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block, or of all layers' blocks, whether gathered or not."""
        if self.block is not None:
            return self.block.shape
        assert self.shard is not None
        return self.shard.shape if self.info is None else self.info.local_shape(self.shard)


def grad_slot(like: Array, plan: ParamPlan, info: ShardedInfo | None = None) -> Array:
    """The slot of a gradient: `like` if it has the gradient's shape and type, else zeros.

    Args:
        like: a block, or a shard, that varies as the gradient does.
        plan: says when the gradient is reduced, until when it has the shape of a block.
        info: how `like` is sharded. None if it is a block.
    """
    if plan.reduce != "end" and plan.where == "device" and like.dtype == plan.grad_dtype:
        return like
    shape = info.local_shape(like) if info is not None and plan.reduce == "end" else like.shape
    return as_varying(jnp.zeros(shape, plan.grad_dtype), sorted(varying_axes(like)))


def is_frozen(leaf: Any) -> bool:
    """True for a parameter without a gradient."""
    return isinstance(leaf, LazyParam) and leaf.grad_slot is None


def without_gradient(p: Any, plan: ParamPlan) -> LazyParam:
    """A frozen parameter: a block, or a `LazyParam`."""
    if isinstance(p, LazyParam):
        return dataclasses.replace(p, grad_slot=None)
    return LazyParam(None, None, p, None, plan)


def of_trained(gradients: Any, layer: Any) -> Any:
    """Gradients of a layer's parameters, None for those that are frozen."""
    tree: Any
    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    pairs = zip(leaves, tree.flatten_up_to(gradients), strict=True)
    return jax.tree.unflatten(tree, [None if is_frozen(leaf) else g for leaf, g in pairs])


def with_grad_slot(block: Array, plan: ParamPlan) -> LazyParam:
    """A gathered block whose gradient belongs to a slot."""
    return LazyParam(None, grad_slot(block, plan), block, None, plan)


def is_lazy(leaf: Any) -> bool:
    """True for a `LazyParam`."""
    return isinstance(leaf, LazyParam)


StepParams = dict[str, Any]  # parameters as a step's passes take them: arrays or `LazyParam`s


@dataclasses.dataclass(frozen=True)
class Zero(StateShapes):
    """Shards the state, and gathers parameters for a step."""

    infos: Mapping[str, ParamInfo]

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """Shapes, shardings and conversions of the parameters, as the state holds them."""
        if self.layers.shards == "none":
            return self.infos
        sizes, split = self.sizes, self.split
        return {n: ShardedInfo(info, sizes, self.lead(n), split) for n, info in self.infos.items()}

    def begin_step(
        self, params: Params, owed: Mapping[str, Axes] | None = None, *, training: bool = True
    ) -> StepParams:
        """The state's parameters -> parameters for a step's passes. Partner: `end_step`.

        Args:
            params: as the state holds them.
            owed: the axes over which each one's gradient is a partial sum when passes return it.
            training: whether gradients will be computed.
        """
        begun: StepParams = {}
        for name, p in params.items():
            stored, plan = self.stored[name], self.plans[name]
            info = stored if isinstance(stored, ShardedInfo) else None
            p = info.join(p, plan.gather_dtype) if info is not None and self.split else p
            like = as_varying(p, owed[name]) if owed else p  # varies as the gradient does
            replicas = [Axis.REPLICAS] if owed and plan.sums_replicas else []
            p = as_varying(like, replicas)
            if plan.gather == "layer":
                slot = None if stored.info.frozen else grad_slot(like, plan, info)
                begun[name] = LazyParam(p, slot, None, info, plan)
                continue
            like = on_device(like) if plan.where == "host" else like
            block: Any = (p := as_varying(like, replicas))
            if info is not None:
                held = training and plan.gather == "first_microbatch"
                block = None if held else info.gather(p, plan.gather_dtype)
            elif plan.where == "host":
                block = p.astype(plan.gather_dtype)
            begun[name] = block
            if training and plan.moves:
                assert info is not None
                begun[name] = LazyParam(p, grad_slot(like, plan, info), block, info, plan)
            # A loop adds a layer's gradients to sums, or stacks them in their own precision.
            elif (
                training
                and plan.runs != "outside"
                and (plan.accumulate == "in_loop" or block.dtype != plan.grad_dtype)
            ):
                begun[name] = with_grad_slot(block, plan)
            if training and stored.info.frozen:
                begun[name] = without_gradient(begun[name], plan)
        return begun

    def end_step(self, grads: Params, owed: Mapping[str, Axes]) -> Params:
        """Gradients that the passes return -> those of the state's arrays. Partner: `begin_step`.

        Sums gradients of sharded parameters over the batch's axes (those of layers that are
        gathered one by one already are), then all gradients over the axes where they are owed, with
        one all-reduce for each set of axes. Layers may have added theirs up over replicas; a shard
        that replicas split is reduce-scattered over them.
        """
        grads = dict(grads)
        groups: dict[Axes, list[str]] = {}
        for name, gradient in grads.items():
            stored = self.stored[name]
            if isinstance(stored, ShardedInfo):
                ends = self.plans[name].reduce == "end"
                shard = stored.reduce_scatter(gradient) if ends else gradient
                grads[name] = stored.part_of_sum(shard) if self.split else shard
            groups.setdefault(owed[name], []).append(name)
        for axes, names in groups.items():
            grads |= lax.psum({name: grads[name] for name in names}, axes)
        return grads


# ---- parameters of a layer, gathered while it runs -----------------------------------------------
# A layer's parameters are gathered, or copied from the host, only while it runs. Its tree has a
# `LazyParam` for each of them. An example with three, u and w gathered in bfloat16 and b in
# float32, whose shards have 6, 4 and 1 elements, on Z = 2 devices:
#
#     gathered          the shards of u and w, [6] and [4], concatenated: [10]; one all-gather in
#                       bfloat16: [2, 10]; its columns, [2, 6] and [2, 4], unflattened to the blocks
#                       of u and w. The shard of b, [1]: another all-gather, in float32.
#     regathered        the same for backward, behind barriers.
#     reduce_scattered  gradients of the three blocks, in float32, flattened to [2, 6], [2, 4] and
#                       [2, 1] and concatenated: [2, 11]; one reduce-scatter: [1, 11], the sums over
#                       devices of this device's shards; its columns are the shards' gradients.
#
# Parameters that vary over different mesh axes (sharded over tp, or not), or whose shards are along
# others (those of experts), make separate messages: the result of a concatenation varies over the
# axes of all its operands. In a loop over layers a matrix is a message of its own
# (`own_collective`), or each iteration would copy it into the message and out of it. Vectors share
# one, since many small messages take longer than their copies. Between unrolled layers XLA moves
# messages and joins those of several layers, so there a layer has few.
#
# Parameters that are not sharded but on the host are only copied. Their gradient is in device
# memory, so it belongs to a `grad_slot` and not to the array on the host.

Read = Callable[[Array], Array]


def gathered(layer: Any) -> Any:
    """Replaces each `LazyParam` of a layer by its block, with one all-gather for each group."""
    return with_gathered(layer, missing_blocks(layer))


def regathered(layer: Any) -> Any:
    """Gathers a layer again, for backward."""
    return gathered(behind_barriers(layer))


def missing_blocks(layer: Any, read: Read = lambda x: x) -> list[Array]:
    """Gathers the blocks of the `LazyParam`s that have none, in the order of the leaves.

    read: takes a layer's array from one in `layer`, which may be a stack.
    """
    every = jax.tree.leaves(layer, is_leaf=is_lazy)
    leaves = [leaf for leaf in every if is_lazy(leaf) and leaf.block is None]
    blocks = []
    for leaf in leaves:
        shard = on_device(read(leaf.shard)) if leaf.plan.where == "host" else read(leaf.shard)
        blocks.append(shard.astype(leaf.plan.gather_dtype))
    sharded = [i for i, leaf in enumerate(leaves) if leaf.info is not None]
    for group in _groups(leaves, sharded, lambda i: (blocks[i], leaves[i].plan.gather_dtype)):
        along = leaves[group[0]].info.along
        rows = lax.all_gather(jnp.concatenate([blocks[i] for i in group]), along)
        ends = np.cumsum([leaves[i].info.shard_size for i in group])
        columns = jnp.split(rows, ends[:-1], axis=1)
        for i, flat in zip(group, columns, strict=True):
            blocks[i] = leaves[i].info.unflatten(flat.reshape(-1))
    return blocks


def with_gathered(layer: Any, blocks: Sequence[Array], read: Read = lambda x: x) -> Any:
    """Replaces each `LazyParam` by its block; blocks: those that `missing_blocks` gathered."""
    following = iter(blocks)
    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    there = [leaf.block if is_lazy(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, [next(following) if x is None else read(x) for x in there])


def zeros_for_gathered(stack: Any, blocks: Sequence[Array]) -> list[Array]:
    """Zeros `[L, ...]` for the blocks of all layers that are held after the first micro-batch.

    blocks: those of one layer, as `missing_blocks` gathers them.
    """
    leaves = [leaf for leaf in jax.tree.leaves(stack, is_leaf=is_lazy) if leaf.block is None]
    return [
        as_varying(jnp.zeros((len(leaf.shard), *block.shape), block.dtype), varying_axes(block))
        for leaf, block in zip(leaves, blocks, strict=True)
        if leaf.plan.gather == "first_microbatch"
    ]


def with_blocks(stack: Any, held: Sequence[Array]) -> Any:
    """Puts held blocks `[L, ...]` into a stack."""
    if not held:
        return stack
    leaves, tree = jax.tree.flatten(stack, is_leaf=is_lazy)
    blocks = zip(leaves, held, strict=True)
    return jax.tree.unflatten(tree, [dataclasses.replace(x, block=block) for x, block in blocks])


def behind_barriers(layer: Any) -> Any:
    """Makes XLA gather a layer again in backward.

    Without barriers XLA would find that forward gathered the same, and keep that result. Each array
    has its own barrier, because all results of one barrier vary over the same axes.
    """
    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    barrier = partial(jax.tree.map, lax.optimization_barrier)
    return jax.tree.unflatten(tree, [barrier(leaf) if is_lazy(leaf) else leaf for leaf in leaves])


def reduce_scattered(gradients: Any, layer: Any) -> Any:
    """Gradients of `gathered(layer)` -> `grad_slots_of(layer)`: a reduce-scatter for each group.

    Gradients of shards are summed over Z. Those of blocks and other leaves do not change; frozen
    parameters have None.
    """
    tree: Any
    leaves, tree = jax.tree.flatten(layer, is_leaf=is_lazy)
    grads = tree.flatten_up_to(of_trained(gradients, layer))
    scattered = []
    for i, leaf in enumerate(leaves):
        if is_lazy(leaf) and not is_frozen(leaf):
            grads[i] = grads[i].astype(leaf.grad_slot.dtype)
            if leaf.plan.reduce == "last_microbatch":  # with the micro-batches before
                grads[i] = leaf.sum + grads[i]
            scattered += [i] if leaf.plan.reduce != "end" else []
    for group in _groups(leaves, scattered, lambda i: (leaves[i].grad_slot, grads[i].dtype)):
        flats = [leaves[i].info.flatten(grads[i]) for i in group]
        widths = [leaves[i].info.shard_size for i in group]
        rows = [flat.reshape(-1, n) for flat, n in zip(flats, widths, strict=True)]
        along = leaves[group[0]].info.along
        sums = lax.psum_scatter(jnp.concatenate(rows, axis=1), along, tiled=True)
        sums = lax.psum(sums, Axis.REPLICAS) if leaves[group[0]].plan.sums_replicas else sums
        shards = jnp.split(sums, np.cumsum(widths)[:-1], axis=1)
        for i, shard in zip(group, shards, strict=True):
            grads[i] = shard.reshape(-1)
    return jax.tree.unflatten(tree, grads)


def _groups(
    leaves: Sequence[Any], indices: Sequence[int], key: Callable[[int], tuple[Array, Any]]
) -> list[list[int]]:
    """Groups indices of leaves by precision, the axes of ZeRO, and those their arrays vary over.

    A leaf with `own_collective` makes a group of its own, unless the last micro-batch scatters its
    gradients: then the kernel that adds them up writes the message.
    """
    groups: dict[Any, list[int]] = {}
    for i in indices:
        array, dtype = key(i)
        plan, along = leaves[i].plan, leaves[i].info.along
        alike = along, varying_axes(array), jnp.dtype(dtype)
        alone = plan.own_collective and plan.reduce != "last_microbatch"
        groups.setdefault(i if alone else alike, []).append(i)
    return list(groups.values())


# ---- gradients of layers, added in backward to those of the micro-batches before -----------------
# A `LazyParam` gets the sum over the micro-batches before, and its gradient is that sum plus its
# own. So a micro-batch's gradients are never in memory as a whole. For each layer i:
#
#     stages 0 and 1 (`loop.py`, where nothing moves)      sum[i] += dw[i]
#     stage 1, the last micro-batch (below)      reduce_scattered(sum[i] + dw[i])
#     stages 2 and 3 (`loop.py`)                 sum[i] += reduce_scattered(dw[i])
#
# This is for layers in a loop. A stack in two loops (`model.remat_layers`) needs its sums split and
# joined again, which pays off for shards only; `plan._accumulate` lists the other cases.


def with_sums(
    params: Mapping[str, Any], sums: Params, *, sent: bool = False
) -> tuple[dict[str, Any], Params]:
    """Gives `params` the sums that they add to; also returns the other sums, for `added`.

    Args:
        params: by name.
        sums: of the micro-batches before. Zeros of the gradients' shapes replace the sums that
            `params` now have.
        sent: gives those that the last micro-batch sends, instead of those that are added in place.
    """
    having, rest = dict(params), dict(sums)
    for name, p in params.items():
        plan = p.plan if isinstance(p, LazyParam) else WHOLE
        last = plan.reduce == "last_microbatch"
        if is_frozen(p):
            continue
        if last if sent else plan.accumulate == "in_loop" and not last:
            having[name] = dataclasses.replace(p, sum=sums[name])
            rest[name] = jnp.zeros_like(p.grad_slot)
    return having, rest


def added(params: Mapping[str, Any], rest: Params, gradients: Params) -> Params:
    """Adds gradients to the sums that `with_sums` left; parameters with sums have added theirs."""
    sums: Params = {}
    for name, gradient in gradients.items():
        p = params[name]
        has_sum = isinstance(p, LazyParam) and p.sum is not None
        sums[name] = gradient if has_sum else rest[name] + gradient
    return sums


# ---- gradients in another precision than that of their parameters --------------------------------
# JAX gives a gradient the precision of its parameter. Two kinds of parameters want another one:
#
#     layers in a loop, where nothing is gathered: parameters are float32, but matmuls read them and
#         compute their gradients in 16 bits. Stacked over all layers in float32, the gradients
#         would take twice the bytes they need, so they are narrow.
#     parameters outside the layers, gathered in 16 bits, as they are read: a look-up adds up the
#         gradients of equal tokens, and the output layer's are added to them, so they are wide.
#
# Both belong to the gradient slots of `LazyParam`s, arrays of that precision that nothing reads.
def with_wide_gradients(
    params: Mapping[str, Any], plans: Mapping[str, ParamPlan]
) -> dict[str, Any]:
    """Gives narrow parameters outside the layers a wide slot for their gradient."""
    wide = dict(params)
    for name, p in params.items():
        plan = plans[name]
        if plan.runs == "outside" and not is_frozen(p) and p.dtype != plan.grad_dtype:
            wide[name] = with_grad_slot(p, plan)
    return wide


def grad_slots_of(params: Mapping[str, Any]) -> Params:
    """The arrays that gradients belong to: the slot of each `LazyParam`, or the array itself.

    Frozen parameters have none.
    """
    slots = {n: p.grad_slot if isinstance(p, LazyParam) else p for n, p in params.items()}
    return {name: slot for name, slot in slots.items() if slot is not None}


def attached(params: Mapping[str, Any], grad_slots: Params) -> dict[str, Any]:
    """Makes the gradients of `params` belong to these arrays, those of `grad_slots_of(params)`.

    Parameters outside the layers become arrays in the slot's precision, of which XLA reads the
    narrow original. A loop over layers takes its `LazyParam`s as they are.
    """
    given: dict[str, Any] = {}
    for name, p in params.items():
        if isinstance(p, LazyParam):
            p = dataclasses.replace(p, grad_slot=grad_slots.get(name))
            given[name] = read_with_slot(p) if p.plan.runs == "outside" else p
        else:
            given[name] = grad_slots[name]
    return given


def read_with_slot(leaf: Any) -> Any:
    """The block of a `LazyParam`, with a gradient that belongs to its slot, or without one."""
    if is_frozen(leaf):
        return leaf.block
    return _attached(leaf.block, leaf.grad_slot) if isinstance(leaf, LazyParam) else leaf


@jax.custom_vjp
def _attached(block: Array, grad_slot: Array) -> Array:
    """The block in the wider precision of the two; its gradient goes to the slot, in the slot's."""
    return _attached_fwd(block, grad_slot)[0]


def _attached_fwd(block: Array, grad_slot: Array) -> tuple[Array, Array]:
    wide = block.astype(jnp.promote_types(block.dtype, grad_slot.dtype))
    return wide, jnp.zeros((0,), grad_slot.dtype)


def _attached_bwd(like: Array, gradient: Array) -> tuple[None, Array]:
    return None, gradient.astype(like.dtype)


_attached.defvjp(_attached_fwd, _attached_bwd)


# ---- the first and the last micro-batch ----------------------------------------------------------
# Stages 1 and 2 gather whole parameters once for all micro-batches. Stage 1 sums whole gradients
# over the micro-batches and sends them once. Before the first micro-batch and after the last there
# is no computation to hide that behind. So the first one gathers each layer while the layer before
# computes, and holds it for the others. In the last of several, each layer's gradients are added to
# those before and sent at once, while other layers compute (`loop.py`):
#
#     the first    w[=] -- gathered --> w[====], read and held
#                  stage 1                               sum[====] = dw[====]
#                  stage 2   dw[====] -- reduce_scattered --> sum[=]
#     between      stage 1                               sum[====] += dw[====]
#                  stage 2   dw[====] -- reduce_scattered --> dw[=], added to sum[=]
#     the last     stage 1   sum[====] + dw[====] -- reduce_scattered --> sum[=]
#                  stage 2   as between
#
# The passes are compiled again for each of the two.


def first_microbatch_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` for the first micro-batch, which leaves gradients whole that the last one sends."""
    first = dict(params)
    for name, p in params.items():
        if isinstance(p, LazyParam) and p.plan.reduce == "last_microbatch":
            assert p.shard is not None
            plan = p.plan.first
            slot = None if is_frozen(p) else grad_slot(p.shard, plan, p.info)
            first[name] = dataclasses.replace(p, grad_slot=slot, plan=plan)
    return first


def with_held(
    params: Mapping[str, Any],
    held: Mapping[str, Sequence[Array]],
    infos: Mapping[str, ParamShape],
) -> dict[str, Any]:
    """Gives `params` the blocks that the first micro-batch gathered.

    Args:
        params: by name.
        held: the blocks of each stack.
        infos: descriptions of the parameters, in the model's order, as a stack's blocks are.
    """
    following = {stack: iter(blocks) for stack, blocks in held.items()}
    stacks = {name: info.stack for name, info in infos.items() if info.stack is not None}
    blocks = {name: next(following[stack]) for name, stack in stacks.items()}
    return {
        name: dataclasses.replace(leaf, block=blocks[name]) if name in blocks else leaf
        for name, leaf in params.items()
    }


def middle_microbatch_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` for the micro-batches between, which send nothing that the last one sends."""
    middle = dict(params)
    for name, p in params.items():
        if isinstance(p, LazyParam) and p.plan.gather == "first_microbatch":
            plan, block = p.plan.middle, p.block
            assert block is not None
            middle[name] = block if plan.accumulate == "after" else with_grad_slot(block, plan)
            if is_frozen(p):
                middle[name] = without_gradient(block, plan)
    return middle
