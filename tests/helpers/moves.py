"""Formulas of what layers of these sizes communicate, forward and backward.

Over tp, collectives move the residual stream; on a grid they move blocks of every matrix.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.matmul.padding import HeadCounts, heads_for
from jaxptd.mesh import Axis, Layout
from jaxptd.parts.grid import Panels

B, T, D, F, N, H, V = 4, 8, 16, 24, 4, 4, 13
K = 2  # heads of keys and values, where groups of heads share them
S = 16  # tokens of another sequence
WINDOW, SCALE = 4, 0.7  # of attention with grouped heads
Part = Callable[[Layout, str], Iterator[Collective]]


def moves(one_way: Part, *on_grid: Part) -> Part:
    """What the first part moves over tp, or the others on a grid."""

    def parts(layout: Layout, dtype: str) -> Iterator[Collective]:
        for part in on_grid if layout.has_grid else (one_way,):
            yield from part(layout, dtype)

    return parts


def tokens(layout: Layout, length: int = T) -> int:
    """m: tokens on one device in a grid's residual stream."""
    return B * length // (layout.sample_shards * layout.cp * layout.row)


def width(layout: Layout, of: str) -> int:
    """Padded features: D, F, V, N*H with N sharded (N) or as attention shards it (A); times 2 or 3.

    With groups of heads: N*H (O), and all of q, k and v (G), where H is sharded in pairs.
    """
    tensor_parallel, many = make_tensor_parallel(layout), int(of[0]) if of[0].isdigit() else 1
    if of == "O":
        return (
            N * tensor_parallel.padded_head(H, 2)
            if tensor_parallel.axes.head_dim
            else heads(layout).queries * H
        )
    if of == "G":
        return width(layout, "O") + 2 * made_keys(layout)
    if of[-1] == "N" or (of[-1] == "A" and tensor_parallel.axes.head_dim == 0):
        return many * tensor_parallel.padded(N) * H
    if of[-1] == "A":
        return many * N * tensor_parallel.padded(H)
    if of == "D":
        return tensor_parallel.padded_hidden(D)
    return many * tensor_parallel.padded({"F": F, "V": V}[of[-1]])


def heads(layout: Layout) -> HeadCounts:
    """Padded numbers of grouped heads, where devices hold whole heads."""
    return heads_for(layout, N, K, H)


def gathers_keys(layout: Layout) -> bool:
    """True if each device gathers the keys of its heads from slices of all."""
    return not make_tensor_parallel(layout).axes.head_dim and heads(layout).gathered


def made_keys(layout: Layout) -> int:
    """Elements of a token's keys that all devices compute together."""
    tensor_parallel = make_tensor_parallel(layout)
    if tensor_parallel.axes.head_dim:
        return K * tensor_parallel.padded_head(H, 2)
    return K * tensor_parallel.padded(H) if gathers_keys(layout) else heads(layout).keys * H


def message(
    kind: str,
    axis: Axis,
    of: str,
    *,
    times: int = 1,
    messages: int | None = None,
    length: int = T,
) -> Part:
    """Collectives moving `times` x the `of` features ("1": one feature) of each token."""

    def part(layout: Layout, dtype: str) -> Iterator[Collective]:
        features = 1 if of == "1" else width(layout, of)
        size = tokens(layout, length) * features * np.dtype(dtype).itemsize
        yield Collective(kind, (axis,), messages or times, times * size)

    return part


def ends(count: int, *others: Part, rounds: int = 0, length: int = T) -> Part:
    """`count` all-reduces of x, or with sequence parallelism gathers and scatters; then the others.

    rounds: rounds of hops of a block of x, forward and backward, with collective matmul instead.
    0 outside of layers, which do without collective matmul.
    """

    def part(layout: Layout, dtype: str) -> Iterator[Collective]:
        if layout.collective_matmul and rounds:
            hops = rounds * (layout.tp - 1)
            block = tokens(layout, length) // layout.tp * width(layout, "D")
            yield Collective(PERMUTE, (Axis.TP,), hops, hops * block * np.dtype(dtype).itemsize)
        else:
            for kind in (ALL_GATHER, REDUCE_SCATTER) if layout.sequence_parallel else (ALL_REDUCE,):
                yield from message(kind, Axis.TP, "D", times=count, length=length)(layout, dtype)
        for other in others:
            yield from other(layout, dtype)

    return part


