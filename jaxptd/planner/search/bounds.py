"""Lower bounds of a step's time and memory, fast enough to compute for every layout.

They assume that all stages take the mean time, that parameters are sent in one message, and that
memory holds only the state and what layers save for backward. What they ignore can only make a step
slower or larger.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxptd.config import Remat
from jaxptd.costs import kernels
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxptd.hardware import Cluster, Group
from jaxptd.planner.cost.collectives import BESIDE
from jaxptd.planner.search.space import MOST_FEWER, Choice, MeshShape, ScheduleChoice, Space

SMALL = 1024  # hidden units; from about 650, a matmul takes longer than moving its result
WAITING = ("1f1b", "gpipe", "interleaved")  # the first and last micro-batch fill the pipeline


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """One micro-batch on the devices that share a layer.

    Args:
        layers: remat policy -> seconds of all layers of the model.
        ends: seconds of embedding and loss.
        last: the part of these that the loss takes.
        hop: seconds of a message between two stages, forward and back.
        number: number of layers, at least one for each part of the model.
        kept: bytes that all layers save for backward, by remat policy.
        state: bytes of parameters and moments on a device.
        gradients: bytes of gradients, in float32.
        matrices: the part of these that belongs to the layers' matrices.
        experts: the part of these that belongs to experts.
    """

    layers: Callable[[Remat], float]
    ends: float
    last: float
    hop: float
    number: int
    kept: Mapping[Remat, float]
    state: float
    gradients: float
    matrices: float
    experts: float


class Bound(NamedTuple):
    """A step's least time in seconds, and the share of layers that recompute."""

    seconds: float
    choice: Choice
    share: float


