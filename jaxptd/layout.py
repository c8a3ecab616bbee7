"""The axes of the mesh, and `Layout`, which says how a model is spread over devices.

The only place that spells an axis. Axes from the slowest link to the fastest, in Megatron's rank
order (tp fastest, then cp, ep, dp, pp): `pp, replicas, dp, ep, cp, ulysses, row, col, tp`. All are
always in the mesh, most of them with size 1.

Source: Narayanan et al., arXiv 2104.04473; Megatron-LM's `parallel_state`.
"""

import dataclasses
import math
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, get_args

from jaxptd.context_parallel import STRATEGIES, ContextParallel, RingKind
from jaxptd.display import settings_html, settings_text
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_fields, named_fields


class Axis(StrEnum):
    """An axis of the device mesh, declared in mesh order: the first spans the slowest links."""

    PP = "pp"  # pipeline stages
    REPLICAS = "replicas"  # shards the batch as dp does, but ZeRO shards nothing over it
    DP = "dp"  # data parallelism: shards the batch
    EP = "ep"  # expert parallelism: shards experts; to everything else it is more of dp
    CP = "cp"  # context parallelism: shards the sequence, for ring attention
    ULYSSES = "ulysses"  # shards the sequence too, but in attention heads instead
    ROW = "row"  # 2D tensor parallel grid
    COL = "col"
    TP = "tp"  # Megatron's tensor parallelism: shards weight matrices along one dimension


SAMPLE_AXES = (Axis.REPLICAS, Axis.DP, Axis.EP)  # they shard the samples of a batch
SEQUENCE_AXES = (Axis.CP, Axis.ULYSSES)  # they shard its sequences, whatever the layer
BATCH_AXES = (*SAMPLE_AXES, *SEQUENCE_AXES)
ZERO_AXES = BATCH_AXES[1:]  # ZeRO shards the state over them, each replica's by itself
Matmul2D = Literal["gather", "summa", "fox", "cannon"]
Attention2D = Literal["heads", "blocks"]
ExpertSplit = Literal["cut", "whole"]
LatentExchange = Literal["compressed", "expanded"]
LatentProducts = Literal["expanded", "absorbed"]
ZeroStage = Literal[0, 1, 2, 3]
Offloaded = Literal["optimizer", "parameters", "activations"]
Offload = Literal["none", "optimizer", "parameters", "activations"]
UpdateOn = Literal["device", "host"]
Balance = Literal["none", "samples", "tokens"]
ReplicaState = Literal["copied", "split"]
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v")  # or the path of a table
SQUARE: tuple[Matmul2D, ...] = ("fox", "cannon")  # these need as many rows as columns


