"""Sizes of a model, its layout, and the two with a program and a cluster: one step to predict.

Letters: T tokens of a micro-batch on a device of the sequence's axes, D hidden size, F hidden units
of the MLP, N heads, H head size, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from jaxptd.hardware import Cluster, Group
from jaxptd.planner.cost.program import Program

Remat = Literal["none", "attention", "dots", "full"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder's layers.

    Args:
        num_layers, hidden_size, num_heads, vocab_size, seq_length: of the model.
        num_kv_heads: heads of keys and values; 0: as many as heads.
        ffn_hidden_size: hidden units of the MLP; 0: four times the hidden size.
        gated: the MLP has a gate, and so a third matrix.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    num_kv_heads: int = 0
    ffn_hidden_size: int = 0
    gated: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def ffn_inputs(self) -> int:
        """Columns of the MLP's first product: the hidden units, twice with a gate."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def qkv_size(self) -> int:
        """Columns of the product that makes queries, keys and values."""
        return self.head_size * (self.num_heads + 2 * self.kv_heads)

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's matrices."""
        D = self.hidden_size
        return D * self.qkv_size + D * self.num_heads * self.head_size + D * self._ffn_rows

    @property
    def _ffn_rows(self) -> int:
        return self.ffn_inputs + self.ffn

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.hidden_size


@dataclasses.dataclass(frozen=True)
class Spread:
    """A layout as published programs have it. Devices are numbered tp first, then cp, dp, pp.

    Args:
        gpus: devices of the whole step; dp follows from them.
        global_batch: sequences of a step.
        micro_batch: sequences of a micro-batch on one device.
        tp, pp, cp: sizes of the axes.
        virtual_stages: chunks of a stage; above 1 the schedule is interleaved.
        zero: ZeRO stage, 0 to 3.
        zero_group: devices that share a shard; 0: all of dp x cp.
        sequence_parallel: tokens between the layers' products are sharded over tp.
        remat: what backward computes again.
    """

    gpus: int
    global_batch: int
    micro_batch: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    virtual_stages: int = 1
    zero: int = 0
    zero_group: int = 0
    sequence_parallel: bool = False
    remat: Remat = "none"

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> int:
        return max(1, self.global_batch // (self.dp * self.micro_batch))

    @property
    def shards(self) -> int:
        """Devices that share one copy of the state."""
        return (self.zero_group or self.dp * self.cp) if self.zero else 1

    def group(self, axes: Sequence[str]) -> Group:
        """The devices along some axes.

        Beside axes: `shard` and `replica` divide dp x cp as ZeRO does, and `ends` are a device of
        the first stage and its counterpart on the last.
        """
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        if axes == ("shard",):
            return Group(self.shards, self.tp)
        if axes == ("replica",):
            return Group(self.dp * self.cp // self.shards, self.tp * self.shards)
        if axes == ("ends",):
            return Group(min(2, self.pp), self.gpus // self.pp * max(1, self.pp - 1))
        order = tuple(sizes)
        first = min(order.index(axis) for axis in axes)
        inside = math.prod(sizes[axis] for axis in order[:first])
        return Group(math.prod(sizes[axis] for axis in axes), inside)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One step to predict: a model, a layout, a program and a cluster."""

    shape: Shape
    spread: Spread
    program: Program
    cluster: Cluster

    @property
    def tokens(self) -> int:
        """T, tokens of a micro-batch on one device."""
        return self.spread.micro_batch * self.shape.seq_length // self.spread.cp

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream on one device: T, over tp with sequence parallelism."""
        return self.tokens // self.spread.tp if self.spread.sequence_parallel else self.tokens

    @property
    def layer_parameters(self) -> float:
        """Elements of one layer's matrices on a device, whole over dp."""
        return self.shape.layer_weights / self.spread.tp

    @property
    def stage_parameters(self) -> float:
        """Elements on a device of the first stage, whole over dp."""
        layers = self.shape.num_layers / self.spread.pp
        return layers * self.layer_parameters + self.shape.embedding / self.spread.tp