def latent(ranks: tuple[int, ...], shared: int) -> Part:
    """Vectors of these sizes before attention, the key of all heads beside them, and x behind it.

    Args:
        ranks: elements of what first matmuls take, that of keys and values first.
        shared: elements of the key of all heads.
    """

    def part(layout: Layout, dtype: str) -> Iterator[Collective]:
        size = tokens(layout) * np.dtype(dtype).itemsize
        gathers = layout.sequence_parallel
        taken, whole = ranks, shared
        if layout.attends_latents:  # one array that no matmul takes before attention
            taken, whole = ranks[1:], shared + ranks[0]
        beside = [whole * size] * (gathers and layout.collective_matmul)
        moved = [each * size for each in (*taken, whole, D)]
        if layout.collective_matmul:  # three rounds of each vector, and two of x
            hops, blocks = 3 * len(taken) + 2, (3 * sum(taken) + 2 * D) * size // layout.tp
            others = layout.tp - 1
            yield Collective(PERMUTE, (Axis.TP,), hops * others, blocks * others)
            moved = beside
        for kind in (ALL_GATHER, REDUCE_SCATTER) if gathers else (ALL_REDUCE,):
            # Without the gathers of sequence parallelism, x is reduced forward, all else backward.
            yield Collective(kind, (Axis.TP,), len(moved), sum(moved))

    return part


def both(one: Part, other: Part) -> Part:
    """What both parts move together."""

    def part(layout: Layout, dtype: str) -> Iterator[Collective]:
        yield from one(layout, dtype)
        yield from other(layout, dtype)

    return part


def product(contract: str, out: str, length: int = T) -> Part:
    """x[m, K] w[K, out]: both operands are spread in forward and backward, gradients collected."""

    def part(layout: Layout, dtype: str) -> Iterator[Collective]:
        grid, itemsize = Panels(layout, on_gpus=False), np.dtype(dtype).itemsize
        x = tokens(layout, length) * width(layout, contract) // layout.col
        w = width(layout, contract) * width(layout, out) // (layout.row * layout.col)
        for axis, block in ((Axis.COL, x), (Axis.ROW, w)):
            yield from grid.spread(axis, block, times=2, itemsize=itemsize)
            yield from grid.collect(axis, block, times=1, itemsize=itemsize)

    return part


def attention(layout: Layout, dtype: str, length: int = T) -> Iterator[Collective]:
    """Keys and values three times round the ring; or four matmuls of blocks and a softmax.

    length: length of the keys.
    """
    itemsize = np.dtype(dtype).itemsize
    k = tokens(layout, length) * width(layout, "A") // layout.col
    if layout.attention2d == "heads":
        hops = 3 * (layout.ring_size - 1)
        yield Collective(PERMUTE, (Axis.CP, Axis.ROW), hops, hops * 2 * k * itemsize)
        return
    grid, s = Panels(layout, on_gpus=False), tokens(layout) * N * length // layout.col
    for axis, block in ((Axis.ROW, k), (Axis.COL, s)):
        yield from grid.spread(axis, block, times=4, itemsize=itemsize)
        yield from grid.collect(axis, block, times=2, itemsize=itemsize)
    yield Collective(ALL_REDUCE, (Axis.COL,), 3, 3 * tokens(layout) * N * itemsize)


