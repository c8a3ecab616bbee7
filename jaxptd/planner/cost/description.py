"""A model's parts, a layout, a program and a cluster: one step to predict.

Letters: T tokens of a micro-batch on a device of the sequence's axes, D hidden size, F hidden units
of the MLP, N heads, H head size, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

from jaxptd.hardware import Cluster, Group
from jaxptd.models.architecture import Architecture, Stack
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.statistics import Durations, simulate_stages

# ---- records of programs: their kernels, and what they overlap -----------------------------------


@dataclasses.dataclass(frozen=True)
class Implementation:
    """The kernels and overlaps of a program, as documented. No number here is fitted.

    Args:
        name: of the program.
        attention: `unfused` writes scores to memory; `flash` does not, and skips what a causal
            mask hides.
        dropout: it has dropout, of scores too if attention is unfused.
        bias: its products have a bias.
        rotary: it rotates queries and keys.
        accumulate: bytes moved to add a parameter's gradient to the sum of the step; 0: the product
            that makes the gradient adds as it writes.
        gradient: bytes of an element of gradients that is sent.
        update: bytes moved for each parameter by the optimizer.
        logit: bytes moved for each logit by the loss, forward and backward.
        tp_under: what hides the tensor-parallel collectives of backward.
        dp_under: what hides the reduction of gradients.
        sends_hidden: messages between stages run beside the stages' work.
        sends_sharded: each of the tp devices sends its share of an activation, and a gather in the
            node follows; with sequence parallelism there is nothing to gather.
        cast: bytes moved to cast a parameter to 16 bits, forward and backward each.
        stacked: how often what a layer keeps is moved again, forward and backward each, because
            layers that run in a loop keep it in an array of all of them.
        again_all: full recomputation also reruns a layer's last matmul, whose result is unused.
        pieces: products are cut into so many, by tokens.
        fp8: the products of layers are of 8-bit numbers.
        apart: queries, keys and values are products of their own, which add their biases as they
            write; else copies split the results of one, and join gradients.
        sums_apart: the gradient of an MLP's first bias is a pass of its own, and not part of its
            activation's backward.
        stream_forward: bytes moved for each number of the residual stream by a norm and the sum
            before it, unless a product adds as it writes.
        stream_backward: the same of backward of a norm and of the sum behind it.
        balanced: devices of a ring have as many visible scores each, where a mask is causal.
    """

    name: str
    attention: Literal["unfused", "flash"]
    dropout: bool
    bias: bool
    rotary: bool
    accumulate: int
    gradient: int
    update: int
    logit: int
    tp_under: Literal["nothing", "weight gradients", "products"]
    dp_under: Literal["nothing", "backward", "backward without a pipeline"]
    sends_hidden: bool
    sends_sharded: bool
    cast: int = 0
    stacked: int = 0
    again_all: bool = True
    pieces: int = 1
    fp8: bool = False
    apart: bool = False
    sums_apart: bool = True
    stream_forward: int = 10
    stream_backward: int = 16
    balanced: bool = True


# ---- the time of a pipelined step, from the seconds of its stages --------------------------------


def scheduled(
    name: str, stages: Sequence[Durations], micro_batches: int, *, chunks: int | None = None
) -> float:
    """Seconds of a schedule with a name, or of a table in a `.csv` file.

    `1f1b`, and `interleaved` if the stages divide the micro-batches, by their formula if the last
    stage is the slowest, as the loss makes it; others by simulating their tables.

    Args:
        name: one of `jaxptd.pipeline.schedules.SCHEDULES`, or the path.
        stages: seconds of one micro-batch's F, B and W on each stage.
        micro_batches: m.
        chunks: V, parts of the model on a stage; None: the schedule's default.

    Raises:
        UserError: there is no such schedule in these sizes.
    """
    each, p = [sum(stage) for stage in stages], len(stages)
    if each[-1] == max(each) and name == "1f1b":
        return pipelined(each, micro_batches)
    if each[-1] == max(each) and name == "interleaved" and micro_batches % p == 0:
        return pipelined(each, micro_batches, chunks or 2)
    schedule = make_schedule(name, stages=p, micro_batches=micro_batches, virtual_stages=chunks)
    return simulate_stages(schedule, stages).makespan


def pipelined(stages: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Seconds of `1f1b` (one chunk) and `interleaved` (more): m max + (sum - max) / V.

    The slowest stage works all the time; before and after it, one chunk of every other stage. That
    is exact for `1f1b` if the last stage is the slowest; an earlier one would do part of its work
    while it waits, and be a few percent faster.

    Args:
        stages: seconds of forward and backward of one micro-batch on each stage.
        micro_batches: m.
        chunks: V, parts of the model on a stage.
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / chunks


def step_seconds(
    name: str, stages: Sequence[Durations], micro_batches: int, chunks: int = 1
) -> float:
    """Seconds of a schedule of many micro-batches, fast enough for a search.

    `1f1b` and `interleaved` by `pipelined`. Others by simulating twice as many micro-batches as
    stages: each further one adds the slowest stage's time.

    Args:
        name: one of `jaxptd.pipeline.schedules.SCHEDULES`, or the path of a table.
        stages: seconds of one micro-batch's F, B and W on each stage.
        micro_batches: m.
        chunks: V, parts of the model on a stage.
    """
    each = [sum(stage) for stage in stages]
    if name in ("1f1b", "interleaved"):
        return pipelined(each, micro_batches, chunks)
    few = micro_batches if name.endswith(".csv") else min(micro_batches, 2 * len(stages))
    return _simulated(name, tuple(stages), few) + (micro_batches - few) * max(each)


@functools.lru_cache(4096)
def _simulated(name: str, stages: Sequence[Durations], micro_batches: int) -> float:
    schedule = make_schedule(name, stages=len(stages), micro_batches=micro_batches)
    return simulate_stages(schedule, stages).makespan


def stage_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage; if they do not divide, the stages at the ends have one less.

    The ends have the embedding and the loss as well, so programs leave layers out there first: the
    last stage, the first, the last but one, and so on.

    >>> stage_layers(126, 8)
    [15, 16, 16, 16, 16, 16, 16, 15]
    """
    counts = [-(-layers // stages)] * stages
    for i in range(sum(counts) - layers):
        counts[i // 2 if i % 2 else -1 - i // 2] -= 1
    return counts


# ---- a step: model, layout, program, devices -----------------------------------------------------

Remat = Literal["none", "attention", "dots", "full"]


@dataclasses.dataclass(frozen=True)
class Parallelism:
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
class StepDescription:
    """One step to predict.

    Args:
        model: its parts.
        parallelism: its layout.
        implementation: its kernels, and what they overlap.
        cluster: the devices.
        placed: for each stage, the layers of each stack in each of its parts of the model; None:
            one part each, as `stage_layers` has them.
        updated: elements of the state on a device; None: of the matrices of the first stage.
    """

    model: Architecture
    parallelism: Parallelism
    implementation: Implementation
    cluster: Cluster
    placed: Sequence[Mapping[str, Sequence[int]]] | None = None
    updated: float | None = None

    def tokens(self, stack: Stack) -> int:
        """T, tokens of a micro-batch on one device."""
        parallelism = self.parallelism
        return parallelism.micro_batch * stack.tokens // (parallelism.cp * parallelism.row)

    def stream(self, stack: Stack) -> float:
        """Elements of the residual stream of a micro-batch on one device."""
        sharded = self.parallelism.tp if self.parallelism.sequence_parallel else 1
        return self.tokens(stack) // sharded * self.model.hidden / self.parallelism.col

    def layer_parameters(self, stack: Stack) -> float:
        """Elements of one layer's matrices on a device, whole over dp."""
        return (
            sum(sublayer.weights for sublayer in stack.sublayers) / self.parallelism.matrix_shards
        )

    @property
    def embedding(self) -> int:
        """Elements of the table of tokens."""
        return self.model.tokens.rows * self.model.hidden

    @property
    def stage_parameters(self) -> float:
        """Elements on a device of the first stage, whole over dp."""
        layers = (
            s.layers / self.parallelism.pp * self.layer_parameters(s) for s in self.model.stacks
        )
        return sum(layers) + self.embedding / self.parallelism.matrix_shards

    @cached_property
    def stages(self) -> Sequence[Mapping[tuple[str, Remat], int]]:
        """Layers of each stage, by their stack and by what they compute again."""
        by_stage: list[dict[tuple[str, Remat], int]] = []
        for placed in self.placed or self._even():
            stage: dict[tuple[str, Remat], int] = {}
            parts = ((stack, layers) for stack, sizes in placed.items() for layers in sizes)
            for stack, layers in parts:
                for remat, count in self.parallelism.remats(layers):
                    stage[stack, remat] = stage.get((stack, remat), 0) + count
            by_stage.append(stage)
        return by_stage

    def _even(self) -> Sequence[Mapping[str, Sequence[int]]]:
        (stack,) = self.model.stacks
        return [{stack.name: (n,)} for n in stage_layers(stack.layers, self.parallelism.pp)]
