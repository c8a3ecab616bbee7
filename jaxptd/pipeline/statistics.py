"""A schedule's costs: bubble, memory and messages, counted in its table and by formula.

Letters: m micro-batches, p stages, V chunks. F, B and W are the times of forward, of the input's
gradient and of the weights' gradients, for one micro-batch and all layers of a stage. An operation
on one chunk takes 1/V of that, and an unsplit backward takes B + W.

The *bubble* is a stage's idle time between its first and its last operation, divided by the time it
works; the largest of all stages counts. If the first stage works at the beginning and at the end of
a step, the bubble is all idle time of the step. For zb schedules it is what Qi et al. count: their
next step may begin on one stage while another still finishes the last.

Source: Narayanan et al., arXiv 2104.04473, section 2.2; Qi et al., arXiv 2401.10241, section 2, and
arXiv 2405.15362.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxptd.errors import UserError
from jaxptd.pipeline.placement import of_stack
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.table import B, F, Operation, Schedule, W


class Durations(NamedTuple):
    """Times of F, B and W for one micro-batch and all layers of a stage, in any unit."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0


EQUAL = Durations()


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """Times of a schedule's operations, if each starts as early as possible.

    Args:
        start, end: `[ticks, stages]`, times of the operation in that cell of the table; 0 if idle.
    """

    start: np.ndarray
    end: np.ndarray

    @property
    def makespan(self) -> float:
        """The time from the first operation's start to the last one's end."""
        return float(self.end.max())

    @property
    def busy(self) -> np.ndarray:
        """The time that each stage works, `[stages]`."""
        return (self.end - self.start).sum(0)

    @property
    def bubble(self) -> float:
        """The largest of all stages' idle times between operations, relative to work."""
        first = np.where(self.end > 0, self.start, np.inf).min(0)
        return float(((self.end.max(0) - first - self.busy) / self.busy).max())

    @property
    def idle(self) -> float:
        """The idle share of all stages' time, including before and after their operations."""
        return float(1 - self.busy.mean() / self.makespan)


def simulate(schedule: Schedule, durations: Durations = EQUAL) -> Timing:
    """Simulates each stage's operations in the table's order, each as soon as its inputs exist.

    Sending takes no time; `makespan` also accounts for hops, which make stages wait for each other.

    Raises:
        UserError: a duration is not a number from 1e-9 to 1e9.
    """
    return simulate_stages(schedule, [durations] * schedule.stages)


def simulate_stages(schedule: Schedule, durations: Sequence[Durations]) -> Timing:
    """Simulates stages with individual durations, in the order of the stages.

    Raises:
        UserError: a duration is not a number from 1e-9 to 1e9.
    """
    length = [_lengths(schedule, each) for each in durations]
    start, end = np.zeros((2, schedule.ticks, schedule.stages))
    free = [0.0] * schedule.stages
    done: dict[tuple[Operation, int, int], float] = {}
    for tick, stage, operation, i, chunk in schedule.operations():
        part = schedule.part(stage, chunk)
        inputs = (done[need, before, i] for need, before in schedule.needs(operation, part))
        begin = max(free[stage], *inputs, 0.0)
        free[stage] = done[operation, part, i] = begin + length[stage][operation]
        start[tick, stage], end[tick, stage] = begin, free[stage]
    return Timing(start / schedule.chunks, end / schedule.chunks)


def _lengths(schedule: Schedule, durations: Durations) -> dict[Operation, float]:
    """The time of each operation; backward includes W unless the schedule splits it."""
    if not all(1e-9 <= length <= 1e9 for length in durations):
        raise UserError(f"durations F, B, W = {tuple(durations)}: use numbers from 1e-9 to 1e9")
    backward = durations.B if schedule.splits else durations.B + durations.W
    return {F: durations.F, B: backward, W: durations.W}


def bubble(schedule: Schedule, durations: Durations = EQUAL) -> float:
    """The bubble of a simulated step."""
    return simulate(schedule, durations).bubble


def expected_bubble(schedule: Schedule, durations: Durations = EQUAL) -> float | None:
    """The bubble by formula; None if these sizes and durations have no formula."""
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    f, b, w = durations
    work = m * (f + b + w)
    if schedule.name in ("gpipe", "1f1b"):
        return (p - 1) / m
    if schedule.name == "interleaved" and m % p == 0:
        return (p - 1) / (m * V)
    if schedule.name == "zb-h1" and m >= p and w <= min(f, b):
        return (p - 1) * (f + b - w) / work
    if schedule.name == "zb-h2" and m >= 2 * p - 1 and w <= min(f, b):
        return (p - 1) * (f + b - 2 * w) / work
    if schedule.name == "zb-v" and m >= 2 * p - 1 and f == b == w:
        return 0.0
    return None