def groups(layout: Layout, dtype: str, *, whole: bool = False) -> Iterator[Collective]:
    """Attention with K heads of keys and values, a norm of queries and keys, and a window.

    The rings are blockwise: blocks travel as far as the window reaches.

    Args:
        layout: layout of the devices.
        dtype: precision of activations and statistics.
        whole: the norm covers all heads together: one statistic per token and device.
    """
    tensor_parallel, itemsize = make_tensor_parallel(layout), np.dtype(dtype).itemsize
    size = tokens(layout) * itemsize
    if whole:
        axis = Axis.COL if layout.has_grid else Axis.TP
        yield Collective(ALL_REDUCE, (axis,), 4, 4 * size)
    if layout.attention2d == "heads":
        axis = Axis.COL if layout.has_grid else Axis.TP
        if gathers_keys(layout):
            for kind in (ALL_GATHER, REDUCE_SCATTER):
                yield Collective(kind, (axis,), 1, 2 * made_keys(layout) * size)
        block = T // layout.ring_size
        hops = 3 * sum(1 + n * block < WINDOW for n in range(layout.ring_size - 1))
        keys = max(1, heads(layout).keys // tensor_parallel.inner_devices) * H
        back = 1 if hops and hops // 3 % layout.row == 0 else 0  # hops of gradients that skip row
        for axes, number in (((Axis.CP, Axis.ROW), hops - back), ((Axis.CP,), back)):
            yield Collective(PERMUTE, axes, number, number * 2 * keys * size)
        return
    grid, s = Panels(layout, on_gpus=False), tokens(layout) * N * T // layout.col
    keys = tokens(layout) * made_keys(layout) // layout.col
    for axis, block in ((Axis.ROW, keys), (Axis.COL, s)):
        yield from grid.spread(axis, block, times=4, itemsize=itemsize)
        yield from grid.collect(axis, block, times=2, itemsize=itemsize)
    yield Collective(ALL_REDUCE, (Axis.COL,), 3, 3 * N * size)
    if not whole:
        yield Collective(ALL_REDUCE, (Axis.COL,), 4, 2 * (N + K) * size)


def collected(layout: Layout, gathered: int, scattered: int) -> Iterator[Collective]:
    """Gathers and scatters over ep and tp; the bytes are those of one device along ep."""
    for axis, size in ((Axis.EP, layout.ep), (Axis.TP, 1)):
        if axis == Axis.EP or layout.sequence_parallel:
            yield Collective(ALL_GATHER, (axis,), 7, size * gathered)
            yield Collective(REDUCE_SCATTER, (axis,), 3, size * scattered)
        else:
            yield Collective(ALL_REDUCE, (axis,), 3, scattered)


def ringed(layout: Layout, gathered: int, scattered: int) -> Iterator[Collective]:
    """The same bytes in hops from device to device."""
    others = layout.ep * layout.tp - 1
    moved = others * (gathered + scattered) // layout.tp
    yield Collective(PERMUTE, (Axis.EP, Axis.TP), 10 * others, moved)


def experts(count: int, chosen: int, shared: Part | None = None) -> Part:
    """Gathers tokens, choices and weights over ep and tp, and scatters sums of experts' outputs.

    Backward gathers them again, with the gradient of the sums, and scatters the gradients of x and
    weights. The load-balancing loss all-reduces the counts of each sequence.

    Args:
        count: E.
        chosen: K.
        shared: what the MLP of all tokens moves.
    """

    def part(layout: Layout, dtype: str) -> Iterator[Collective]:
        own, itemsize = tokens(layout), np.dtype(dtype).itemsize
        x, weights = own * D * itemsize, own * chosen * itemsize
        choices = own * chosen * 4  # int32, as counts are
        gathered, scattered = 3 * x + 2 * weights + 2 * choices, 2 * x + weights
        yield from (ringed if layout.collective_matmul else collected)(layout, gathered, scattered)
        counted = B // layout.sample_shards * count * 4
        cut = (Axis.CP, Axis.TP) if layout.sequence_parallel else (Axis.CP,)
        yield Collective(ALL_REDUCE, cut, 1, counted)
        if shared:
            yield from shared(layout, dtype)

    return part


def nothing(layout: Layout, dtype: str) -> Iterator[Collective]:
    yield from ()


# Mean and variance; backward sends two means in one message.
NORM = message(ALL_REDUCE, Axis.COL, "1", times=4, messages=3)
RMS_NORM = message(ALL_REDUCE, Axis.COL, "1", times=2)  # one mean, forward and backward
ATTENTION_MOVES = product("D", "3A"), attention, product("A", "D")
CROSS_MOVES = (
    product("D", "A"),
    product("D", "2A", S),
    partial(attention, length=S),
    product("A", "D"),
)
MLP_MOVES = product("D", "F"), product("F", "D")
GROUPS_MOVES = product("D", "G"), groups, product("O", "D")
WHOLE_NORM = partial(groups, whole=True)
WHOLE_NORM_MOVES = product("D", "G"), WHOLE_NORM, product("O", "D")
GATED_MOVES = product("D", "2F"), product("F", "D")


def position_rows(layout: Layout, dtype: str) -> Iterator[Collective]:
    """Embeddings of a cp block's positions, D/col features of each."""
    size = T // layout.cp * width(layout, "D") // layout.col * np.dtype(dtype).itemsize
    yield Collective(REDUCE_SCATTER, (Axis.ROW,), 1, size)
    yield Collective(ALL_GATHER, (Axis.ROW,), 1, size)
