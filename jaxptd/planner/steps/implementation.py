"""This library's step as the cost model's record of a program."""

import dataclasses
import functools
from collections.abc import Mapping

from jaxptd.config import Config
from jaxptd.costs.program import Implementation
from jaxptd.errors import UserError
from jaxptd.hardware import Accelerator
from jaxptd.layout import Layout
from jaxptd.models.families import sizes_of
from jaxptd.pipeline.placement import Stacks, Stages, of_stack, stack_sizes
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.schedules import outline as parts_of
from jaxptd.pipeline.table import Schedule
from jaxptd.zero.plan import layers_plan

# Bytes that an optimizer moves per parameter: parameter and moments read and written, the gradient
# read, and read twice more for its norm and its factor.
UPDATE = {"adamw": 40, "lion": 32, "sgd": 32, "adafactor": 32}
AVERAGED = 8  # bytes more: a moving average read and written
NARROW = 6  # bytes fewer if that gradient has 16 bits
# Read off steps compiled for H200s, kernel by kernel (`python -m benchmarks.gpu.compiled`):
ADDED = 10  # bytes: a float32 sum and a 16-bit gradient read, the sum written
LOGIT = 6  # bytes of the loss per logit: read for maximum and sum, and again; gradient written
# Bytes of a norm per element. Forward: read for statistics, and again; the result written.
# Backward: read for the weights' gradients and for its own, twice each; the residual stream's
# gradient read, the sum written. A separate norm kernel reads once. ADD: two read, one written,
# where no matmul adds; that kernel also computes XLA's statistics.
STREAM_FORWARD, STREAM_BACKWARD, ADD = {"xla": 6, "triton": 4}, {"xla": 12, "triton": 8}, 6
CAST = 6  # bytes: a float32 parameter read, a 16-bit one written
STACKED = 2  # passes: what a layer saves is read, and written to the array of all layers
TAKEN = 1  # pass on average: half of it is copied out again, kernels read the rest in place


def implementation_of(config: Config, accelerator: Accelerator) -> Implementation:
    """The record of a config's step on GPUs.

    Raises:
        UserError: the cost model or the GPUs lack something that the config asks for.
    """
    model, layout, kernels = config.model, config.layout, config.kernels_on_gpus
    unsummed = config.train.micro_batches * layout.batch_shards == 1
    _check(config, accelerator)
    update = UPDATE[config.optimizer.name] + AVERAGED * (config.optimizer.ema_decay > 0)
    return Implementation(
        "jaxptd",
        attention="flash" if sizes_of(config).is_fused else "unfused",
        dropout=model.dropout > 0,
        bias=model.block.linear_bias == "all",
        rotary=model.block.positions == "rope",
        accumulate=ADDED if config.train.micro_batches > 1 else 0,
        gradient=4,
        update=update - NARROW * (layers_plan(config).narrows and unsummed),
        logit=LOGIT,
        tp_under="nothing",
        dp_under="nothing",
        sends_hidden=False,
        sends_sharded=False,
        cast=0 if layout.zero or layout.hosts_parameters else CAST,
        stacked=STACKED if model.scan_layers or layout.pp > 1 else 0,
        again_all=False,
        pieces=layout.tp if layout.collective_matmul else 1,
        fp8=model.products == "fp8",
        apart=_are_apart(config),
        sums_apart=False,
        stream_forward=STREAM_FORWARD[kernels] if _products_add(config) else 4 + ADD,
        stream_backward=STREAM_BACKWARD[kernels],
        balanced=layout.context_parallel.balanced,
        experts_again=True,
    )


def _are_apart(config: Config) -> bool:
    """True if queries, keys and values are separate matmuls; see `layers/megatron.py`."""
    layout, native = config.layout, config.model.products == "native"
    return native and not (layout.has_grid or layout.collective_matmul)


def _products_add(config: Config) -> bool:
    """True if a pair's last matmul adds the residual stream as it writes.

    That requires that nothing comes in between: no all-reduce, dropout or scale.
    """
    model, layout = config.model, config.layout
    alone = layout.tp * layout.row * layout.col == 1
    return alone and model.dropout == 0 and model.products == "native"


def copied(implementation: Implementation, layout: Layout, sequences: int) -> int:
    """Passes of copy kernels over what a layer's collectives move.

    On average half of it is copied out of the form in which it arrives; in ring steps all of it,
    between blocks and the whole. Gathered blocks of a single sequence arrive in order.
    """
    if implementation.pieces > 1:
        return 2
    return 0 if layout.sequence_parallel and sequences == 1 else 1