@named_fields
@dataclasses.dataclass(frozen=True)
class Layout:
    """The split of a model over devices: the size of each axis, and the algorithm along it.

    >>> layout = Layout(dp=2, tp=4, sequence_parallel=True)
    >>> layout
    Layout(dp=2, tp=4, sequence_parallel=True)
    >>> layout.num_devices
    8

    Args:
        pp: pipeline stages.
        dp: data-parallel replicas; each takes a share of the batch.
        cp: devices that split each sequence, with ring attention (context parallel), or each image,
            in strips.
        ulysses: devices that split each sequence as along cp, but in attention its heads instead,
            by all-to-alls before and after. With cp, each has a ring for its heads.
        tp: devices that shard each weight matrix along one dimension (Megatron). Either this or
            row x col.
        row: rows of the grid that shards every matrix in blocks; also shards the sequence.
        col: columns of that grid; also shards hidden units.
        ep: devices that split the experts of each layer, and take a share of the batch as dp does.
        replicas: copies of a state that ZeRO shards (HSDP, hybrid sharding). Each shards it over
            its own dp x ep x cp x ulysses devices, which are neighbours, such as those of a node;
            between replicas only shards of gradients are added up, once a step.
        replica_state: masters and moments on replicas: copied (each has all in its shards), or
            split (a shard is split over replicas, and gathered over them once a step in the
            precision of layers).
        experts: experts over tp: cut (each device has a slice of every expert's hidden units), or
            whole (each has other experts, with larger matmuls where experts are narrow).
        sequence_parallel: also shard the sequence over tp, between the matmuls.
        collective_matmul: with sequence_parallel, gather and reduce-scatter in ring steps, each
            overlapped with a slice of the matmul that needs it.
        keep_gathered: with sequence_parallel, true saves all-gathered activations for backward;
            false gathers them again (less memory, more traffic).
        ring: attention over cp (and row): a ring, zigzag (balanced) or blockwise (contiguous
            shards); rsa (whole rows of scores, as first published); or gather (all keys and values
            gathered, balanced).
        latent_exchange: what latent attention moves over cp and ulysses: compressed (the latent
            vectors of tokens, from which each device computes keys and values wherever it meets
            them), or expanded (keys and values of all heads; always with rsa).
        latent_products: what latent attention multiplies with W_kv: expanded (latent vectors, which
            yields the keys and values of all heads), or absorbed (queries and attention's output,
            so that scores are taken on the latent vectors themselves, which also move).
        balance: with data.documents=apart or whole, what is arranged so that devices have equal
            work: none; samples (of a step, over replicas and micro-batches); or tokens (also those
            of each sequence, over cp with ring=gather). The loss stays the same.
        matmul2d: matmuls on the grid: gather, summa, or, on a square grid, fox or cannon.
        matmul2d_slices: slices in which gather works, each gathered during the matmul of the one
            before.
        attention2d: attention on the grid: heads (heads over col, a ring over row), or blocks
            (blocks of every head, none of which is padded).
        schedule: pipeline schedule: 1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v, or the path of a
            table (.csv).
        virtual_stages: model chunks per stage, for schedules with several; null is the schedule's
            default.
        stage_layers: layers of each stage (of each chunk in model order where stages hold several;
            an encoder's layers, then the decoder's); null splits them as evenly as possible.
        zero: ZeRO stage, sharding over dp x ep x cp x ulysses: 1 shards parameters and optimizer
            state between steps, 2 also gradients, 3 also parameters during a step; 0 shards
            nothing.
        offload: what lives in host memory: none, optimizer (master parameters and moments),
            parameters (master parameters; a device holds one layer at a time), activations (what
            model.remat=dots saves), or a list of these.
        update_on: with offload=optimizer, where the update runs: on the device, or on the host's
            CPUs.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ulysses: int = 1
    tp: int = 1
    row: int = 1
    col: int = 1
    ep: int = 1
    replicas: int = 1
    replica_state: ReplicaState = "copied"
    experts: ExpertSplit = "cut"
    sequence_parallel: bool = False
    collective_matmul: bool = False
    keep_gathered: bool = False
    ring: RingKind = "zigzag"
    latent_exchange: LatentExchange = "compressed"
    latent_products: LatentProducts = "expanded"
    balance: Balance = "none"
    matmul2d: Matmul2D = "gather"
    matmul2d_slices: int = 1
    attention2d: Attention2D = "heads"
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    stage_layers: tuple[int, ...] | None = None
    zero: ZeroStage = 0
    offload: Offload | tuple[Offloaded, ...] = "none"
    update_on: UpdateOn = "device"

    def __post_init__(self) -> None:
        check_fields(self, "layout")
        self._sort_offload()
        self._check_sizes()
        self._check_matmul2d()
        self._check_sequence()
        self._check_schedule()
        self._check_state()

    def _sort_offload(self) -> None:
        """Normalises what is offloaded: one name, or names in order."""
        if isinstance(self.offload, str):
            return
        if len(self.offloaded) != len(self.offload):
            raise UserError(f"layout.offload={list(self.offload)} names one twice; name it once")
        names = tuple(name for name in get_args(Offloaded) if name in self.offloaded)
        same: Any = names if len(names) > 1 else (*names, "none")[0]
        object.__setattr__(self, "offload", same)

    def _check_sizes(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise UserError(
                    f"layout.{axis}={size}: an axis has at least one device; use 1 or more"
                )
        if self.tp > 1 and self.has_grid:
            raise UserError(
                f"layout.tp={self.tp} with layout.row={self.row}, layout.col={self.col}: a matrix "
                "is sharded over tp or over a row x col grid, not both; set tp=1 or row=col=1"
            )
        if self.ulysses > 1 and self.has_grid:
            raise UserError(
                f"layout.ulysses={self.ulysses} with {self._grid}, which shards heads over its "
                "columns; use layout.tp instead of the grid, or layout.cp instead of layout.ulysses"
            )

    def _check_matmul2d(self) -> None:
        if self.matmul2d_slices < 1:
            raise UserError(f"layout.matmul2d_slices={self.matmul2d_slices}: use 1 or more")
        if self.matmul2d_slices > 1 and self.matmul2d != "gather":
            raise UserError(
                f"layout.matmul2d_slices={self.matmul2d_slices}: layout.matmul2d={self.matmul2d} "
                "has no slices; use layout.matmul2d=gather or layout.matmul2d_slices=1"
            )
        if self.matmul2d in SQUARE and self.row != self.col:
            raise UserError(
                f"{self._grid} is not square, but layout.matmul2d={self.matmul2d} needs that; "
                "use layout.matmul2d=gather or summa, or as many rows as columns"
            )

    def _check_sequence(self) -> None:
        if self.sequence_parallel and self.has_grid:
            raise UserError(
                f"{self._grid} shards the sequence; leave layout.sequence_parallel false"
            )
        if self.collective_matmul and not self.sequence_parallel:
            raise UserError(
                "layout.collective_matmul=true needs layout.sequence_parallel=true; set both, or "
                "leave it false (a grid has layout.matmul2d_slices)"
            )

    def _check_schedule(self) -> None:
        if self.schedule not in SCHEDULES and not self.schedule.endswith(".csv"):
            raise UserError(
                f"layout.schedule={quoted(self.schedule)}: use one of {', '.join(SCHEDULES)}, "
                "or the path of a table that ends in .csv"
            )
        if self.virtual_stages is not None and self.virtual_stages < 1:
            raise UserError(f"layout.virtual_stages={self.virtual_stages}: use 1 or more, or null")

    def _check_state(self) -> None:
        if self.replica_state == "split" and self.hosts_parameters:
            offloaded = ",".join(sorted(self.offloaded))
            raise UserError(
                f"layout.replica_state=split with layout.offload={offloaded}: masters are split "
                "over replicas or in host memory; choose one of the two"
            )

    @property
    def _grid(self) -> str:
        return f"a grid of layout.row={self.row} x layout.col={self.col}"

    @cached_property
    def sizes(self) -> Mapping[Axis, int]:
        """Devices along each axis, in mesh order."""
        return {axis: getattr(self, axis.value) for axis in Axis}

    @property
    def has_grid(self) -> bool:
        """Matrices are sharded over a grid of devices (including 1 x n and n x 1)."""
        return self.row * self.col > 1

    @property
    def sample_shards(self) -> int:
        """Devices that split the samples of a batch: replicas x dp x ep."""
        return self.replicas * self.dp * self.ep

    @property
    def sequence_shards(self) -> int:
        """Devices that split each sequence in every layer: cp x ulysses."""
        return self.cp * self.ulysses

    @property
    def batch_shards(self) -> int:
        """Devices that split the tokens of a batch: replicas x dp x ep x cp x ulysses."""
        return self.sample_shards * self.sequence_shards

    @property
    def zero_shards(self) -> int:
        """Devices over which ZeRO shards a state: dp x ep x cp x ulysses."""
        return self.batch_shards // self.replicas

    @property
    def splits_state(self) -> bool:
        """Each shard of the state is split over replicas."""
        return self.replica_state == "split" and self.zero > 0 and self.replicas > 1

    @property
    def expert_axes(self) -> tuple[Axis, ...]:
        """The axes that split the experts of a layer."""
        return (Axis.EP, Axis.TP) if self.experts == "whole" else (Axis.EP,)

    @property
    def expert_devices(self) -> int:
        """Devices that split the experts of a layer."""
        return math.prod(self.sizes[axis] for axis in self.expert_axes)

    @property
    def expert_slices(self) -> int:
        """Devices that share each expert's matrices."""
        return self.expert_shards // self.expert_devices

    @property
    def expert_shards(self) -> int:
        """Devices that share the matrices of a layer's experts."""
        return self.ep * self.tp

    @cached_property
    def ring_size(self) -> int:
        """Devices that share a sequence's keys and pass them around a ring."""
        return self.cp * (self.row if self.attention2d == "heads" else 1)

    @property
    def places_tokens(self) -> bool:
        """Each sample's tokens are arranged over the devices of the ring by their work."""
        return self.balance == "tokens" and self.ring_size > 1

    @property
    def context_parallel(self) -> ContextParallel:
        """The strategy by which the devices of a ring share a sequence."""
        return STRATEGIES[self.ring]

    @property
    def expands_latents(self) -> bool:
        """Devices share sequences in a way that can exchange latent vectors and expand them."""
        shared = self.sequence_shards > 1 and self.context_parallel.exchange.expands
        return shared and not self.absorbs_latents

    @property
    def exchanges_latents(self) -> bool:
        """Devices that share sequences exchange latent vectors, in models that have them, and make
        keys and values of them wherever they meet them.
        """
        return self.expands_latents and self.latent_exchange == "compressed"

    @property
    def absorbs_latents(self) -> bool:
        """Latent attention takes scores on latent vectors, in models that have them."""
        return self.latent_products == "absorbed"

    @property
    def attends_latents(self) -> bool:
        """Attention takes latent vectors, not the keys and values made of them."""
        return self.exchanges_latents or self.absorbs_latents

    @property
    def gathers_inputs(self) -> bool:
        """Inputs of each layer's first matmuls are all-gathered along the sequence before them."""
        return self.sequence_parallel and not self.collective_matmul

    @property
    def offloaded(self) -> frozenset[str]:
        """Names of what is kept in host memory."""
        names = (self.offload,) if isinstance(self.offload, str) else self.offload
        return frozenset(names) - {"none"}

    @property
    def hosts_parameters(self) -> bool:
        """Master parameters are in host memory."""
        return not self.offloaded.isdisjoint(("optimizer", "parameters"))

    @property
    def hosts_moments(self) -> bool:
        """The optimizer's moments are in host memory."""
        return "optimizer" in self.offloaded

    @property
    def fetches_layers(self) -> bool:
        """A device has a layer's parameters only while the layer runs, gathered or copied then."""
        return self.zero == 3 or "parameters" in self.offloaded

    @property
    def sequence_unit(self) -> int:
        """Sequences split evenly if their length is a multiple of this.

        Over the axes that shard it, into the chunks that each device of a ring holds (two of a
        zigzag), and into a grid's panels for attention in blocks.
        """
        unit = self.sequence_shards * (self.tp if self.sequence_parallel else self.row)
        if self.ring_size > 1:
            unit = math.lcm(unit, self.context_parallel.order.chunks * self.ring_size)
        if self.attention2d == "blocks" and self.has_grid:
            unit = math.lcm(unit, self.cp * math.lcm(self.row, self.col) * self.matmul2d_slices)
        return unit

    @property
    def unfused_attention(self) -> str | None:
        """The option that computes attention without a fused kernel, as `name=value`, if any."""
        if self.attention2d == "blocks" and self.has_grid:
            return "layout.attention2d=blocks"
        if self.context_parallel.exchange.whole_rows and self.ring_size > 1:
            return f"layout.ring={self.ring}"
        return None

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        names = ("sequence_parallel", "collective_matmul", "keep_gathered")
        sequence = [name for name in names if getattr(self, name)]
        slices = f" in {self.matmul2d_slices} slices" if self.matmul2d_slices > 1 else ""
        grid = [f"{self.matmul2d}{slices}", str(self.attention2d)] if self.has_grid else []
        sequence += ["experts=whole"] if self.experts == "whole" else []
        ring = [str(self.ring)] if self.ring_size > 1 else []
        expanded = self.expands_latents and not self.exchanges_latents
        ring += ["latent_exchange=expanded"] if expanded else []
        ring += ["latent_products=absorbed"] if self.absorbs_latents else []
        ring += [f"balance={self.balance}"] if self.balance != "none" else []
        pipeline = [self.schedule] if self.pp > 1 else []
        zero = [f"zero={self.zero}"] if self.zero else []
        zero += ["replica_state=split"] if self.splits_state else []
        hosted = [name for name in get_args(Offloaded) if name in self.offloaded]
        offload = [f"offload={','.join(hosted)}"] if hosted else []
        offload += ["update_on=host"] if self.update_on == "host" else []
        words = sizes + pipeline + sequence + ring + grid + zero + offload
        return " ".join(words) or "one device"

    __repr__ = settings_text
    _repr_html_ = settings_html


def check_node(node: int) -> None:
    """Raises UserError for a number of devices that no node has."""
    if node < 1:
        raise UserError(f"node={node}: a node has 1 device or more")
