"""Plans a training step: finds the fastest layout on a number of GPUs, and its memory."""

import collections
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxptd.analysis.peak import outside
from jaxptd.config import Config, flat
from jaxptd.config.xla import GPU_MEMORY
from jaxptd.display import Table, gib_text, html_of
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster
from jaxptd.hardware.table import figures_of
from jaxptd.models.families import architecture_of
from jaxptd.planner.search.best import Candidate
from jaxptd.planner.steps.step import ConfigStep, Predictor
from jaxptd.planner.steps.traffic import Compiled, Figures, remade

# ---- compiles the best layouts of a ranking, and ranks them again --------------------------------

MOST = 100  # most layouts that are compiled
Measure = Callable[[Config, int], Figures]  # config, bytes of each GPU -> figures


@dataclasses.dataclass(frozen=True)
class Compiling:
    """Compiles candidates until enough of them fit.

    Args:
        measure: compiles one.
        cluster: the devices.
        limit: bytes of a device that a step may use.
        say: takes a line for each compiled candidate.
    """

    measure: Measure
    cluster: Cluster
    limit: float
    say: Callable[[str], None]

    def best(self, ranking: Iterable[Candidate], wanted: int) -> tuple[Candidate, ...]:
        """Compiles a ranking until enough fit by the compiler's figures; returns the fastest first.

        Compiles as many at a time as there are cores.

        Args:
            ranking: best prediction first.
            wanted: how many must fit.
        """
        fitting: list[Candidate] = []
        for number, (each, figures) in enumerate(self._compiled(iter(ranking), wanted, fitting), 1):
            words = f"compiled {number}: {each.config.layout}: "
            try:
                compiled = self._made(each, figures.result())
            except UserError as error:
                self.say(f"{words}dropped, {error}")
                continue
            known = f"{gib_text(compiled.bytes)} per device, {compiled.step.seconds:.3f} s per step"
            if compiled.bytes > self.limit:
                self.say(f"{words}dropped, {known}: the limit is {gib_text(self.limit)}")
                continue
            self.say(f"{words}{known}")
            fitting.append(dataclasses.replace(each, compiled=compiled))
        return tuple(sorted(fitting, key=lambda each: each.seconds))

    def _compiled(
        self, ranking: Iterator[Candidate], wanted: int, fitting: list[Candidate]
    ) -> Iterator[tuple[Candidate, "Future[Figures]"]]:
        """Compiles candidates in order of rank until `wanted` fit, and starts none it can skip."""
        waiting: collections.deque[tuple[Candidate, Future[Figures]]] = collections.deque()
        pool = ThreadPoolExecutor(min(wanted, os.cpu_count() or 1))
        memory = int(self.cluster.accelerator.hbm_bytes)
        try:
            while len(fitting) < wanted:
                while len(fitting) + len(waiting) < wanted and (each := next(ranking, None)):
                    waiting.append((each, pool.submit(self.measure, each.config, memory)))
                if not waiting:
                    return
                yield waiting.popleft()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _made(self, candidate: Candidate, figures: Figures) -> Compiled:
        alone = Predictor(self.cluster, hiding=False)(ConfigStep(candidate.config))
        others = sum(each.bytes for each in outside(candidate.config.layout))
        step = remade(candidate.step, alone, figures)
        return Compiled(figures, figures.bytes + others, step)


# ---- fields in which two configs differ, as options ----------------------------------------------


def changed_fields(before: Config, after: Config) -> Iterator[tuple[str, str]]:
    """Yields `section.field` and its new value as text, for each field that differs."""
    old = flat(before)
    for name, value in flat(after).items():
        if value != old.get(name):
            yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value).replace(" ", "")


