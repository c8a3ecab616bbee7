"""What a training step on a row x col grid moves, by formula; see `formulas.py`.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, of which a device has
m = b*T/(cp*row) in all; D model, F hidden, V vocabulary, N heads, H head size, all as padded.
Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025; the algorithms' in `spread.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial

import jax.numpy as jnp

from jaxptd.analysis.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.config import Config
from jaxptd.matmul.grid import padded
from jaxptd.mesh import Axis


@dataclasses.dataclass(frozen=True)
class Moves:
    """The collectives of products on the grid of a config. native: broadcasts are XLA's own."""

    config: Config
    native: bool

    def spread(self, axis: Axis, size: int, times: int, itemsize: int) -> Iterator[Collective]:
        """Blocks of `size` elements, as the other devices along `axis` need them."""
        yield from self._move(
            axis, size * itemsize, times, (ALL_GATHER, BROADCAST if self.native else ALL_REDUCE)
        )

    def collect(self, axis: Axis, size: int, times: int, itemsize: int) -> Iterator[Collective]:
        """The parts of a sum, brought to the devices whose blocks of `size` elements they are."""
        yield from self._move(axis, size * itemsize, times, (REDUCE_SCATTER, ALL_REDUCE))

    def _move(
        self, axis: Axis, block: int, times: int, kinds: tuple[str, str]
    ) -> Iterator[Collective]:
        """`block` bytes, in the kinds of gather and summa."""
        layout = self.config.layout
        devices, whole = layout.sizes[axis], block * layout.sizes[axis] * times
        ring = Collective(PERMUTE, (axis,), times * (devices - 1), whole - block * times)
        if layout.matmul2d == "gather":
            yield Collective(kinds[0], (axis,), times * layout.matmul2d_slices, whole)
        elif layout.matmul2d == "summa":
            steps = math.lcm(layout.row, layout.col)
            yield Collective(kinds[1], (axis,), times * steps, whole)
        elif layout.matmul2d == "cannon":
            yield Collective(PERMUTE, (axis,), times * devices, whole)  # one of them the skew
        elif axis is Axis.ROW:
            yield ring
        else:  # fox; a source that differs from row to row is no broadcast, see collectives.py
            yield Collective(ALL_REDUCE, (axis,), times * devices, whole)


def on_grid(
    config: Config, stacks: Sequence[tuple[str, int]], *, native: bool
) -> Iterator[Collective]:
    """Of products, norms, tables and attention in blocks; the ring is in `formulas.py`.

    stacks: what is computed again, and by how many layers.
    """
    moves, model, parts = Moves(config, native), config.model, config.train.micro_batches
    D, V = _padded(config, model.hidden_size), model.padded_vocab(partial(_padded, config))
    for remat, count in stacks:
        yield from _layers(moves, remat, parts * count)
    yield from _product(moves, D, V, parts, 1)  # logits
    yield from _norms(config, parts, 1)
    yield from _tables(config, D, parts)


def _layers(moves: Moves, remat: str, layers: int) -> Iterator[Collective]:
    config, model = moves.config, moves.config.model
    runs = 2 if remat in ("full", "part") else 1  # of a layer's forward pass
    last = 2 if remat == "part" else 1  # of its last product: a pipeline's part runs all again
    D, F = (_padded(config, size) for size in (model.hidden_size, model.mlp_size))
    hidden = inside(config)
    for contract, out, times in (
        (D, 3 * hidden, runs),
        (hidden, D, runs),
        (D, F, runs),
        (F, D, last),
    ):
        yield from _product(moves, contract, out, layers, times)
    yield from _norms(config, 2 * layers, runs)
    if config.layout.attention2d == "blocks":
        yield from _blocks(moves, remat, layers)


