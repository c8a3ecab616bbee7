"""Plans a step of another framework: its fastest layouts, and their config in its words."""

import dataclasses
import itertools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxptd.config import Config
from jaxptd.display import Table, gib_text, html_of
from jaxptd.errors import UserError, did_you_mean, quoted
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.models.families import require_times, with_vocabulary
from jaxptd.planner.frameworks.deepspeed import DeepSpeed
from jaxptd.planner.frameworks.framework import PINS, Framework, Workload, Written
from jaxptd.planner.frameworks.maxtext import MaxText
from jaxptd.planner.frameworks.megatron import Megatron
from jaxptd.planner.frameworks.search import Found, FrameworkSearch
from jaxptd.planner.frameworks.torchtitan import Torchtitan
from jaxptd.planner.planning import MAX_MEMORY, MFU, UNSURE, expected_error
from jaxptd.planner.search.space import Pins, checked_pins

FRAMEWORKS: Mapping[str, Framework] = types.MappingProxyType(
    {each.name: each for each in (Megatron(), Torchtitan(), MaxText(), DeepSpeed())}
)
COLUMNS = ("layout", "micro-batch", "recompute", "s/step", "tokens/s/GPU", MFU, "GiB")
MORE = ("bubble", "exposed", "bound by", "slower")


@dataclasses.dataclass(frozen=True, repr=False)
class FrameworkPlan:
    """The best layouts of a framework on a number of GPUs.

    Args:
        framework: that trains.
        workload: model, batch and devices.
        limit: bytes of a device that a step may use.
        best: layouts, fastest first, each with different axis sizes.
        counted: number of layouts whose time was predicted; bounds show that all others are slower.
        error: error of predictions on these devices, as a share.
    """

    framework: Framework
    workload: Workload
    limit: float
    best: tuple[Found, ...]
    counted: int
    error: float

    @property
    def gpus(self) -> int:
        return self.workload.gpus

    def tokens_per_second(self, found: Found) -> float:
        """Tokens that a GPU trains per second."""
        return self.workload.tokens / found.seconds / self.gpus

    def mfu(self, found: Found) -> float:
        """Share of the peak FLOP/s of 16-bit matmuls; see `Architecture.flops`."""
        flops = self.workload.batch * self.workload.architecture.flops
        peak = self.gpus * self.workload.cluster.accelerator.bf16_flops
        return flops / found.seconds / peak

    def days_of_best(self, tokens: float) -> float:
        """Days for training on `tokens` tokens with the first layout."""
        return tokens / self.tokens_per_second(self.best[0]) / self.gpus / 86400

    def written(self, found: Found) -> Written:
        """A layout as the framework's config or flags, with a comment on top if it has comments."""
        framework = self.framework
        text, notes = framework.write(self.workload, found.setup)
        if framework.comment:
            lines = [f"{framework.title}; names are those of {framework.source}", *notes]
            text = "".join(f"{framework.comment} {line}\n" for line in lines) + text
        return Written(text, notes)

    def table(self) -> Table:
        """A row for each layout."""
        return Table(self.title, (*COLUMNS, *MORE), [self._row(each) for each in self.best])

    @property
    def title(self) -> str:
        """The framework, the devices and the global batch, in one line."""
        cluster, workload = self.workload.cluster, self.workload
        tokens = workload.architecture.stacks[-1].tokens
        return (
            f"{self.framework.title} on {self.gpus:,} x {cluster.accelerator.name}, "
            f"{cluster.node_size} a node, {gib_text(self.limit)} per device; global batch "
            f"{workload.batch:,} x {tokens:,} tokens"
        )

    @property
    def note(self) -> str:
        """Lines that explain the table's ±."""
        return (
            f"± is {self.error:.0%} of the prediction, the cost model's error where least is "
            "known, not a confidence interval for GPUs that nobody has measured\n"
            f"{self.framework.title.partition(' (')[0]}: {self.framework.evidence}"
        )

    def _row(self, each: Found) -> tuple[str, ...]:
        step, mfu = each.step, self.mfu(each)
        return (
            self.framework.layout_words(each.setup),
            str(each.setup.parallelism.micro_batch),
            each.setup.recompute,
            f"{step.seconds:.3f}",
            f"{self.tokens_per_second(each):,.0f}",
            f"{mfu:.1%} ± {self.error * mfu:.1%}",
            f"{each.bytes / 2**30:.1f}",
            f"{step.bubble:.1%}",
            f"{step.exposed:.1%}",
            step.bound,
            f"{each.seconds / self.best[0].seconds - 1:.1%}",
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as in JSON."""
        return {
            "framework": self.framework.name,
            "source": self.framework.source,
            "evidence": self.framework.evidence,
            "gpu": self.workload.cluster.accelerator.name,
            "gpus": self.gpus,
            "limit_bytes": self.limit,
            "error": self.error,
            "best": [self._as_dict(each) for each in self.best],
        }

    def _as_dict(self, each: Found) -> dict[str, Any]:
        parallelism, (text, notes) = each.setup.parallelism, self.written(each)
        names = ("tp", "pp", "cp", "ep", "dp", "virtual_stages", "zero", "zero_group")
        return {
            "layout": {name: getattr(parallelism, name) for name in names},
            "micro_batch": parallelism.micro_batch,
            "micro_batches": parallelism.micro_batches,
            "recompute": each.setup.recompute,
            "config": text,
            "notes": list(notes),
            "seconds": each.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second(each),
            "mfu": self.mfu(each),
            "bytes": each.bytes,
            "memory": dict(each.memory),
            "bubble": each.step.bubble,
            "exposed": each.step.exposed,
            "bound_by": each.step.bound,
            "terms": [term._asdict() for term in each.step.terms],
        }

    def __repr__(self) -> str:
        return f"{self.table()}\n{self.note}"

    def _repr_html_(self) -> str:
        return html_of(self.table())


def plan_for(
    name: str,
    config: Config,
    *,
    gpus: int,
    gpu: str,
    node: int = 0,
    hardware: str | Path | None = None,
    pins: Pins | None = None,
    max_memory: float = MAX_MEMORY,
    top: int = 5,
) -> FrameworkPlan:
    """Finds the fastest layouts of another framework, by prediction. Runs nothing.

    Args:
        name: one of `FRAMEWORKS`.
        config: model, batch and optimizer; its own layout, remat and micro-batches are not used.
        gpus: devices.
        gpu: name of an accelerator, such as `h200`.
        node: devices of a node; 0: as many as NVLink joins.
        hardware: YAML file of accelerators beside the packaged ones; None: none.
        pins: fields with the only value that is tried, some of `framework.PINS`.
        max_memory: share of a device's memory that a step may use, 0 to 1.
        top: layouts to return, each with other sizes of the axes.

    Raises:
        UserError: the framework has no such model, field or layout, or none fits.
    """
    if name not in FRAMEWORKS:
        remedy = did_you_mean(name, FRAMEWORKS, otherwise=f"use {', '.join(FRAMEWORKS)}")
        raise UserError(f"--print {quoted(name)}: this framework is not known; {remedy}")
    framework = FRAMEWORKS[name]
    for pin in pins or {}:
        if pin not in PINS:
            raise UserError(
                f"--print {name}: {quoted(pin)} has no counterpart there; pin one of "
                f"{', '.join(PINS)}"
            )
    cluster = Cluster(find_accelerator(gpu, hardware), node)
    if gpus > cluster.node_size and gpus % cluster.node_size:
        raise UserError(
            f"--print {name}: {gpus} GPUs are not whole nodes of {cluster.node_size}; use a "
            "multiple, or --node"
        )
    require_times(config.model)
    values = checked_pins(pins or {}, config)
    remat = values.get("model.remat")
    if remat is not None and remat not in framework.remats:
        known = ", ".join(f"{each} ({word})" for each, word in framework.remats.items())
        raise UserError(f"model.remat={remat}: {name} has no such policy here; pin one of {known}")
    workload = Workload(with_vocabulary(config), cluster, gpus, values)
    framework.check(workload)
    limit = max_memory * cluster.accelerator.hbm_bytes
    search = FrameworkSearch(framework, workload, limit)
    best = tuple(itertools.islice(search, top))
    if not best:
        raise _nothing(search)
    error = max(UNSURE, expected_error(gpu, hardware))
    return FrameworkPlan(framework, workload, limit, best, search.counted, error)


def _nothing(search: FrameworkSearch) -> UserError:
    """The error if there is no layout, or none fits."""
    workload, name = search.workload, search.framework.name
    if search.has_layouts:
        words = f"no layout of {name} on {workload.gpus} GPU{'s' * (workload.gpus > 1)} fits"
        remedy = "use more GPUs or ones with more memory"
    else:
        words = f"{name} has no layout of {workload.gpus} GPU{'s' * (workload.gpus > 1)}"
        remedy = "use a number of GPUs that divides train.global_batch_size"
    if workload.pins:
        remedy = "leave out a pin: " + ", ".join(f"--{pin}" for pin in workload.pins)
    return UserError(f"{words}; {remedy}")