def _check(config: Config, accelerator: Accelerator) -> None:
    """Raises UserError for what the cost model or the GPUs lack."""
    model = config.model
    if model.products == "fp8" and not accelerator.fp8_flops:
        raise UserError(
            f"model.products=fp8: {accelerator.name} has no 8-bit matmuls; "
            "use model.products=native"
        )
    if model.dtype not in ("bfloat16", "float16"):
        raise UserError(
            f"model.dtype={model.dtype}: the hardware table lists rates of 16-bit matmuls only; "
            "use model.dtype=bfloat16"
        )
    if config.optimizer.name not in UPDATE:
        raise UserError(
            f"optimizer.name={config.optimizer.name}: the cost model lacks its update; plan "
            f"with one of {', '.join(UPDATE)}"
        )
    if config.layout.update_on == "host":
        raise UserError(
            "layout.update_on=host: the cost model lacks the host's CPUs; plan with device"
        )
    if "activations" in config.layout.offloaded and config.layout.pp > 1:
        raise UserError(
            f"layout.offload=activations with layout.pp={config.layout.pp}: the cost model lacks "
            "copies of a pipeline's pools; plan with pp=1, or offload none or optimizer"
        )
    if "parameters" in config.layout.offloaded:
        raise UserError(
            "layout.offload=parameters: the cost model lacks its copies; plan with none, "
            "optimizer or activations"
        )


# ---- the outline of a config's step --------------------------------------------------------------
# A pipeline's outline: what the formulas ask of a plan, in closed form and without a table.
#
# A schedule's table has a row for each tick, and a plan assigns a slot to every value, which takes
# seconds for a thousand micro-batches. A test compares outlines with plans.

SPLITS = ("zb-h1", "zb-h2", "zb-v")
MAIL_1F1B, MAIL = 2, 6  # mail slots besides waiting inputs: 1f1b's; others', at most


@dataclasses.dataclass(frozen=True)
class Outline:
    """A pipeline without the tick of every operation.

    Args:
        schedule: its parts, without a table.
        stacks: for each stack of layers, the number of its layers in each part.
        recompute: whether backward runs a part of the model again, from its input.
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
        """Pairs of part and micro-batch whose activations a stage holds; see `schedules`."""
        s = self.schedule
        p, m, V = s.stages, s.micro_batches, s.chunks
        if s.name == "gpipe":
            return m
        if s.name == "interleaved":
            return min(m * V, (V + 1) * p - 1)
        return V * min(m, 2 * p - 1 if s.name == "zb-h2" else p)

    @property
    def slots(self) -> dict[str, int]:
        """The number of slots of each pool, as `Plan.slots`; for the mail an upper bound."""
        (stack,), flying = self.stacks, self.in_flight
        mail = {"1f1b": MAIL_1F1B, "gpipe": MAIL_1F1B + flying}.get(self.schedule.name, MAIL)
        between = flying if self.splits else 0
        saved = flying
        if self.recompute:
            mail, saved = mail + flying, max(1, between)
        return {"mail": mail, of_stack("saved", stack): saved, of_stack("between", stack): between}


def outline(config: Config, layers: Mapping[str, int]) -> Stages | None:
    """The outline of a config's pipeline; None without one.

    For several stacks or a table from a file, it is a plan with few micro-batches.

    Args:
        config: of the run.
        layers: number of layers in each stack.

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
            f"layout.schedule=interleaved: train.micro_batches={m} is not a multiple of "
            f"layout.pp={layout.pp}; use train.micro_batches={m - m % layout.pp + layout.pp}"
        )
    given = layout.stage_layers and model.in_periods(layout.stage_layers)
    stacks = stack_sizes(layers, schedule, given, period=model.period)
    if len(layers) == 1 and not layout.schedule.endswith(".csv"):
        return Outline(schedule, stacks, recompute)
    return _plan(schedule, tuple(stacks.items()), recompute, model.recomputing)


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
    """A plan with just enough micro-batches to fill the pipeline; more would reuse its slots."""
    name, p, m = schedule.name, schedule.stages, schedule.micro_batches
    whole = name == "gpipe" or name.endswith(".csv")
    few = make_schedule(
        name, stages=p, micro_batches=m if whole else min(m, 2 * p), virtual_stages=schedule.chunks
    )
    return Plan(few, dict(stacks), recompute=recompute, first=first)


def layers_by_stage(plan: Stages) -> list[dict[str, tuple[int, ...]]]:
    """For each stage, the layers of each stack in each of its parts."""
    schedule = plan.schedule
    stages = []
    for stage in range(schedule.stages):
        parts = [schedule.part(stage, chunk) for chunk in range(schedule.chunks)]
        stages.append({name: tuple(sizes[p] for p in parts) for name, sizes in plan.stacks.items()})
    return stages
