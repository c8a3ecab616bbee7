"""Plans a training step: which layout of so many GPUs is fastest, and what it needs."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxptd.config import Config
from jaxptd.config.xla import GPU_MEMORY
from jaxptd.display import Table, gib_text, html_of
from jaxptd.errors import UserError
from jaxptd.fields import check_range, checked
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.hardware.table import figures_of
from jaxptd.models.families import inventory_of, with_vocabulary
from jaxptd.planner.changes import changed_fields
from jaxptd.planner.compiled import MOST, Compiling, compiler
from jaxptd.planner.search.best import Candidate, Search
from jaxptd.planner.search.pins import checked_pins
from jaxptd.planner.search.space import Space

MAX_MEMORY = GPU_MEMORY  # of a device's
MOST_GPUS = 2**17
RANGES = {"gpus": (1, MOST_GPUS), "top": (1, 1000), "compile": (0, MOST), "node": (0, MOST_GPUS)}
SURE, UNSURE = 0.06, 0.12  # errors of predictions with shares that were fitted, and without
MFU = "MFU ± model error"
COMPILED = ("s/step compiled", "GiB compiled", "GB moved", "hidden")
HALVINGS = 6  # times that the devices are doubled where nothing fits


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The best layouts of so many GPUs.

    Args:
        config: that was planned, with its own layout.
        cluster: the devices.
        gpus: their number.
        limit: bytes of a device that a step may use.
        best: the fastest layout first, each with other sizes of the axes.
        counted: layouts whose time was predicted; of the others bounds show that they are slower.
        error: of predictions on these devices, as a share.
    """

    config: Config
    cluster: Cluster
    gpus: int
    limit: float
    best: tuple[Candidate, ...]
    counted: int
    error: float

    def tokens_per_second(self, candidate: Candidate) -> float:
        """Tokens of the last stack that a GPU trains in a second."""
        model = inventory_of(self.config.model)
        tokens = self.config.train.global_batch_size * model.stacks[-1].tokens
        return tokens / candidate.seconds / self.gpus

    def mfu(self, candidate: Candidate) -> float:
        """Share of the peak FLOP/s of 16-bit products; see `Inventory.flops`."""
        model = inventory_of(self.config.model)
        flops = self.config.train.global_batch_size * model.flops
        peak = self.gpus * self.cluster.accelerator.bf16_flops
        return flops / candidate.seconds / peak

    def options(self, candidate: Candidate) -> list[str]:
        """The candidate's layout as options of `jaxptd train`, beside the config's own fields."""
        return [f"--{name} {text}" for name, text in changed_fields(self.config, candidate.config)]

    def days(self, candidate: Candidate, tokens: float) -> float:
        """Days that a number of tokens takes."""
        return tokens / self.tokens_per_second(candidate) / self.gpus / 86400

    def table(self) -> Table:
        """A row for each layout."""
        columns = (
            *("layout", "micro-batch", "remat", "s/step", "tokens/s/GPU", MFU, "GiB"),
            *("bubble", "exposed", "bound by", "slower"),
            *(COMPILED if self.best[0].compiled else ()),
        )
        return Table(self.title, columns, [self._row(each) for each in self.best])

    @property
    def title(self) -> str:
        """The devices of the plan and its global batch, in a line."""
        name = self.cluster.accelerator.name
        memory = gib_text(self.cluster.accelerator.hbm_bytes)
        compiled = f"; compiled for H200s with {memory}" if self.best[0].compiled else ""
        tokens = inventory_of(self.config.model).stacks[-1].tokens
        return (
            f"{self.gpus:,} x {name}, {self.cluster.node_size} a node, "
            f"{gib_text(self.limit)} a device; global batch "
            f"{self.config.train.global_batch_size:,} x {tokens:,} tokens{compiled}"
        )

    @property
    def note(self) -> str:
        """A line that says what the ± of the table is of."""
        return (
            f"± is {self.error:.0%} of the prediction, the model's error on published runs; it is "
            "no interval for GPUs that nobody ran"
        )

    def _row(self, each: Candidate) -> tuple[str, ...]:
        config, step = each.config, each.step
        layers = config.model.remat_layers
        remat = config.model.remat + ("" if layers is None else f" ({layers} layers)")
        mfu, first = self.mfu(each), self.best[0].seconds
        return (
            layout_text(config),
            str(config.train.global_batch_size // config.layout.dp // config.train.micro_batches),
            remat,
            f"{step.seconds:.3f}",
            f"{self.tokens_per_second(each):,.0f}",
            f"{mfu:.1%} ± {self.error * mfu:.1%}",
            f"{each.memory.total / 2**30:.1f}",
            f"{step.bubble:.1%}",
            f"{step.exposed:.1%}",
            step.bound,
            f"{each.seconds / first - 1:.1%}",
            *_compiled_cells(each),
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        return {
            "gpu": self.cluster.accelerator.name,
            "gpus": self.gpus,
            "limit_bytes": self.limit,
            "error": self.error,
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
            "terms": [term._asdict() for term in each.step.terms],
            **_compiled_dict(each),
        }

    def __repr__(self) -> str:
        return f"{self.table()}\n{self.note}"

    def _repr_html_(self) -> str:
        return html_of(self.table())


def _compiled_cells(each: Candidate) -> tuple[str, ...]:
    """The cells of `COMPILED`; none for a candidate that was not compiled."""
    made = each.compiled
    if made is None:
        return ()
    moved = f"{made.figures.moved / 1e9:,.0f}"
    hidden = "" if made.hidden is None else f"{made.hidden:.0%}"
    return f"{made.step.seconds:.3f}", f"{made.bytes / 2**30:.1f}", moved, hidden


def _compiled_dict(each: Candidate) -> dict[str, Any]:
    made = each.compiled
    if made is None:
        return {}
    return {
        "compiled": {
            "seconds": made.step.seconds,
            "bytes": made.bytes,
            "moved": made.figures.moved,
            "hidden": dict(made.figures.hidden),
            "terms": [term._asdict() for term in made.step.terms],
        }
    }


def layout_text(config: Config) -> str:
    """The layout of a config, with the number of its chunks and the layers of its parts."""
    layout = config.layout
    chunks = f" x{layout.virtual_stages}" if layout.virtual_stages else ""
    layers = f" {'+'.join(map(str, layout.stage_layers))}" if layout.stage_layers else ""
    return str(layout).replace(layout.schedule, layout.schedule + chunks + layers)


@checked("jaxptd.plan")
def plan(
    config: Config,
    *,
    gpus: int,
    gpu: str,
    node: int = 0,
    hardware: str | Path | None = None,
    pins: Mapping[str, Any] | None = None,
    max_memory: float = MAX_MEMORY,
    top: int = 5,
    compile: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Finds the fastest layouts of a config on so many GPUs, by prediction. Runs nothing.

    Args:
        config: model, batch and optimizer; its own layout, remat and micro-batches are not used.
        gpus: devices.
        gpu: name of an accelerator, such as `h200`.
        node: devices of a node; 0: as many as NVLink joins.
        hardware: YAML file of accelerators beside the packaged ones; None: none.
        pins: fields with the only value that is tried, such as `{"layout.tp": 4}`.
        max_memory: share of a device's memory that a step may use, 0 to 1.
        top: layouts to return, each with other sizes of the axes.
        compile: layouts to compile and rank again, instead of `top`; see `Compiling`. 0: none.
        say: takes a line for each that was compiled.

    Raises:
        UserError: a value is impossible, or no layout fits; then the line says what would.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--model.dtype=bfloat16"])
    >>> made = jaxptd.plan(config, gpus=2, gpu="h200", top=1, pins={"layout.tp": 2})
    >>> made.best[0].config.layout
    Layout(tp=2)
    """
    _check({"gpus": gpus, "top": top, "compile": compile, "node": node}, max_memory)
    cluster = Cluster(find_accelerator(gpu, hardware), node)
    space = Space(with_vocabulary(config), gpus, checked_pins(pins or {}, config))
    limit = max_memory * cluster.accelerator.hbm_bytes
    search = Search(space, cluster, limit)
    if compile:
        best = Compiling(compiler(), cluster, limit, say).best(search, compile)
    else:
        best = tuple(itertools.islice(search, top))
    if not best:
        raise _nothing_fits(search, compiled=compile > 0)
    error = expected_error(gpu, hardware)
    return Plan(space.config, cluster, gpus, limit, best, search.counted, error)


def expected_error(gpu: str, hardware: str | Path | None) -> float:
    """The error of predictions to count on, as a share, on an accelerator.

    Args:
        gpu: its name.
        hardware: YAML file of accelerators beside the packaged ones; None: none.

    Raises:
        UserError: there is none of that name.
    """
    sure = figures_of(gpu, hardware)["products_share"].kind in ("fitted", "measured")
    return SURE if sure else UNSURE


def _check(numbers: Mapping[str, int], max_memory: float) -> None:
    """Raises UserError for a number that is out of its range."""
    for name, value in numbers.items():
        least, most = RANGES[name]
        check_range("jaxptd.plan", name, value, least=least, most=most)
    if not 0 < max_memory <= 1:
        raise UserError(f"max_memory={max_memory}: use a share of the memory, above 0 and up to 1")


def _nothing_fits(search: Search, *, compiled: bool) -> UserError:
    """The error for a search without a result."""
    space = search.space
    compiled = compiled and any(True for _ in search)
    remedy = _remedy(space, search.cluster, search.limit, compiled=compiled)
    return UserError(f"no layout of {space.gpus} GPU{'s' * (space.gpus > 1)} fits{remedy}")


def _remedy(space: Space, cluster: Cluster, limit: float, *, compiled: bool) -> str:
    """A line's end: what to change so that a layout fits."""
    if compiled:
        return " once it is compiled; use more GPUs, or a larger share of their memory"
    return f"; {_change(space, cluster, limit)}"


def _change(space: Space, cluster: Cluster, limit: float) -> str:
    """The pin without which a layout fits, or the number of GPUs with which one does."""
    for name in space.pins:
        others = {pin: value for pin, value in space.pins.items() if pin != name}
        if any(True for _ in Search(Space(space.config, space.gpus, others), cluster, limit)):
            return f"without --{name} {space.pins[name]} one does"
    batch = space.config.train.global_batch_size
    for doubled in range(1, HALVINGS + 1):
        gpus = space.gpus * 2**doubled
        if any(True for _ in Search(Space(space.config, gpus, space.pins), cluster, limit)):
            return f"{gpus} do"
    if math.gcd(batch, space.gpus) == 1:
        return f"train.global_batch_size={batch} splits over few devices; use a larger one"
    return "use a smaller model or batch, or GPUs with more memory"
