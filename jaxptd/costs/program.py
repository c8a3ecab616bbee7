"""Describes a program on its devices: kernels, overlap, and layout."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxptd.hardware import Accelerator, Group

Remat = Literal["none", "attention", "dots", "full"]
# Tokens of all devices are gathered, and sums reduce-scattered; each pair of a token and an expert
# is sent; or each token once to each device (and, between nodes, once to each node).
Dispatch = Literal["allgather", "alltoall", "deepep", "hybridep"]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """The kernels and overlaps of a program, as documented; nothing is fitted.

    Args:
        name: the program's name.
        attention: `unfused` writes scores to memory; `flash` does not, and skips what a causal mask
            hides.
        dropout: whether it uses dropout; unfused attention also drops scores.
        bias: whether its matmuls have a bias.
        rotary: whether it rotates queries and keys.
        accumulate: bytes moved to add a parameter's gradient to the step's sum; 0 if the matmul
            that computes the gradient adds as it writes.
        gradient: bytes of a gradient element as sent.
        update: bytes moved per parameter by the optimizer.
        logit: bytes moved per logit by the loss, forward and backward.
        tp_under: what hides the tensor-parallel collectives of backward.
        dp_under: what hides the reduction of gradients.
        sends_hidden: whether messages between stages overlap the stages' work.
        sends_sharded: whether each of the tp devices sends its share of an activation, followed by
            a gather within the node (needless with sequence parallelism).
        cast: bytes moved to cast a parameter to 16 bits, each forward and backward.
        stacked: how often what a layer saves is copied, each forward and backward, because a loop
            over layers saves it in one array.
        again_all: whether full recomputation also reruns a layer's last matmul, whose result is
            unused.
        pieces: how many pieces matmuls are cut into, by tokens.
        fp8: whether layers multiply in 8 bits.
        apart: whether queries, keys and values come from separate matmuls that add their biases as
            they write; otherwise copies split one matmul's result and join gradients.
        sums_apart: whether the gradient of an MLP's first bias is a separate pass instead of part
            of the activation's backward.
        stream_forward: bytes moved per element of the residual stream by a norm and the addition
            before it, unless a matmul adds as it writes.
        stream_backward: the same for backward of a norm and the addition after it.
        balanced: whether a causal mask leaves each device of a ring equally many visible scores.
        dots_again: matmuls, and `attention`, that backward runs again although the policy is called
            `dots`.
        accumulates: whether gradients are added to the step's sum even if a step has only one
            micro-batch, or ZeRO shards them at once.
        expert_pace: rates of experts' kernels relative to those of others.
        experts_again: whether backward always computes experts' hidden units again, and so never
            repeats the rest of their forward pass.
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
    dots_again: tuple[str, ...] = ()
    accumulates: bool = True
    expert_pace: float = 1.0
    experts_again: bool = False


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """A layout. Devices are numbered tp first, then col, row, ulysses, cp, ep, dp, replicas, pp.

    Args:
        gpus: devices of the whole step; dp follows.
        global_batch: sequences of a step.
        micro_batch: sequences of a micro-batch on one device.
        tp, pp, cp: axis sizes.
        virtual_stages: chunks per stage.
        zero: ZeRO stage, 0 to 3.
        zero_group: devices that share a shard; 0: all of dp x ep x cp x ulysses.
        sequence_parallel: whether tokens between the layers' matmuls are sharded over tp.
        remat: what backward recomputes.
        remat_layers: how many of a model part's first layers do so, or periods of layers whose
            shapes differ; None: all.
        row, col: sizes of the grid.
        ep: devices that split experts, and samples as dp does.
        ulysses: devices that split each sequence, and in attention heads.
        replicas: copies of a state that ZeRO shards over dp x ep x cp x ulysses.
        schedule: the pipeline's schedule.
        experts_over: devices that divide a layer's experts among them; 0: ep.
        expert_tp: devices that share each expert's matrices; 0: as many as share other matrices.
        dispatch: how tokens reach their experts.
        latents: whether devices that share sequences exchange latent vectors in latent attention.
        absorbed: whether latent attention takes scores on latent vectors.
        imbalance: pairs of a token and an expert on the busiest device, over the mean.
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
    ep: int = 1
    ulysses: int = 1
    replicas: int = 1
    schedule: str = "1f1b"
    experts_over: int = 0
    expert_tp: int = 0
    dispatch: Dispatch = "allgather"
    latents: bool = False
    absorbed: bool = False
    imbalance: float = 1.0

    @property
    def dp(self) -> int:
        inside = self.tp * self.row * self.col * self.sequence_shards * self.ep
        return self.gpus // (inside * self.pp * self.replicas)

    @property
    def sample_shards(self) -> int:
        """Devices that split the samples of a batch."""
        return self.replicas * self.dp * self.ep

    @property
    def sequence_shards(self) -> int:
        """Devices that split each sequence."""
        return self.cp * self.ulysses

    @property
    def batch_shards(self) -> int:
        """Devices that split the tokens of a batch."""
        return self.sample_shards * self.sequence_shards

    @property
    def matrix_shards(self) -> int:
        """Devices that share a weight matrix."""
        return self.tp * self.row * self.col

    @property
    def inner(self) -> int:
        """Devices that share the heads, the hidden units of an MLP, and the vocabulary."""
        return self.tp * self.col

    @property
    def expert_devices(self) -> int:
        """Devices that divide a layer's experts among them."""
        return self.experts_over or self.ep

    @property
    def expert_slices(self) -> int:
        """Devices that share each expert's matrices."""
        return self.expert_tp or self.inner

    @property
    def expert_shards(self) -> int:
        """Devices that share the matrices of a layer's experts."""
        return self.expert_devices * self.expert_slices

    @property
    def expert_copies(self) -> int:
        """Devices that hold the same slices of the same experts."""
        return max(1, self.gpus // (self.pp * self.expert_shards))

    @property
    def micro_batches(self) -> int:
        return max(1, self.global_batch // (self.sample_shards * self.micro_batch))

    @property
    def shards(self) -> int:
        """Devices that share one copy of the state."""
        return (self.zero_group or self.batch_shards // self.replicas) if self.zero else 1

    def tokens(self, length: int) -> int:
        """Tokens of a micro-batch on one device, for sequences of `length`."""
        return self.micro_batch * length // (self.sequence_shards * self.row)

    def stream(self, length: int, hidden: int) -> float:
        """Elements of the residual stream of a micro-batch on one device."""
        sharded = self.tp if self.sequence_parallel else 1
        return self.tokens(length) // sharded * hidden / self.col

    def remats(self, layers: int) -> list[tuple[Remat, int]]:
        """Numbers of layers of a model part by what they recompute."""
        first = layers if self.remat_layers is None else min(self.remat_layers, layers)
        both: list[tuple[Remat, int]] = [(self.remat, first), ("none", layers - first)]
        return [(remat, count) for remat, count in both if count]

    def group(self, axes: Sequence[str]) -> Group:
        """The devices along some axes.

        Besides axes: `shard` and `replica` divide the batch as ZeRO does, `ends` are a device of
        the first stage and its counterpart on the last, `experts` divide a layer's experts, and
        `expert copies` hold the same ones.
        """
        if axes == ("experts",):
            return Group(self.expert_devices, self.expert_slices)
        if axes == ("expert copies",):
            return Group(self.expert_copies, self.expert_shards)
        if axes == ("shard",):
            return Group(self.shards, self.matrix_shards)
        if axes == ("replica",):
            return Group(self.batch_shards // self.shards, self.matrix_shards * self.shards)
        if axes == ("ends",):
            return Group(min(2, self.pp), self.gpus // self.pp * max(1, self.pp - 1))
        sizes = {
            name: int(getattr(self, name))
            for name in ("tp", "col", "row", "ulysses", "cp", "ep", "dp", "replicas", "pp")
        }
        order = tuple(sizes)
        first = min(order.index(axis) for axis in axes)
        inside = math.prod(sizes[axis] for axis in order[:first])
        return Group(math.prod(sizes[axis] for axis in axes), inside)


class Work(NamedTuple):
    """One micro-batch of a layer on a device, for which a part predicts times.

    Args:
        implementation: the program's kernels.
        parallelism: its layout.
        accelerator: the device.
        tokens: T of the micro-batch on the device.
    """

    implementation: Implementation
    parallelism: Parallelism
    accelerator: Accelerator
    tokens: int
