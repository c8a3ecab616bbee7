"""Collects a device's memory in a step: published, by formula, in the jaxpr, compiled, on GPUs.

Compiled figures are those of this machine. On CPUs they are meaningful only in float32, because XLA
computes bfloat16 in float32 there. The model predicts what XLA compiles for GPUs.
Source of published figures: Korthikanti et al., arXiv 2205.05198, section 4 (activations); Zhu and
Dong, CAAI Trans. Intelligent Systems 20(5), 2025, table 1 (state; all is 1/N on a grid of N).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxptd.analysis import memory_model
from jaxptd.analysis.compiled_step import compile_to_read
from jaxptd.analysis.jaxprs import equations, inside, scans, traced
from jaxptd.analysis.memory_needs import out_of_memory_explained
from jaxptd.analysis.peak import Peak, outside, peak
from jaxptd.config import Config, Remat
from jaxptd.display import Table, bytes_text, html_of
from jaxptd.fields import checked
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.models.families import architecture_of, family_of, has_times, sizes_of
from jaxptd.parts.architecture import Stack
from jaxptd.pipeline.plan import Plan
from jaxptd.shapes import ParamShape
from jaxptd.step import Program
from jaxptd.step.state import HOST
from jaxptd.zero.loop import LAYERS

COLUMNS = ("published", "formula", "counted", "compiled", "model")
OUTSIDE = "  outside of the step on a GPU: CUDA and its libraries"
Row = dict[str, Any]  # "part": a name; known ones of `COLUMNS`: bytes


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport:
    """The bytes of one device in a training step, part by part.

    Args:
        layout: the step's.
        devices: a description.
        rows: the table.
    """

    layout: Layout
    devices: str
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        rows = [{"part": row["part"].strip(), **self._cells(row)} for row in self.rows]
        return {"layout": str(self.layout), "rows": rows}

    def table(self) -> Table:
        """Every row, in bytes."""
        rows = [(row["part"], *self._cells(row).values()) for row in self.rows]
        return Table("bytes of one device", ("part", *self.columns), rows)

    @property
    def columns(self) -> list[str]:
        """The names in `COLUMNS` that any row fills."""
        return [name for name in COLUMNS if any(row.get(name) is not None for row in self.rows)]

    def _cells(self, row: Row) -> dict[str, int | None]:
        return {name: row.get(name) for name in self.columns}

    def __repr__(self) -> str:
        whole = [row for row in self.rows if not row["part"].startswith(" ")]
        rows = [(row["part"], *map(_size, self._cells(row).values())) for row in whole]
        title = f"{self.layout} on {self.devices}, one device"
        return str(Table(title, ("part", *self.columns), rows))

    def _repr_html_(self) -> str:
        return html_of(f"{self.layout} on {self.devices}", self.table())


def _size(size: int | None) -> str:
    return "" if size is None else bytes_text(size)


@checked("jaxptd.memory.report")
def report(config: Config, *, compiled: bool = True) -> list[Row]:
    """The rows of the table.

    Args:
        config: the step's.
        compiled: whether to compile the step and add what it holds.
    """
    program = Program(config, make_mesh(config.layout))
    arguments, temporary = _compiled_sizes(program) if compiled else (None, None)
    plan = program.resolved.plan
    on_gpu = _on_gpu(program)
    return [
        *_state(program),
        {
            "part": "all that enters the step",
            "compiled": arguments,
            "model": on_gpu and on_gpu.state,
        },
        *_layers(config, plan),
        *_total(program, plan),
        {
            "part": "temporary: gradients, layers, all else",
            "compiled": temporary,
            "model": on_gpu and on_gpu.total - on_gpu.state,
        },
        *(_parts(on_gpu) if on_gpu else ()),
        {"part": OUTSIDE, "model": sum(each.bytes for each in outside(config.layout))},
    ]


def _compiled_sizes(program: Program) -> tuple[int, int]:
    """Bytes that enter the compiled step, and those that it holds besides."""
    with out_of_memory_explained(program):
        memory = compile_to_read(program).memory_analysis()
    arguments = memory.argument_size_in_bytes + memory.host_argument_size_in_bytes
    return arguments, memory.temp_size_in_bytes


def _on_gpu(program: Program) -> Peak | None:
    """The model's peak on a GPU; None for a family whose parts it does not cover."""
    config, resolved = program.config, program.resolved
    if not has_times(config.model):
        return None
    return peak(config, memory_model.state(config, resolved.zero), resolved.plan)