class Bounds:
    """The bounds of all schedules, ZeRO stages and choices with the same axes.

    Args:
        cost: the layer layout's.
        mesh_shape: the layout's.
        space: contains it.
        cluster: the devices.
        memory: bytes per device.
    """

    def __init__(
        self, cost: LayerCost, mesh_shape: MeshShape, space: Space, cluster: Cluster, memory: float
    ) -> None:
        self.cost, self.mesh_shape, self.space = cost, mesh_shape, space
        self.cluster, self.memory = cluster, memory
        self._zeros: dict[Sharding, tuple[float, float, Sent]] = {}
        self._schedules: dict[tuple[str, int | None, int], _Schedule] = {}

    @property
    def worth(self) -> int:
        """The most layers that may move from the part with the loss to the others.

        They take as long as the loss; without more of them that part would wait. One is tried even
        if the loss takes less than a layer: with few micro-batches the step may get shorter.
        """
        layers = self.cost.last * self.cost.number / self.cost.layers("none")
        return min(MOST_FEWER, max(1, math.ceil(layers)))

    @functools.cached_property
    def quickest(self) -> Remat:
        """The policy with which layers take least time, if all of them recompute.

        In a loop, what a layer saves is moved twice more, which may take longer than recomputing
        it; for matmuls and attention only if matrices are small, or if experts, which backward
        repeats with every policy, are most of the layer.
        """
        model = self.space.config.model
        small = model.hidden_size < SMALL or model.moe is not None
        again = ("dots", *(("attention", "full") if small else ()))
        chosen = [choice.remat for choice in self.space.choices if choice.remat in again]
        return min(["none", *chosen], key=self.cost.layers)

    def least(self, pipe: ScheduleChoice) -> float | None:
        """Least seconds with any remat and offloading; None: it cannot fit.

        Checks closely only whether a step fits without either, as most layouts never need more.
        """
        choices, schedule = self.space.choices, self._schedule(pipe)
        state, gradients, sent = self._zero(pipe)
        if self._share(choices[0], state, gradients, schedule.flying) is None:
            least = gradients if self.space.hosts_state else state + gradients
            if len(choices) == 1 or least > self.memory:
                return None
        return self._seconds(schedule, sent, 1.0, self.quickest)

    def of(self, pipe: ScheduleChoice, choice: Choice) -> Bound | None:
        """The bound of a choice; None if it cannot fit."""
        state, gradients, sent = self._zero(pipe)
        schedule = self._schedule(pipe)
        share = self._share(choice, state, gradients, schedule.flying)
        if share is None:
            return None
        shares = (share, 1.0) if choice.remat != "none" else (share,)
        seconds = min(self._seconds(schedule, sent, each, choice.remat) for each in shares)
        return Bound(seconds, choice, share)

    def _seconds(self, schedule: "_Schedule", sent: "Sent", share: float, remat: Remat) -> float:
        """Seconds of a step in which a share of the layers recomputes."""
        cost, m, p = self.cost, self.mesh_shape.micro_batches, self.mesh_shape.pp
        quick = cost.layers(remat if share == 1 else "none")
        layers = quick if share in (0, 1) else share * cost.layers(remat) + (1 - share) * quick
        layers, quick = (seconds + self._left(sent, seconds) for seconds in (layers, quick))
        each = layers + cost.ends + p * schedule.hops
        slowest = max(
            each / p,
            schedule.last * quick + cost.last + schedule.hops,
            schedule.most * quick + schedule.hops,
        )
        waiting = (each - slowest) / schedule.chunks if schedule.waits else 0.0
        return m * slowest + waiting + sent.once

    def _left(self, sent: "Sent", layers: float) -> float:
        """Seconds of ZeRO's collectives that layers do not hide."""
        beside = BESIDE * layers if self.mesh_shape.pp == 1 else 0.0
        return max(0.0, sent.layerwise - beside)

    def _share(self, choice: Choice, state: float, gradients: float, flying: float) -> float | None:
        """The least share of layers that must recompute; None if the step cannot fit."""
        if choice.offload == "activations" and self.mesh_shape.pp > 1:
            return None
        there = self.memory if choice.offload == "optimizer" else self.memory - state
        left = there if self.mesh_shape.micro_batches == 1 else there - gradients
        if left < 0 or gradients > there:
            return None
        most, least = flying * self.cost.kept["none"], flying * self.cost.kept[choice.remat]
        if choice.offload == "activations" or (choice.remat == "full" and self.mesh_shape.pp > 1):
            least = 0.0  # the host holds it, or a pipeline saves only a part's input
        if most <= left:
            return 0.0
        share = (most - left) / (most - least) if most > least else 2.0
        return share if share <= 1 else None

    def _zero(self, pipe: ScheduleChoice) -> tuple[float, float, "Sent"]:
        """Bytes of state and gradients, and the time of what is sent."""
        runs = 2 if pipe.zero == 1 and _in_one_go(self.mesh_shape) else pipe.zero
        sharding = Sharding(runs, pipe.replicas, pipe.replica_state == "split")
        if sharding not in self._zeros:
            sent = sent_by(sharding, self.cost, self.mesh_shape, self.cluster)
            self._zeros[sharding] = (*state_bytes(self.cost, self.mesh_shape, sharding), sent)
        return self._zeros[sharding]

    def _schedule(self, pipe: ScheduleChoice) -> "_Schedule":
        key = pipe.schedule, pipe.virtual_stages, pipe.fewer
        if key not in self._schedules:
            p, m = self.mesh_shape.pp, self.mesh_shape.micro_batches
            chunks = pipe.virtual_stages or 1
            cut = self.space.cut(self.mesh_shape, pipe)
            flying = in_flight(pipe.schedule, p, m, pipe.virtual_stages)
            self._schedules[key] = _Schedule(
                flying=flying * min(cut.first, 1 / p),
                chunks=chunks,
                hops=chunks * self.cost.hop if p > 1 else 0.0,
                last=cut.last,
                most=cut.most,
                waits=pipe.schedule in WAITING,
            )
        return self._schedules[key]


class _Schedule(NamedTuple):
    """The figures of a schedule that bounds need.

    flying: micro-batches of the whole model whose activations a stage holds.
    chunks: per stage.
    hops: seconds of messages per micro-batch and stage.
    last: share of layers on the stage with the loss.
    most: share of layers on the stage with the most.
    waits: whether the first and last micro-batch fill the pipeline.
    """

    flying: float
    chunks: int
    hops: float
    last: float
    most: float
    waits: bool


def in_flight(schedule: str, stages: int, micro_batches: int, chunks: int | None) -> float:
    """Least activations that a stage holds, in micro-batches of whole stages; see `schedules`."""
    p, m = stages, micro_batches
    if schedule == "interleaved" and chunks:
        return min(m, p + (p - 1) / chunks)
    return m if schedule == "gpipe" else min(m, p)


class Sharding(NamedTuple):
    """ZeRO as a step runs it: the stage, replicas of the state, and whether these split it."""

    zero: int
    replicas: int = 1
    split: bool = False


