"""A model's parts, a layout, a program and a cluster: one step to predict.

Letters: T tokens of a micro-batch on a device of the sequence's axes, D hidden size, F hidden units
of the MLP, N heads, H head size, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

from jaxptd.hardware import Cluster, Group
from jaxptd.models.inventory import Inventory, Stack
from jaxptd.planner.cost.pipeline import stage_layers
from jaxptd.planner.cost.program import Program

Remat = Literal["none", "attention", "dots", "full"]


@dataclasses.dataclass(frozen=True)
class Spread:
    """A layout. Devices are numbered tp first, then col, row, cp, dp, pp.

    Args:
        gpus: devices of the whole step; dp follows from them.
        global_batch: sequences of a step.
        micro_batch: sequences of a micro-batch on one device.
        tp, pp, cp: sizes of the axes.
        virtual_stages: chunks of a stage.
        zero: ZeRO stage, 0 to 3.
        zero_group: devices that share a shard; 0: all of dp x cp.
        sequence_parallel: tokens between the layers' products are sharded over tp.
        remat: what backward computes again.
        remat_layers: layers of a part of the model that do so, the first ones; None: all.
        row, col: of a grid.
        schedule: of the pipeline.
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
    remat_layers: int | None = None
    row: int = 1
    col: int = 1
    schedule: str = "1f1b"

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.row * self.col * self.pp * self.cp)

    @property
    def matrix_shards(self) -> int:
        """Devices that share a weight matrix."""
        return self.tp * self.row * self.col

    @property
    def inner(self) -> int:
        """Devices that share the heads, the hidden units of an MLP, and the vocabulary."""
        return self.tp * self.col

    @property
    def micro_batches(self) -> int:
        return max(1, self.global_batch // (self.dp * self.micro_batch))

    @property
    def shards(self) -> int:
        """Devices that share one copy of the state."""
        return (self.zero_group or self.dp * self.cp) if self.zero else 1

    def remats(self, layers: int) -> list[tuple[Remat, int]]:
        """Layers of a part of the model by what they compute again."""
        first = layers if self.remat_layers is None else min(self.remat_layers, layers)
        both: list[tuple[Remat, int]] = [(self.remat, first), ("none", layers - first)]
        return [(remat, count) for remat, count in both if count]

    def group(self, axes: Sequence[str]) -> Group:
        """The devices along some axes.

        Beside axes: `shard` and `replica` divide dp x cp as ZeRO does, and `ends` are a device of
        the first stage and its counterpart on the last.
        """
        if axes == ("shard",):
            return Group(self.shards, self.matrix_shards)
        if axes == ("replica",):
            return Group(self.dp * self.cp // self.shards, self.matrix_shards * self.shards)
        if axes == ("ends",):
            return Group(min(2, self.pp), self.gpus // self.pp * max(1, self.pp - 1))
        sizes = {name: int(getattr(self, name)) for name in ("tp", "col", "row", "cp", "dp", "pp")}
        order = tuple(sizes)
        first = min(order.index(axis) for axis in axes)
        inside = math.prod(sizes[axis] for axis in order[:first])
        return Group(math.prod(sizes[axis] for axis in axes), inside)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One step to predict.

    Args:
        model: its parts.
        spread: its layout.
        program: its kernels, and what they overlap.
        cluster: the devices.
        placed: for each stage, the layers of each stack in each of its parts of the model; None:
            one part each, as `stage_layers` has them.
        updated: elements of the state on a device; None: of the matrices of the first stage.
    """

    model: Inventory
    spread: Spread
    program: Program
    cluster: Cluster
    placed: Sequence[Mapping[str, Sequence[int]]] | None = None
    updated: float | None = None

    def tokens(self, stack: Stack) -> int:
        """T, tokens of a micro-batch on one device."""
        spread = self.spread
        return spread.micro_batch * stack.tokens // (spread.cp * spread.row)

    def stream(self, stack: Stack) -> float:
        """Elements of the residual stream of a micro-batch on one device."""
        sharded = self.spread.tp if self.spread.sequence_parallel else 1
        return self.tokens(stack) // sharded * self.model.hidden / self.spread.col

    def layer_parameters(self, stack: Stack) -> float:
        """Elements of one layer's matrices on a device, whole over dp."""
        return sum(pair.weights for pair in stack.pairs) / self.spread.matrix_shards

    @property
    def embedding(self) -> int:
        """Elements of the table of tokens."""
        return self.model.tokens.rows * self.model.hidden

    @property
    def stage_parameters(self) -> float:
        """Elements on a device of the first stage, whole over dp."""
        layers = (s.layers / self.spread.pp * self.layer_parameters(s) for s in self.model.stacks)
        return sum(layers) + self.embedding / self.spread.matrix_shards

    @cached_property
    def stages(self) -> Sequence[Mapping[tuple[str, Remat], int]]:
        """Layers of each stage, by their stack and by what they compute again."""
        found: list[dict[tuple[str, Remat], int]] = []
        for placed in self.placed or self._even():
            stage: dict[tuple[str, Remat], int] = {}
            parts = ((stack, layers) for stack, sizes in placed.items() for layers in sizes)
            for stack, layers in parts:
                for remat, count in self.spread.remats(layers):
                    stage[stack, remat] = stage.get((stack, remat), 0) + count
            found.append(stage)
        return found

    def _even(self) -> Sequence[Mapping[str, Sequence[int]]]:
        (stack,) = self.model.stacks
        return [{stack.name: (n,)} for n in stage_layers(stack.layers, self.spread.pp)]
