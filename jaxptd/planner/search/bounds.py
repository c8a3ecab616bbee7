"""Lower bounds of a step's time and memory, quick enough for every layout there is.

All stages are as fast as their mean; parameters are sent in one message; memory is that of the state
and of what layers keep. What is left out can only make a step slower, or larger.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxptd.hardware import Cluster, Group
from jaxptd.planner.cost import links
from jaxptd.planner.search.space import Axes, Choice, Pipe

WAITING = ("1f1b", "gpipe", "interleaved")  # whose first and last micro-batch fill a pipeline


@dataclasses.dataclass(frozen=True)
class UnitCost:
    """One micro-batch on the devices of a unit.

    Args:
        layers: what they compute again -> seconds of all layers of the model.
        ends: seconds of embedding and loss.
        kept: bytes that all layers keep, by what they compute again.
        state: bytes of parameters and moments on a device.
        gradients: bytes of gradients, in float32.
        matrices: of these, of the layers' matrices.
    """

    layers: Callable[[str], float]
    ends: float
    kept: Mapping[str, float]
    state: float
    gradients: float
    matrices: float


class Bound(NamedTuple):
    """Seconds of a step at least, and the share of layers that compute again."""

    seconds: float
    choice: Choice
    share: float


def bounds(
    cost: UnitCost,
    axes: Axes,
    pipe: Pipe,
    choices: Sequence[Choice],
    sent: "Sent",
    memory: float,
) -> Iterator[Bound]:
    """The bounds of the choices that may fit.

    Args:
        cost: of the unit.
        axes: of the layout.
        pipe: its schedule and ZeRO stage.
        choices: to bound.
        sent: seconds of what ZeRO sends.
        memory: bytes of a device.
    """
    p, m = axes.pp, axes.micro_batches
    flying = in_flight(pipe.schedule, p, m, pipe.virtual_stages) / p
    rounds = m + ((p - 1) / (pipe.virtual_stages or 1) if pipe.schedule in WAITING else 0)
    for choice in choices:
        if choice.offload == "activations" and p > 1:
            continue
        share = least_share(cost, axes, pipe, choice, flying, memory)
        if share is None:
            continue
        each = cost.ends + sent.layerwise
        if share:
            each += share * cost.layers(choice.remat)
        if share < 1:
            each += (1 - share) * cost.layers("none")
        yield Bound(rounds * each / p + sent.once, choice, share)


def least_share(
    cost: UnitCost, axes: Axes, pipe: Pipe, choice: Choice, flying: float, memory: float
) -> float | None:
    """The share of layers that compute again at least; None if the step cannot fit.

    flying: micro-batches of the whole model whose activations a stage holds.
    """
    state, gradients = state_bytes(cost, axes, pipe.zero)
    if choice.offload == "optimizer":
        state = 0.0
    left = memory - state - (0 if axes.micro_batches == 1 else gradients)
    if left < 0 or gradients > memory - state:
        return None
    most, least = flying * cost.kept["none"], flying * cost.kept[choice.remat]
    if choice.offload == "activations" or (choice.remat == "full" and axes.pp > 1):
        least = 0.0  # kept by the host; by a pipeline only the input of a part
    if most <= left:
        return 0.0
    share = (most - left) / (most - least) if most > least else 2.0
    return share if share <= 1 else None


def in_flight(schedule: str, stages: int, micro_batches: int, chunks: int | None) -> float:
    """Micro-batches of whole stages whose activations a stage holds, at least; see `schedules`."""
    p, m = stages, micro_batches
    if schedule == "interleaved" and chunks:
        return min(m, p + (p - 1) / chunks)
    return m if schedule == "gpipe" else min(m, p)


def state_bytes(cost: UnitCost, axes: Axes, zero: int) -> tuple[float, float]:
    """Bytes of parameters and moments; of gradients and gathered parameters: at least."""
    shards = axes.dp * axes.unit.layout.cp
    state = cost.state / axes.pp / (shards if zero else 1)
    gradients = cost.gradients / axes.pp / (shards if zero > 1 else 1)
    # ZeRO gathers in 16 bits what gradients have in 32
    gathered = cost.gradients / axes.pp / 2 if zero in (1, 2) and shards > 1 else 0.0
    return state, gradients + gathered


class Sent(NamedTuple):
    """Seconds of gradients and of ZeRO's gathers.

    layerwise: of a micro-batch on all stages together.
    once: of a step.
    """

    layerwise: float = 0.0
    once: float = 0.0


def sent_by(zero: int, cost: UnitCost, axes: Axes, cluster: Cluster) -> Sent:
    """What a ZeRO stage sends at least."""
    layout = axes.unit.layout
    group = Group(axes.dp * layout.cp, layout.tp * layout.row * layout.col)
    if group.members == 1:
        return Sent()

    def seconds(kind: str, size: float) -> float:
        return links.collective(cluster, kind, group, size).seconds

    whole = cost.gradients / axes.pp
    if zero == 0:
        return Sent(once=seconds(ALL_REDUCE, whole))
    if zero == 1:
        return Sent(once=seconds(REDUCE_SCATTER, whole) + seconds(ALL_GATHER, whole / 2))
    reduced = seconds(REDUCE_SCATTER, cost.matrices)
    if zero == 2:
        return Sent(reduced, seconds(ALL_GATHER, whole / 2))
    return Sent(reduced + 2 * seconds(ALL_GATHER, cost.matrices / 2))