MAX_MEMORY = GPU_MEMORY  # share of a device's memory
MOST_GPUS = 2**17
RANGES = {"gpus": (1, MOST_GPUS), "top": (1, 1000), "compile": (0, MOST), "node": (0, MOST_GPUS)}
SURE, UNSURE = 0.06, 0.12  # errors of predictions with fitted shares, and without
MFU = "MFU ± model error"
COMPILED = ("s/step compiled", "GiB compiled", "GB moved", "hidden")


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The best layouts on a number of GPUs.

    Args:
        config: the config to plan, with its own layout.
        cluster: the devices.
        gpus: their number.
        limit: bytes of a device that a step may use.
        best: layouts, fastest first, each with different axis sizes.
        counted: number of layouts whose time was predicted; bounds show that all others are slower.
        error: error of predictions on these devices, as a share.
        imbalance: pairs of a token and an expert on the busiest device over the mean. Layouts are
            ranked by the first; the table also has the seconds of the others.
    """

    config: Config
    cluster: Cluster
    gpus: int
    limit: float
    best: tuple[Candidate, ...]
    counted: int
    error: float
    imbalance: tuple[float, ...] = (1.0,)

    def tokens_per_second(self, candidate: Candidate) -> float:
        """Tokens of the last stack that a GPU trains per second."""
        model = architecture_of(self.config.model)
        tokens = self.config.train.global_batch_size * model.stacks[-1].tokens
        return tokens / candidate.seconds / self.gpus

    def mfu(self, candidate: Candidate) -> float:
        """Share of the peak FLOP/s of 16-bit matmuls; see `Architecture.flops`."""
        model = architecture_of(self.config.model)
        flops = self.config.train.global_batch_size * model.flops
        peak = self.gpus * self.cluster.accelerator.bf16_flops
        return flops / candidate.seconds / peak

    def unbalanced(self, candidate: Candidate) -> dict[float, float]:
        """Seconds of a step at the other imbalances of experts, by imbalance."""
        step = ConfigStep(candidate.config)
        return {
            each: Predictor(self.cluster, imbalance=each)(step).seconds
            for each in self.imbalance[1:]
        }

    def options(self, candidate: Candidate) -> list[str]:
        """The candidate's layout as options of `jaxptd train`, to add to the config's fields."""
        return [f"--{name} {text}" for name, text in changed_fields(self.config, candidate.config)]

    def days(self, candidate: Candidate, tokens: float) -> float:
        """Days for training on `tokens` tokens."""
        return tokens / self.tokens_per_second(candidate) / self.gpus / 86400

    def days_of_best(self, tokens: float) -> float:
        """Days for training on `tokens` tokens with the first layout."""
        return self.days(self.best[0], tokens)

    def table(self) -> Table:
        """A row for each layout."""
        columns = (
            *("layout", "micro-batch", "remat", "s/step", "tokens/s/GPU", MFU, "GiB"),
            *("bubble", "exposed", "bound by", "slower"),
            *(f"s/step at {each:g}" for each in self.imbalance[1:]),
            *(COMPILED if self.best[0].compiled else ()),
        )
        return Table(self.title, columns, [self._row(each) for each in self.best])

    @property
    def title(self) -> str:
        """The plan's devices and global batch, in one line."""
        name = self.cluster.accelerator.name
        memory = gib_text(self.cluster.accelerator.hbm_bytes)
        compiled = f"; compiled for H200s with {memory}" if self.best[0].compiled else ""
        tokens = architecture_of(self.config.model).stacks[-1].tokens
        return (
            f"{self.gpus:,} x {name}, {self.cluster.node_size} a node, "
            f"{gib_text(self.limit)} per device; global batch "
            f"{self.config.train.global_batch_size:,} x {tokens:,} tokens{compiled}"
        )

    @property
    def note(self) -> str:
        """Lines that explain the table's ±, and its columns of unbalanced experts."""
        line = (
            f"± is {self.error:.0%} of the prediction, the model's error on published runs, "
            "not a confidence interval for GPUs that nobody has measured"
        )
        if self.imbalance == (1.0,):
            return line
        moe = self.config.model.moe
        assert moe is not None
        return (
            f"{line}\nranked with {self.imbalance[0]:g} times the mean number of tokens on the "
            "busiest device's experts; memory is the same with any number, since experts work on "
            f"chunks of model.moe.chunk={moe.chunk:g} times the rows of balanced ones"
        )

    def _row(self, each: Candidate) -> tuple[str, ...]:
        config, step = each.config, each.step
        layers = config.model.remat_layers
        remat = config.model.remat + ("" if layers is None else f" ({layers} layers)")
        mfu, first = self.mfu(each), self.best[0].seconds
        return (
            layout_text(config),
            str(each.mesh_shape.layer_layout.micro_batch),
            remat,
            f"{step.seconds:.3f}",
            f"{self.tokens_per_second(each):,.0f}",
            f"{mfu:.1%} ± {self.error * mfu:.1%}",
            f"{each.memory.total / 2**30:.1f}",
            f"{step.bubble:.1%}",
            f"{step.exposed:.1%}",
            step.bound,
            f"{each.seconds / first - 1:.1%}",
            *(f"{seconds:.3f}" for seconds in self.unbalanced(each).values()),
            *_compiled_cells(each),
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as in JSON."""
        return {
            "gpu": self.cluster.accelerator.name,
            "gpus": self.gpus,
            "limit_bytes": self.limit,
            "error": self.error,
            "imbalance": list(self.imbalance),
            "best": [self._as_dict(each) for each in self.best],
        }

    def _as_dict(self, each: Candidate) -> dict[str, Any]:
        return {
            "options": self.options(each),
            "seconds": each.step.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second(each),
            "mfu": self.mfu(each),
            "bytes": each.memory.total,
            "memory": dict(each.memory.parts),
            "bubble": each.step.bubble,
            "exposed": each.step.exposed,
            "bound_by": each.step.bound,
            "unbalanced_seconds": {f"{x:g}": y for x, y in self.unbalanced(each).items()},
            "terms": [term._asdict() for term in each.step.terms],
            **_compiled_dict(each),
        }

    def __repr__(self) -> str:
        return f"{self.table()}\n{self.note}"

    def _repr_html_(self) -> str:
        return html_of(self.table())


def _compiled_cells(each: Candidate) -> tuple[str, ...]:
    """The cells of `COMPILED`; none for a candidate that was not compiled."""
    compiled = each.compiled
    if compiled is None:
        return ()
    moved = f"{compiled.figures.moved / 1e9:,.0f}"
    hidden = "" if compiled.hidden is None else f"{compiled.hidden:.0%}"
    return f"{compiled.step.seconds:.3f}", f"{compiled.bytes / 2**30:.1f}", moved, hidden


def _compiled_dict(each: Candidate) -> dict[str, Any]:
    compiled = each.compiled
    if compiled is None:
        return {}
    return {
        "compiled": {
            "seconds": compiled.step.seconds,
            "bytes": compiled.bytes,
            "moved": compiled.figures.moved,
            "hidden": dict(compiled.figures.hidden),
            "terms": [term._asdict() for term in compiled.step.terms],
        }
    }


def layout_text(config: Config) -> str:
    """The layout of a config, with its number of chunks and its parts' layers."""
    layout = config.layout
    chunks = f" x{layout.virtual_stages}" if layout.virtual_stages else ""
    layers = f" {'+'.join(map(str, layout.stage_layers))}" if layout.stage_layers else ""
    return str(layout).replace(layout.schedule, layout.schedule + chunks + layers)


def expected_error(gpu: str, hardware: str | Path | None) -> float:
    """The error to expect of predictions on an accelerator, as a share.

    Args:
        gpu: its name.
        hardware: YAML file of accelerators that adds to the packaged ones, or None.

    Raises:
        UserError: there is no accelerator of that name.
    """
    sure = figures_of(gpu, hardware)["products_share"].kind in ("fitted", "measured")
    return SURE if sure else UNSURE
