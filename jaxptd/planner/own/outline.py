"""A pipeline in outline: what the formulas ask of a plan, by closed forms and without a table.

A schedule's table has a row for each tick, and a plan assigns a slot to every value: seconds for a
thousand micro-batches. A test compares outlines with plans.
"""

import dataclasses
import functools
from collections.abc import Mapping

from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.pipeline.placement import Stacks, Stages, of_stack, stack_sizes
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.schedules import outline as parts_of
from jaxptd.pipeline.table import Schedule

SPLITS = ("zb-h1", "zb-h2", "zb-v")
MAIL_1F1B, MAIL = 2, 6  # slots of the mail beside inputs that wait: of 1f1b; of others, at most


@dataclasses.dataclass(frozen=True)
class Outline:
    """A pipeline without the tick of every operation.

    Args:
        schedule: its parts; without a table.
        stacks: of each stack of layers, the number of its layers in each part.
        recompute: backward runs a part of the model again, from its input.
    """

    schedule: Schedule
    stacks: Stacks
    recompute: bool

    def depth(self, stack: str) -> int:
        """The layers of the largest part."""
        return max(self.stacks[stack])

    @property
    def splits(self) -> bool:
        """True if backward is split into B and W."""
        return self.schedule.name in SPLITS

    @property
    def in_flight(self) -> int:
        """Parts of a stage and micro-batches whose activations it holds; see `schedules`."""
        s = self.schedule
        p, m, V = s.stages, s.micro_batches, s.chunks
        if s.name == "gpipe":
            return m
        if s.name == "interleaved":
            return min(m * V, (V + 1) * p - 1)
        return V * min(m, 2 * p - 1 if s.name == "zb-h2" else p)

    @property
    def slots(self) -> dict[str, int]:
        """The number of slots of each pool, as `Plan.slots`; of the mail at most."""
        (stack,), flying = self.stacks, self.in_flight
        mail = {"1f1b": MAIL_1F1B, "gpipe": MAIL_1F1B + flying}.get(self.schedule.name, MAIL)
        between = flying if self.splits else 0
        saved = flying
        if self.recompute:
            mail, saved = mail + flying, max(1, between)
        return {"mail": mail, of_stack("saved", stack): saved, of_stack("between", stack): between}


def outline(config: Config, layers: Mapping[str, int]) -> Stages | None:
    """The outline of a config's pipeline; None without one.

    A plan of few micro-batches for several stacks, or a table of one's own.

    Args:
        config: of the run.
        layers: of each stack.

    Raises:
        UserError: there is no such schedule, or the model's layers do not fill it.
    """
    layout, model = config.layout, config.model
    if layout.pp == 1:
        return None
    m, recompute = config.train.micro_batches, model.remat == "full" and model.remat_layers is None
    schedule = _parts(layout.schedule, layout.pp, m, layout.virtual_stages)
    if schedule.name == "interleaved" and m % layout.pp:
        raise UserError(
            f"layout.schedule=interleaved: train.micro_batches={m} is no multiple of "
            f"layout.pp={layout.pp}; use train.micro_batches={m - m % layout.pp + layout.pp}"
        )
    stacks = stack_sizes(layers, schedule, layout.stage_layers)
    if len(layers) == 1 and not layout.schedule.endswith(".csv"):
        return Outline(schedule, stacks, recompute)
    return _plan(schedule, tuple(stacks.items()), recompute, model.remat_layers)


@functools.lru_cache(4096)
def _parts(name: str, stages: int, micro_batches: int, chunks: int | None) -> Schedule:
    return parts_of(name, stages=stages, micro_batches=micro_batches, virtual_stages=chunks)


@functools.lru_cache(4096)
def _plan(
    schedule: Schedule,
    stacks: tuple[tuple[str, tuple[int, ...]], ...],
    recompute: bool,
    first: int | None,
) -> Plan:
    """A plan of as many micro-batches as fill the pipeline: more take no more slots."""
    name, p, m = schedule.name, schedule.stages, schedule.micro_batches
    whole = name == "gpipe" or name.endswith(".csv")
    few = make_schedule(
        name, stages=p, micro_batches=m if whole else min(m, 2 * p), virtual_stages=schedule.chunks
    )
    return Plan(few, dict(stacks), recompute=recompute, first=first)


def on_stages(plan: Stages) -> list[dict[str, tuple[int, ...]]]:
    """For each stage, the layers of each stack in each of its parts."""
    schedule = plan.schedule
    found = []
    for stage in range(schedule.stages):
        parts = [schedule.part(stage, chunk) for chunk in range(schedule.chunks)]
        found.append({name: tuple(sizes[p] for p in parts) for name, sizes in plan.stacks.items()})
    return found
