"""Sizes that the formulas for communication and memory derive from a config.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, F hidden, N
heads, H head size. What devices share is padded: F, V, and N or H; on a grid D, too.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Protocol

from jaxptd.config import Config, itemsize
from jaxptd.layout import Axis, Layout
from jaxptd.matmul.padding import HeadCounts, heads_for, padded_for
from jaxptd.models.architecture import MLP, Architecture, Attention, Head, Stack, Sublayer
from jaxptd.models.families import architecture_of
from jaxptd.shapes import StoredShape
from jaxptd.vision.architecture import Windows
from jaxptd.zero.plan import layers_plan


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a config's training step on one device.

    Args:
        config: of the run.
        length: tokens in a sequence; None: in those of the last stack.
        width: D without padding; None: that of the model.
    """

    config: Config
    length: int | None = None
    width: int | None = None

    def of_stack(self, stack: Stack) -> "Sizes":
        """The sizes for the sequences of a stack."""
        return Sizes(self.config, stack.tokens, stack.hidden)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations."""
        return itemsize(self.config.model.dtype)

    @property
    def master_itemsize(self) -> int:
        """Bytes of an element of master parameters, of gradients' sums, and of statistics."""
        return max(self.itemsize, itemsize("float32"))

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch: b."""
        train = self.config.train
        return train.global_batch_size // (self.config.layout.dp * train.micro_batches)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, all rows of a grid together: b*T/cp."""
        length = self.length or self.architecture.stacks[-1].tokens
        return self.sequences * length // self.config.layout.cp

    @property
    def stream_rows(self) -> int:
        """Tokens of a micro-batch in a device's residual stream."""
        layout = self.config.layout
        return self.rows // (layout.tp if layout.sequence_parallel else 1)

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch on one row of a grid: b*T/(cp*row)."""
        return self.tokens // self.config.layout.row

    def samples(self, rows: int, stack: Stack) -> int:
        """Samples of which a device has some of so many tokens: whole sequences or their shards.

        Tokens of a sequence are sharded by more than cp, but an image only by cp, or by nothing.
        """
        if not stack.windows:
            return self.sequences
        cp = self.config.layout.cp
        return rows * (cp if stack.in_strips(cp) else 1) // stack.tokens

    @property
    def matrix_shards(self) -> int:
        """Devices that share a weight matrix: tp, or row*col."""
        layout = self.config.layout
        return layout.tp * layout.row * layout.col

    @property
    def inner_devices(self) -> int:
        """Devices that share the heads, or the hidden units of an MLP: tp, or col."""
        return self.config.layout.tp * self.config.layout.col

    @property
    def hidden(self) -> int:
        """D."""
        size = self.width or self.config.model.hidden_size
        return self.padded(size) if self.config.layout.has_grid else size

    @property
    def vocab(self) -> int:
        """V."""
        return self.config.model.padded_vocab(self.padded)

    def columns(self, head: Head) -> int:
        """Columns of the product that makes a head's logits: V, or classes."""
        if head.columns == self.config.model.vocab_size:
            return self.vocab
        return self.padded(head.columns)

    @property
    def architecture(self) -> Architecture:
        """The parts of the model."""
        return architecture_of(self.config.padded_model)

    @property
    def streams(self) -> list[int]:
        """Bytes of each array of x, as the residual stream of a micro-batch has it on a device."""
        layout = self.config.layout
        rows = layout.cp * layout.row * (layout.tp if layout.sequence_parallel else 1)
        columns = self.hidden // layout.col
        return [
            self.sequences * tokens // rows * columns * self.itemsize
            for tokens in self.architecture.streams
        ]

    @property
    def traces_layers(self) -> bool:
        """True if the backward pass of a layer is traced by itself, not with a loop over layers.

        So it is in a pipeline, and where a layer's parameters or gradients move or are added up.
        """
        return layers_plan(self.config).traces_layers

    @property
    def has_blocks(self) -> bool:
        """True if a grid computes attention in blocks of every head."""
        return self.config.layout.has_grid and self.config.layout.attention2d == "blocks"

    def of(self, sublayer: Sublayer) -> "SublayerSizes":
        """Sizes of a pair of products."""
        if isinstance(sublayer, Attention):
            return AttentionSizes(self, sublayer)
        return (
            WindowSizes(self, sublayer)
            if isinstance(sublayer, Windows)
            else MLPSizes(self, sublayer)
        )

    def attentions(self, stack: Stack) -> "Iterator[AttentionSizes]":
        """Sizes of each attention in a layer of a stack, other than in windows."""
        return (AttentionSizes(self, part) for part in stack.attentions)

    def windows(self, stack: Stack) -> "Iterator[WindowSizes]":
        """Sizes of each attention in windows in a layer of a stack."""
        return (WindowSizes(self, part) for part in stack.windows)

    def padded(self, size: int, each: int = 1) -> int:
        """Rounds a size up to equal shards, as `TensorParallel.padded` does it.

        Args:
            size: number of units.
            each: rows or columns of the matrix in one unit.
        """
        return padded_for(self.config.layout, size, each)


