"""Sizes on one device, from which formulas for communication and memory count bytes.

Letters: b sequences of a micro-batch on one device, T tokens in a sequence, D model, F hidden, N
heads, H head size. Sharded dims are padded: F, V, and N or H; on a grid also D.
"""

import dataclasses
import math
from typing import Self

from jaxptd.config import Config, itemsize
from jaxptd.layout import Axis, Layout
from jaxptd.matmul.padding import padded_for
from jaxptd.shapes import StoredShape
from jaxptd.zero.plan import layers_plan


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a config's training step on one device; `models.families.sizes_of` makes them.

    Args:
        config: the run's.
        length: tokens in a sequence.
        is_fused: whether GPUs compute attention with a fused kernel.
        width: D without padding; None: the model's.
    """

    config: Config
    length: int
    is_fused: bool
    width: int | None = None

    def with_tokens(self, length: int, width: int | None = None) -> Self:
        """The sizes for sequences of `length` tokens; width: their D, None: the same."""
        return dataclasses.replace(self, length=length, width=width or self.width)

    # ---- bytes of an element -------------------------------------------------------------------

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations."""
        return itemsize(self.config.model.dtype)

    @property
    def master_itemsize(self) -> int:
        """Bytes of an element of master parameters, accumulated gradients and statistics."""
        return max(self.itemsize, itemsize("float32"))

    # ---- tokens --------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch: b."""
        train = self.config.train
        return train.global_batch_size // (self.config.layout.sample_shards * train.micro_batches)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on all rows of a grid: b*T/(cp*ulysses)."""
        return self.sequences * self.length // self.config.layout.sequence_shards

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch on one row of a grid: b*T/(cp*ulysses*row)."""
        return self.tokens // self.config.layout.row

    @property
    def stream_rows(self) -> int:
        """Tokens of a micro-batch in a device's residual stream."""
        layout = self.config.layout
        return self.rows // (layout.tp if layout.sequence_parallel else 1)

    # ---- devices -------------------------------------------------------------------------------

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
    def has_blocks(self) -> bool:
        """True if a grid computes attention in blocks of every head."""
        return self.config.layout.has_grid and self.config.layout.attention2d == "blocks"

    # ---- columns, with padding -----------------------------------------------------------------

    def padded(self, size: int, each: int = 1) -> int:
        """Rounds a size up to equal shards, as `TensorParallel.padded` does it.

        Args:
            size: number of units.
            each: rows or columns of the matrix in one unit.
        """
        return padded_for(self.config.layout, size, each)

    @property
    def hidden(self) -> int:
        """D."""
        size = self.width or self.config.model.hidden_size
        return self.padded(size) if self.config.layout.has_grid else size

    @property
    def vocab(self) -> int:
        """V."""
        return self.config.model.padded_vocab(self.padded)

    # ---- bytes ---------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """Bytes of the residual stream of a micro-batch."""
        return self.stream_rows * (self.hidden // self.config.layout.col) * self.itemsize

    @property
    def activations(self) -> int:
        """Bytes of all tokens of a micro-batch with whole D: b*T/(cp*ulysses)*D."""
        return self.tokens * self.hidden * self.itemsize

    @property
    def taken(self) -> int:
        """Bytes saved of a first matmul's input: x itself, or all its rows, gathered."""
        config = self.config
        whole = config.layout.gathers_inputs and not config.gathers_again
        return self.activations if whole else self.stream

    @property
    def copies_taken(self) -> bool:
        """True if each first matmul saves its own copy: the result of a collective before it."""
        layout = self.config.layout
        return not (layout.has_grid or layout.collective_matmul or self.config.gathers_again)

    # ---- the program ---------------------------------------------------------------------------

    @property
    def traces_layers(self) -> bool:
        """True if a layer's backward pass is traced separately, not with a loop over layers.

        This happens in a pipeline, and where a layer's parameters or gradients move or accumulate.
        """
        return layers_plan(self.config).traces_layers

    @property
    def casts(self) -> bool:
        """True if a step reads parameters that it gathered or cast to activations' precision."""
        layout = self.config.layout
        return (layout.zero > 0 or layout.hosts_parameters) and not layout.has_grid


def elements_on_device(stored: StoredShape, layout: Layout) -> int:
    """Elements of a parameter that one device holds."""
    return math.prod(stored.stored_shape) // math.prod(
        layout.sizes[Axis(axis)] for axis in stored.axes
    )