def _parts(on_gpu: Peak) -> Iterator[Row]:
    """The parts of the model's peak on a GPU, besides the state."""
    for name, size in on_gpu.parts.items():
        if size and name != "state":
            yield {"part": f"  {name}, at the fullest moment ({on_gpu.moment})", "model": size}


def _state(program: Program) -> Iterator[Row]:
    """The state of the step, its gradients, and parameters gathered for the whole step."""
    every = published_state(program.config, program.infos)
    published = {} if program.config.freezes_some else every  # where all parameters train
    params, moments = program.states.memory
    memory = {"parameters": params, "optimizer": moments}
    state = memory_model.state(program.config, program.resolved.zero)
    state["gradients"] -= memory_model.narrowed(program.config, program.resolved.zero)
    for name, size in state.items():
        part = f"{name}, in host memory" if memory.get(name) == HOST else name
        yield {"part": part, "published": published.get(name), "formula": size}


def _one_of(stack: Stack) -> str:
    """A layer of a stack, in words."""
    return "a layer" if stack.period == 1 else f"a period of {stack.period} layers"


def _layers(config: Config, plan: Plan | None) -> Iterator[Row]:
    """Each tensor saved by one layer of each kind for one micro-batch, and their total."""
    for stack in memory_model.stacks(config, plan):
        for kept in memory_model.kept_by_layer(config, stack.stack):
            if times := kept.times.get(stack.remat, 0):
                name = f"  {kept.name}" + (f", {times} times" if times > 1 else "")
                yield {"part": name, "formula": times * kept.bytes}
        yield {
            "part": f"{_one_of(stack.stack)}, remat {stack.remat}",
            "published": _published_layer(config, stack.remat),
            "formula": memory_model.layer(config, stack.stack, stack.remat),
        }


# ---- as published --------------------------------------------------------------------------------

_FROM_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1}  # ZeRO stages, as published


def published_state(config: Config, infos: Mapping[str, ParamShape]) -> dict[str, int]:
    """Bytes of the state by table 1: P/N, G/N, A/N on N devices; 2P/N with ZeRO stage 3.

    Experts are split over ep without ZeRO, all other parameters only with it. Replicas may split
    moments once more.
    """
    layout, sizes = config.layout, sizes_of(config)
    sharing, split = layout.zero_shards, [1, layout.ep]
    numbers = {
        stage: sum(
            math.prod(info.shape)
            / (sharing if layout.zero >= stage else split[Axis.EP in info.axes])
            for info in infos.values()
        )
        for stage in _FROM_STAGE.values()
    }
    unit = sizes.master_itemsize / (sizes.matrix_shards * layout.pp)
    parts = layout.replicas if layout.splits_state else 1
    copies = {"parameters": 2 if layout.zero >= 3 else 1, "gradients": 1, "optimizer": 2 / parts}
    return {name: round(copies[name] * unit * numbers[z]) for name, z in _FROM_STAGE.items()}


def published_layer(config: Config, remat: Remat) -> int | None:
    """Bytes that one layer saves per micro-batch: 16-bit activations, one-byte masks.

    None for `dots`, about which nothing is published.
    """
    layout, model, sizes = config.layout, config.padded_model, sizes_of(config)
    sbh = sizes.tokens * model.hidden_size
    scores = 5 * model.num_heads * model.seq_length / model.hidden_size
    shards = sizes.matrix_shards
    replicated = layout.tp > 1 and not layout.sequence_parallel  # norms and residuals
    if remat == "dots":
        return None
    if remat == "full":
        return round(sbh * 2 / (1 if replicated else shards))
    scores = scores if remat == "none" else 0
    return round(sbh * (10 + (24 + scores) / shards if replicated else (34 + scores) / shards))