class SublayerSizes(Protocol):
    """Sizes of a pair of products, as padded."""

    @property
    def first(self) -> int:
        """Columns of the first product."""

    @property
    def second(self) -> int:
        """Rows of the second product."""


@dataclasses.dataclass(frozen=True)
class MLPSizes:
    """Sizes of an MLP."""

    sizes: Sizes
    part: MLP

    @property
    def first(self) -> int:
        """F, or 2F with a gate."""
        return self.second * (2 if self.part.gated else 1)

    @property
    def second(self) -> int:
        """F."""
        return self.sizes.padded(self.part.size)


@dataclasses.dataclass(frozen=True)
class WindowSizes:
    """Sizes of attention in windows."""

    sizes: Sizes
    part: Windows

    @property
    def first(self) -> int:
        """Columns of the product that makes q, k, v."""
        return 3 * self.second

    @property
    def second(self) -> int:
        """N*H; what is sharded of them is padded, as in `AttentionSizes`."""
        part = self.part
        if self.sizes.has_blocks:
            return part.heads * self.sizes.padded(part.head_size)
        return self._heads * part.head_size

    @property
    def heads(self) -> int:
        """Heads that a device computes, whole or a block of each."""
        if self.sizes.has_blocks:
            return self.part.heads
        return self._heads // self.sizes.inner_devices

    @property
    def _heads(self) -> int:
        layout, part = self.sizes.config.layout, self.part
        return heads_for(layout, part.heads, part.heads, part.head_size).queries


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
    """Sizes of attention, on one device where nothing else is said."""

    sizes: Sizes
    part: Attention

    @property
    def first(self) -> int:
        """Columns of the product that makes q, k, v, or q where those are of another sequence."""
        return self.second + (2 * self.made_keys if self.part.source is None else 0)

    def of_keys(self, tokens: int) -> int:
        """Tokens that have keys and values, for so many queries."""
        return tokens * self.part.key_tokens // self.part.tokens

    @property
    def counts(self) -> HeadCounts:
        """Numbers of heads; attention in blocks pads H instead."""
        part = self.part
        if self.sizes.has_blocks:
            return HeadCounts(part.heads, part.kv_heads)
        return heads_for(self.sizes.config.layout, part.heads, part.kv_heads, part.head_size)

    @property
    def second(self) -> int:
        """N*H. Attention shards N by heads or, on a grid, H by blocks, and pads what it shards."""
        return self.counts.queries * self.head

    @property
    def head(self) -> int:
        """H. Blocks on a grid shard it, and pad it."""
        size, unit = self.part.head_size, self.part.unit
        return unit * self.sizes.padded(size // unit, each=unit) if self.sizes.has_blocks else size

    @property
    def heads(self) -> int:
        """Heads that a device computes, whole or a block of each."""
        return self.counts.queries // self._sharing

    @property
    def gathers_kv(self) -> bool:
        """True if kv heads do not split, so that devices make slices of them and gather those."""
        return self.counts.gathered

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values that a device attends with, whole or a block of each."""
        return max(1, self.counts.keys // self._sharing)

    @property
    def keys(self) -> int:
        """Numbers of a token's keys that a device attends with."""
        parts = self.sizes.config.layout.col if self.sizes.has_blocks else 1
        return self.kv_heads * self.head // parts

    @property
    def made_keys(self) -> int:
        """Numbers of a token's keys that all devices make together, with padding."""
        head = self.sizes.padded(self.part.head_size) if self.gathers_kv else self.head
        return self.counts.keys * head

    @property
    def _sharing(self) -> int:
        """Devices that share the heads."""
        return 1 if self.sizes.has_blocks else self.sizes.inner_devices


def elements_on_device(stored: StoredShape, layout: Layout) -> int:
    """Elements of a parameter that one device holds."""
    return math.prod(stored.stored_shape) // math.prod(
        layout.sizes[Axis(axis)] for axis in stored.axes
    )