def longer_than_needed(schedule: Schedule) -> str | None:
    """A sentence if an interleaved schedule is longer because p does not divide m, or None."""
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    ticks = 2 * (m * V + p - 1)  # the formula of schedules.py
    if schedule.name != "interleaved" or m % p == 0 or schedule.ticks <= ticks:
        return None
    better = " or ".join(str(size) for size in (m - m % p, m - m % p + p) if size)
    return (
        f"schedule=interleaved takes {schedule.ticks} ticks where {ticks} would do, since "
        f"micro_batches={m} is not a multiple of stages={p}; use {better} micro-batches"
    )


def held(schedule: Schedule) -> np.ndarray:
    """Number of (micro-batch, chunk) pairs whose activations a stage holds, `[ticks, stages]`.

    It holds them from the tick of F to that of B, or of W if backward is split.
    """
    operation = schedule.table[..., 0]
    ends = operation == (W if schedule.splits else B)
    released = ends.cumsum(0) - ends  # at earlier ticks
    return (operation == F).cumsum(0) - released


def peak(schedule: Schedule) -> np.ndarray:
    """The most that each stage ever holds, in micro-batches of all its layers, `[stages]`."""
    return held(schedule).max(0) / schedule.chunks


def expected_peak(schedule: Schedule) -> np.ndarray | None:
    """`peak` by formula; None if these sizes have no formula."""
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    s = np.arange(p)
    formula = {
        "gpipe": 0 * s + m,
        "1f1b": p - s,
        "interleaved": p + (p - 2 * s - 1) / V,
        "zb-h1": 0 * s + p,
        "zb-h2": 0 * s + 2 * p - 1,
        "zb-v": 0 * s + p,
    }.get(schedule.name)
    if formula is None or (schedule.name == "interleaved" and m % p):
        return None
    return np.minimum(m, formula).astype(float)


def messages(schedule: Schedule) -> int:
    """Number of values sent between stages in a step: 2m(pV-1) in a loop with p > 1."""
    count = 0
    for _, stage, operation, _, chunk in schedule.operations():
        to = schedule.part(stage, chunk) + {F: 1, B: -1, W: 0}[operation]
        count += 0 <= to < schedule.parts and schedule.where(to)[0] != stage
    return count


def host_waits(plan: Plan) -> np.ndarray:
    """Number of waits of each stage's host for its GPU in a step's ticks, `[stages]`.

    It waits once per conditional: at a tick for the operation, again for B if backward is split,
    and for the hops; in F for the embedding, in B for the head and for the embedding's gradient.
    Where parts differ in their number of layers, a loop over layers makes it wait for each layer
    and once more.
    """
    columns, splits = plan.columns, plan.schedule.splits
    switch = len(plan.hops.together) > 1
    waits = np.full(plan.schedule.stages, plan.schedule.ticks * (1 + splits + switch))
    waits += (columns["forward"] + 2 * columns["backward"]).sum(0)
    loops = [columns[name] for name in ("forward", "backward", "weight")]
    loops += [columns["backward"]] * plan.recompute
    for stack, begin, end in plan.kinds:
        layers = np.clip(columns[of_stack("layers", stack)], begin, end) - begin
        if not plan.even(stack):
            waits += sum((runs * (1 + layers)).sum(0) for runs in loops)
    return waits


def makespan(plan: Plan, durations: Durations = EQUAL) -> float:
    """The simulated time of a step, with the stages of each hop waiting for each other."""
    schedule, hops = plan.schedule, plan.hops
    backward = durations.B + (0 if schedule.splits else durations.W)
    each = {Operation.F: durations.F, Operation.B: backward, Operation.W: durations.W}
    cost = np.array([each.get(Operation(o), 0.0) for o in range(len(Operation))]) / schedule.chunks
    done = np.zeros(schedule.stages)
    for tick, cells in enumerate(schedule.table):
        done = done + cost[cells[:, 0]]
        for hop in hops.at(tick):
            before = done.copy()
            for source, target in hops.pairs[hop]:
                latest = max(before[source], before[target])
                done[[source, target]] = np.maximum(done[[source, target]], latest)
    return float(np.max(done))
