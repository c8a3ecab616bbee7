"""Sizes that the formulas for communication and memory derive from a config.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, F hidden, N
heads, H head size. A grid pads D, F, V, and N or H; other layouts pad none of them here.
"""

import dataclasses
import math

import jax.numpy as jnp

from jaxptd.config import Config
from jaxptd.matmul.grid import padded
from jaxptd.mesh import Axis, Layout
from jaxptd.params import Stored


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a config's training step on one device."""

    config: Config

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations."""
        return jnp.dtype(self.config.model.dtype).itemsize

    @property
    def master_itemsize(self) -> int:
        """Bytes of an element of master parameters, of gradients' sums, and of statistics."""
        return jnp.promote_types(self.config.model.dtype, jnp.float32).itemsize

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch: b."""
        train = self.config.train
        return train.global_batch_size // (self.config.layout.dp * train.micro_batches)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, all rows of a grid together: b*T/cp."""
        return self.sequences * self.config.model.seq_length // self.config.layout.cp

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch on one row of a grid: b*T/(cp*row)."""
        return self.tokens // self.config.layout.row

    @property
    def matrix_shards(self) -> int:
        """Devices that share a weight matrix: tp, or row*col."""
        layout = self.config.layout
        return layout.tp * layout.row * layout.col

    @property
    def hidden(self) -> int:
        """D."""
        return self.padded(self.config.model.hidden_size)

    @property
    def mlp(self) -> int:
        """F."""
        return self.padded(self.config.model.mlp_size)

    @property
    def vocab(self) -> int:
        """V."""
        return self.config.model.padded_vocab(self.padded)

    @property
    def up(self) -> int:
        """Columns of the MLP's first product: F, or 2F with a gate."""
        return self.mlp * (2 if self.config.model.block.gated else 1)

    @property
    def head(self) -> int:
        """H. Blocks on a grid shard it, and pad it."""
        block = self.config.model.block
        size, unit = block.head_size, block.head_unit
        return unit * self.padded(size // unit, each=unit) if self.has_blocks else size

    @property
    def attention(self) -> int:
        """N*H. On a grid attention shards N by heads or H by blocks, and pads what it shards."""
        heads = self.config.model.num_heads
        return (heads if self.has_blocks else self.padded(heads, self.head)) * self.head

    @property
    def heads(self) -> int:
        """Heads that a device computes, whole or a block of each."""
        model, layout = self.config.model, self.config.layout
        if self.has_blocks:
            return model.num_heads
        return self.attention // self.head // (layout.tp * layout.col)

    @property
    def has_groups(self) -> bool:
        """True if several query heads share a kv head."""
        return self.config.model.block.num_kv_heads < self.config.model.num_heads

    @property
    def gathers_kv(self) -> bool:
        """True if kv heads do not split, so that devices make slices of them and gather those."""
        heads, tp = self.config.model.block.num_kv_heads, self.config.layout.tp
        uneven = heads % tp or self.padded(heads, self.head) != heads
        return bool(self.has_groups and not self.has_blocks and uneven)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values that a device attends with, whole or a block of each."""
        heads, layout = self.config.model.block.num_kv_heads, self.config.layout
        if not self.has_groups:
            return self.heads
        return heads if self.has_blocks else max(1, heads // (layout.tp * layout.col))

    @property
    def keys(self) -> int:
        """Numbers of a token's keys that a device attends with."""
        return self.kv_heads * self.head // (self.config.layout.col if self.has_blocks else 1)

    @property
    def made_keys(self) -> int:
        """Numbers of a token's keys that all devices make together, with padding."""
        if not self.has_groups:
            return self.attention
        heads, layout = self.config.model.block.num_kv_heads, self.config.layout
        if not self.gathers_kv:
            return heads * self.head
        return heads * (self.padded(self.head) if layout.has_grid else _up(self.head, layout.tp))

    @property
    def projected(self) -> int:
        """Columns of the product that makes q, k, v."""
        return self.attention + 2 * self.made_keys

    @property
    def has_blocks(self) -> bool:
        """True if a grid computes attention in blocks of every head."""
        return self.config.layout.has_grid and self.config.layout.attention2d == "blocks"

    def padded(self, size: int, each: int = 1) -> int:
        """Rounds a size up to equal shards on a grid.

        Args:
            size: number of units.
            each: rows or columns of the matrix in one unit.
        """
        layout = self.config.layout
        if not layout.has_grid:
            return size
        return padded(size, (layout.row, layout.col, layout.matmul2d_slices), each)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def elements_on_device(stored: Stored, layout: Layout) -> int:
    """Elements of a parameter that one device holds."""
    return math.prod(stored.stored_shape) // math.prod(
        layout.sizes[Axis(axis)] for axis in stored.axes
    )