def _product(moves: Moves, contract: int, out: int, times: int, runs: int) -> Iterator[Collective]:
    """x[m, K] w[K, out], forward `runs` times and backward.

    Forward spreads x and w. Backward spreads w again, for the gradient of x, whose parts it brings
    home, and x again, for the gradient of w, whose parts it brings home in the masters' precision.
    """
    layout, itemsize = moves.config.layout, jnp.dtype(moves.config.model.dtype).itemsize
    x = _rows(moves.config) * contract // layout.col
    w = contract * out // (layout.row * layout.col)
    yield from moves.spread(Axis.COL, x, times * (runs + 1), itemsize)
    yield from moves.spread(Axis.ROW, w, times * (runs + 1), itemsize)
    yield from moves.collect(Axis.COL, x, times, itemsize)
    yield from moves.collect(Axis.ROW, w, times, _wide(moves.config))


def _norms(config: Config, norms: int, runs: int) -> Iterator[Collective]:
    """Mean and variance, one after the other; backward two means in one message."""
    size = norms * _rows(config) * _wide(config)
    yield Collective(ALL_REDUCE, (Axis.COL,), norms * (2 * runs + 1), size * (2 * runs + 2))


def _tables(config: Config, hidden: int, parts: int) -> Iterator[Collective]:
    """Rows of both tables, m*D and T/cp*D/col, forward and back; the loss of V cut over col."""
    layout, itemsize = config.layout, jnp.dtype(config.model.dtype).itemsize
    rows = parts * _rows(config) * hidden * itemsize
    positions = parts * config.model.seq_length // layout.cp * hidden // layout.col * itemsize
    yield Collective(ALL_TO_ALL, (Axis.ROW,), 2 * parts, 2 * rows)
    for kind in (REDUCE_SCATTER, ALL_GATHER):
        yield Collective(kind, (Axis.COL,), parts, rows)
        yield Collective(kind, (Axis.ROW,), parts, positions)
    loss = 3 * parts * _rows(config) * _wide(config)
    yield Collective(ALL_REDUCE, (Axis.COL,), 2 * parts, loss)


def _blocks(moves: Moves, remat: str, times: int) -> Iterator[Collective]:
    """Q K^T, softmax and P V of every head: s a block of scores, k one of keys or values.

    If anything is made again, the scores are; the output, where the product after it is.
    """
    config, layout = moves.config, moves.config.layout
    itemsize = jnp.dtype(config.model.dtype).itemsize
    k = _rows(config) * inside(config) // layout.col
    s = _rows(config) * config.model.num_heads * config.model.seq_length // layout.col
    scores_again, output_again = remat != "none", remat in ("full", "part")
    yield from moves.spread(Axis.ROW, k, times * (4 + scores_again + output_again), itemsize)
    yield from moves.spread(Axis.COL, s, times * (4 + output_again), itemsize)
    yield from moves.collect(Axis.COL, s, times, itemsize)
    yield from moves.collect(Axis.COL, s, times * (1 + scores_again), _wide(config))
    yield from moves.collect(Axis.ROW, k, times * 2, itemsize)
    rows = _rows(config) * config.model.num_heads * _wide(config)
    softmax = times * (3 + 2 * scores_again)
    yield Collective(ALL_REDUCE, (Axis.COL,), softmax, softmax * rows)


def _rows(config: Config) -> int:
    """m."""
    layout, train = config.layout, config.train
    sequences = train.global_batch_size // (layout.dp * train.micro_batches)
    return sequences * config.model.seq_length // (layout.cp * layout.row)


def _wide(config: Config) -> int:
    """Bytes of a number in the precision of sums and masters."""
    return jnp.promote_types(config.model.dtype, jnp.float32).itemsize


def _padded(config: Config, size: int, each: int = 1) -> int:
    layout = config.layout
    return padded(size, (layout.row, layout.col, layout.matmul2d_slices), each)


def inside(config: Config) -> int:
    """N * H of attention; on a grid the cut one is padded."""
    model = config.model
    if not config.layout.has_grid:
        return model.hidden_size
    if config.layout.attention2d == "heads":
        return _padded(config, model.num_heads, model.head_size) * model.head_size
    return model.num_heads * _padded(config, model.head_size)