def _published_layer(config: Config, remat: Remat) -> int | None:
    """Published bytes of a layer; None for several stacks, images or experts: they are for GPT."""
    stacks = architecture_of(config.model).stacks
    plain = stacks[0].period == 1 and not stacks[0].of_images and not config.model.moe
    alike = len(stacks) == 1 and plain
    return published_layer(config, remat) if alike else None


def _total(program: Program, plan: Plan | None) -> Iterator[Row]:
    """All layers of a device; in a pipeline also tensors that wait for their operation."""
    config, layers = program.config, memory_model.stacks(program.config, plan)
    published = [_published_layer(config, each.remat) for each in layers]
    sums = [s.layers * s.micro_batches * (p or 0) for s, p in zip(layers, published, strict=True)]
    how = " + ".join(
        f"{s.layers * s.stack.period} layers x {s.micro_batches} micro-batches" for s in layers
    )
    yield {
        "part": f"all layers: {how}",
        "published": None if None in published else sum(sums),
        "formula": memory_model.activations(config, plan),
        "counted": counted(program),
    }
    if behind := memory_model.behind(config):
        yield {"part": "layers of MTP modules, with what they take", "formula": behind}
    if plan:
        yield {"part": "waiting for a stage", "formula": memory_model.mail(config, plan)}


# ---- counted in the jaxpr ------------------------------------------------------------------------


@checked("jaxptd.memory.counted")
def counted(program: Program) -> int | None:
    """Bytes that all layers save for backward, in the step's jaxpr; None if unrolled.

    A scan over layers saves the results that it stacks. Where ZeRO moves parameters ahead, the last
    layer is outside the scan and saves the same. A first micro-batch outside the others' loop saves
    as much as each of them. A pipeline holds the buffers that its ticks carry, with what a split
    backward hands from its first half to its second.
    """
    plan = program.resolved.plan
    if not program.config.model.scan_layers and not plan:
        return None
    jaxpr = traced(program).jaxpr.jaxpr
    if plan:
        return sum(map(_bytes, _pools(program, plan, jaxpr)))
    others = {id(scan) for each in equations(jaxpr) if _is_loop(each) for scan in _inside(each)}
    forward = [scan for scan in scans(jaxpr) if _is_forward(scan)]
    forward = [scan for scan in forward if id(scan) not in others] or forward
    layers = program.resolved.zero.layers
    more = int(layers.prefetches or layers.gather == "first_microbatch")
    return sum(
        (scan.params["length"] + more) * _bytes(x) for scan in forward for x in _stacked(scan)
    )


def _pools(program: Program, plan: Plan, jaxpr: Any) -> list[Any]:
    """The arrays that ticks carry, except x, mail, the parameters' gradients and losses.

    x and mail have one array per stream.
    """
    scan = next(each for each in scans(jaxpr) if each.params["length"] == plan.schedule.ticks)
    model = program.config.model
    family = family_of(model)
    before = 2 * len(architecture_of(model).streams(sizes_of(program.config)))
    trained = sum(not info.frozen for info in program.resolved.zero.infos.values())
    behind = trained + len(family.losses(model))
    return [var.aval for var in scan.outvars][before:-behind]


def _is_loop(equation: Any) -> bool:
    return equation.primitive.name in ("scan", "while")


def _inside(equation: Any) -> Iterator[Any]:
    """The scans inside an equation."""
    return (scan for jaxpr in inside(equation) for scan in scans(jaxpr))


def _is_forward(scan: Any) -> bool:
    """True for a forward loop over layers."""
    scope = str(scan.source_info.name_stack).rpartition("/")[2]
    return LAYERS in scope and "transpose" not in scope


def _stacked(scan: Any) -> Iterator[Any]:
    """The results of one iteration that a scan stacks."""
    pairs = zip(scan.outvars, scan.params["jaxpr"].out_avals, strict=True)
    return (one for var, one in pairs if var.aval.shape != one.shape)


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
