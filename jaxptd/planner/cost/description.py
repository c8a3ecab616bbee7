"""A model's parts, a layout, a program and a cluster: one step to predict.

Letters: T tokens of a micro-batch on a device of the sequence's axes, D hidden size, F hidden units
of the MLP, N heads, H head size, V vocabulary.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property

from jaxptd.costs.program import Implementation, Parallelism, Remat, Work
from jaxptd.hardware import Cluster
from jaxptd.parts.architecture import Architecture, Stack
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.statistics import Durations, simulate_stages
from jaxptd.pipeline.table import Schedule

# ---- the time of a pipelined step, from the seconds of its stages --------------------------------


def scheduled(
    name: str, stages: Sequence[Durations], micro_batches: int, *, chunks: int | None = None
) -> float:
    """Seconds of a named schedule, or of a table in a `.csv` file.

    If the last stage is the slowest, as the loss makes it, `1f1b` uses its formula, and so does
    `interleaved` if the stages divide the micro-batches. Others simulate their tables.

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

    The slowest stage works all the time; before and after it, one chunk of every other stage. This
    is exact for `1f1b` if the last stage is the slowest. An earlier one would do part of its work
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
    """Seconds of a schedule with many micro-batches, fast enough for a search.

    `1f1b` and `interleaved` use `pipelined`. Others simulate twice as many micro-batches as stages;
    each further one adds the slowest stage's time.

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
    return simulate_stages(_schedule(name, len(stages), micro_batches), stages).makespan


@functools.lru_cache(256)
def _schedule(name: str, stages: int, micro_batches: int) -> Schedule:
    return make_schedule(name, stages=stages, micro_batches=micro_batches)


def stage_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage; if they do not divide, the stages at the ends get one fewer.

    The ends also run the embedding and the loss, so programs remove layers there first: from the
    last stage, the first, the last but one, and so on.

    >>> stage_layers(126, 8)
    [15, 16, 16, 16, 16, 16, 16, 15]
    """
    counts = [-(-layers // stages)] * stages
    for i in range(sum(counts) - layers):
        counts[i // 2 if i % 2 else -1 - i // 2] -= 1
    return counts


# ---- a step: model, layout, program, devices -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepDescription:
    """One step to predict.

    Args:
        model: its parts.
        parallelism: its layout.
        implementation: its kernels, and what they overlap.
        cluster: the devices.
        placed: for each stage, the layers of each stack in each of its parts of the model; None:
            one part each, by `stage_layers`.
        updated: elements of the state on a device; None: those of the first stage's matrices.
    """

    model: Architecture
    parallelism: Parallelism
    implementation: Implementation
    cluster: Cluster
    placed: Sequence[Mapping[str, Sequence[int]]] | None = None
    updated: float | None = None

    def work(self, stack: Stack) -> Work:
        """The work of a micro-batch in one layer of a stack."""
        accelerator = self.cluster.accelerator
        return Work(self.implementation, self.parallelism, accelerator, self.tokens(stack))

    def tokens(self, stack: Stack) -> int:
        """T, tokens of a micro-batch on one device."""
        return self.parallelism.tokens(stack.tokens)

    def stream(self, stack: Stack) -> float:
        """Elements of the residual stream of a micro-batch on one device."""
        return self.parallelism.stream(stack.tokens, self.model.hidden)

    def layer_parameters(self, stack: Stack) -> float:
        """Elements of one layer's matrices on a device, whole over dp."""
        return stack.held(self.parallelism.matrix_shards, self.parallelism.expert_shards)

    @property
    def embedding(self) -> int:
        """Elements of the table of tokens."""
        return sum(end.weights for end in self.model.before)

    @property
    def stage_parameters(self) -> float:
        """Elements on a device of the first stage, whole over dp."""
        layers = sum(s.layers * self.layer_parameters(s) for s in self.model.stacks)
        return layers / self.parallelism.pp + self.embedding / self.parallelism.matrix_shards

    @property
    def stage_experts(self) -> float:
        """The part of these that belongs to experts, of which fewer devices hold copies."""
        elements = sum(stack.layers * stack.expert_weights for stack in self.model.stacks)
        return elements / self.parallelism.expert_shards / self.parallelism.pp

    @property
    def own_parameters(self) -> float:
        """Elements on a device of the first stage, as ZeRO shards them."""
        experts, parallelism = self.stage_experts, self.parallelism
        copies = min(parallelism.shards, parallelism.expert_copies // parallelism.replicas)
        return (self.stage_parameters - experts) / parallelism.shards + experts / copies

    @cached_property
    def stages(self) -> Sequence[Mapping[tuple[str, Remat], int]]:
        """Layers of each stage, by stack and remat policy."""
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
        names = [stack.name for stack in self.model.stacks for _ in range(stack.layers)]
        ends = itertools.accumulate(stage_layers(len(names), self.parallelism.pp), initial=0)
        of_stages = [collections.Counter(names[a:b]) for a, b in itertools.pairwise(ends)]
        return [{name: (layers,) for name, layers in each.items()} for each in of_stages]