def state_bytes(cost: LayerCost, mesh_shape: MeshShape, sharding: Sharding) -> tuple[float, float]:
    """Least bytes of parameters and moments; of gradients and gathered parameters."""
    zero, replicas, split = sharding
    shards = mesh_shape.shards // replicas
    state = cost.state / mesh_shape.pp / (shards if zero else 1) / (replicas if split else 1)
    gradients = cost.gradients / mesh_shape.pp / (shards if zero > 1 else 1)
    # ZeRO gathers parameters in 16 bits; gradients have 32
    gathered = cost.gradients / mesh_shape.pp / 2 if zero in (1, 2) and shards > 1 else 0.0
    if split and zero == 3:  # shards of which the state has a part
        gathered = cost.gradients / mesh_shape.pp / 2 / shards
    # Gradients of matrices are then never accumulated, and stay in 16 bits.
    if _in_one_go(mesh_shape) and shards == 1:
        gradients -= cost.matrices / 2
    elif _in_one_go(mesh_shape) and shards == mesh_shape.layer_layout.layout.ep:
        gradients -= cost.experts / 2
    return state, gradients + gathered


class Sent(NamedTuple):
    """Seconds for sending gradients and for ZeRO's gathers.

    layerwise: per micro-batch, on all stages together.
    once: per step.
    """

    layerwise: float = 0.0
    once: float = 0.0


def _in_one_go(mesh_shape: MeshShape) -> bool:
    """True without pipeline and micro-batches, when a loop runs ZeRO 1 as 2."""
    return mesh_shape.pp * mesh_shape.micro_batches == 1


def sent_by(sharding: Sharding, cost: LayerCost, mesh_shape: MeshShape, cluster: Cluster) -> Sent:
    """Least seconds for what a ZeRO stage sends; fewer devices have the same experts than the rest.

    What has the same devices is sent in one message. Shards of gradients are added up over replicas
    once a step, those of layers beside the layers where these send gradients once. Replicas that
    split the state gather shards of parameters in 16 bits, and reduce-scatter those of gradients.
    """
    zero, replicas, split = sharding
    layout, p = mesh_shape.layer_layout.layout, mesh_shape.pp
    inside = layout.tp * layout.row * layout.col
    experts = cost.experts if layout.ep > 1 else 0.0
    others = cost.gradients - experts, cost.matrices - experts
    between = layout.ep if layout.sequence_shards == 1 else 1  # these are inside of ep, dp outside
    shards = mesh_shape.shards // replicas
    copies = Group(shards // layout.ep, inside * between)
    sent = [
        _sent(zero, whole / p, matrices, mesh_shape, functools.partial(_in_group, cluster, group))
        for whole, matrices, group in (
            (*others, Group(shards, inside)),
            (experts, experts, copies),
        )
    ]
    if replicas > 1 and zero:
        beside = p == 1 and (zero == 1 or mesh_shape.micro_batches == 1) and not split
        size = (cost.gradients - cost.matrices if beside else cost.gradients) / p / shards
        among = functools.partial(_in_group, cluster, Group(replicas, inside * shards))
        scattered = (among(REDUCE_SCATTER, size), among(ALL_GATHER, size / 2)) if split else ()
        sent.append(Sent(once=sum(scattered) or among(ALL_REDUCE, size)))
    return Sent(sum(each.layerwise for each in sent), sum(each.once for each in sent))


def _in_group(cluster: Cluster, group: Group, kind: str, size: float) -> float:
    return kernels.collective(cluster, kind, group, size).seconds


def _sent(
    zero: int,
    whole: float,
    matrices: float,
    mesh_shape: MeshShape,
    seconds: Callable[[str, float], float],
) -> Sent:
    """Least seconds for parameters that the same devices have.

    Args:
        zero: the stage.
        whole: bytes of their gradients on a stage of the pipeline.
        matrices: bytes of the gradients of layers' matrices, on all stages.
        mesh_shape: the layout's.
        seconds: kind and bytes of a collective -> its time.
    """
    if not whole:
        return Sent()
    if zero == 0:
        return Sent(once=seconds(ALL_REDUCE, whole))
    # Layers in a loop may be sent during other layers, at stage 1 in the first and last
    # micro-batch.
    alone = whole if mesh_shape.pp > 1 else max(whole - matrices, 0.0)
    gathered = seconds(ALL_GATHER, alone / 2)
    if zero == 1:
        return Sent(once=seconds(REDUCE_SCATTER, alone) + gathered)
    reduced, layers = seconds(REDUCE_SCATTER, matrices), seconds(ALL_GATHER, matrices / 2)
    if zero == 2:
        return Sent(
            reduced + (layers / mesh_shape.micro_batches if mesh_shape.pp == 1 else 0.0), gathered
        )
    return Sent(reduced + 2 * layers)
