"""What a device holds in a training step: predicted, counted in its program, and compiled.

`python -m jaxptd.memory --config F [overrides] [--json]` prints, of one device, what is published,
what this library's formula says (`formulas_memory.py`), what the step's jaxpr keeps, and what the
compiled program needs. Nothing is run, and no parameter is made.

The compiled figures are of the machine at hand. On CPUs they mean something in float32 only: there
XLA computes bfloat16 in float32.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxptd.analysis import memory_model as by_formula
from jaxptd.analysis.jaxprs import scans
from jaxptd.config import Config
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.layers.block import LAYERS
from jaxptd.mesh import make_mesh
from jaxptd.pipeline.plan import Plan
from jaxptd.run.devices import prepare
from jaxptd.step import Program
from jaxptd.step.state import HOST

Row = dict[str, Any]  # part, published, formula, counted, compiled: bytes, or None


def counted(program: Program) -> int | None:
    """Bytes that all layers keep for backward, in the jaxpr of the step; None if unrolled.

    Of a scan over layers these are the results that it stacks up; of a pipeline, the pools that
    its ticks carry, with what passes between the halves of backward where it is split.
    """
    if not program.model.scan_layers and program.config.layout.pp == 1:
        return None
    step: Any = program.train_step
    jaxpr = step.trace(program.abstract_state, program.abstract_batch).jaxpr.jaxpr
    if program.config.layout.pp > 1:
        return sum(map(_bytes, _pools(program, jaxpr)))
    forward = [scan for scan in scans(jaxpr) if _is_forward(scan)]
    return sum(_bytes(x) for scan in forward for x in _stacked(scan))


def _pools(program: Program, jaxpr: Any) -> list[Any]:
    """What ticks carry, less x, mail, the gradients of every parameter and the loss."""
    ticks = program.plan.schedule.ticks
    scan = next(each for each in scans(jaxpr) if each.params["length"] == ticks)
    return [var.aval for var in scan.outvars][2 : -len(program.infos) - 1]


def _is_forward(scan: Any) -> bool:
    """Whether it is a loop over layers, and not the one backward."""
    scope = str(scan.source_info.name_stack).rpartition("/")[2]
    return LAYERS in scope and "transpose" not in scope


def _stacked(scan: Any) -> Iterator[Any]:
    pairs = zip(scan.outvars, scan.params["jaxpr"].out_avals, strict=True)
    return (var.aval for var, one in pairs if var.aval.shape != one.shape)


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def report(config: Config) -> list[Row]:
    """The table's rows."""
    program = Program(config, make_mesh(config.layout))
    plan = program.plan if config.layout.pp > 1 else None
    step: Any = program.train_step
    compiled = step.lower(program.abstract_state, program.abstract_batch).compile()
    memory = compiled.memory_analysis()
    return [
        *_state(program),
        {
            "part": "all that enters the step",
            "compiled": memory.argument_size_in_bytes + memory.host_argument_size_in_bytes,
        },
        *_layers(config, plan),
        *_total(program, plan),
        {"part": "temporary: gradients, layers, all else", "compiled": memory.temp_size_in_bytes},
    ]


def _state(program: Program) -> Iterator[Row]:
    published = by_formula.published_state(program.config, program.infos)
    for name, size in by_formula.state(program.config, program.zero).items():
        away = name in ("parameters", "optimizer") and program.states.memory == HOST
        part = f"{name}, in host memory" if away else name
        yield {"part": part, "published": published.get(name), "formula": size}


def _layers(config: Config, plan: Plan | None) -> Iterator[Row]:
    """Of each kind of layer: what one keeps of one micro-batch, part by part and in all."""
    for stack in by_formula.stacks(config, plan):
        for part in by_formula.layer_parts(config):
            if times := part.times.get(stack.remat, 0):
                name = f"  {part.name}" + (f", {times} times" if times > 1 else "")
                yield {"part": name, "formula": times * part.bytes}
        yield {
            "part": f"a layer, remat {stack.remat}",
            "published": by_formula.published_layer(config, stack.remat),
            "formula": by_formula.layer(config, stack.remat),
        }


def _total(program: Program, plan: Plan | None) -> Iterator[Row]:
    config, found = program.config, by_formula.stacks(program.config, plan)
    published = [by_formula.published_layer(config, each.remat) for each in found]
    sums = [s.layers * s.micro_batches * (p or 0) for s, p in zip(found, published, strict=True)]
    how = " + ".join(f"{s.layers} layers x {s.micro_batches} micro-batches" for s in found)
    yield {
        "part": f"all layers: {how}",
        "published": None if None in published else sum(sums),
        "formula": by_formula.activations(config, plan),
        "counted": counted(program),
    }
    if plan:
        yield {"part": "waiting for a stage", "formula": by_formula.mail(config, plan)}


def _table(rows: Sequence[Row]) -> Table:
    columns = ("published", "formula", "counted", "compiled")
    table = Table("part", *columns, title="bytes of one device")
    for row in rows:
        sizes = (row.get(name) for name in columns)
        table.add_row(row["part"], *("" if size is None else f"{size:,}" for size in sizes))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts what one training step holds on each device, and compiles it to compare."""
    parser = make_parser("python -m jaxptd.memory", main.__doc__ or "")
    parser.add_argument("--json", action="store_true", help="print JSON")
    config, options = parse(parser, argv)
    config = with_vocabulary(config)
    where = prepare(config)
    rows = report(config)
    if options["json"]:
        names = ("published", "formula", "counted", "compiled")
        plain = [{"part": row["part"].strip(), **{n: row.get(n) for n in names}} for row in rows]
        print(json.dumps({"layout": str(config.layout), "rows": plain}))
        return 0
    console = Console()
    console.print(f"{config.layout} on {where}", highlight=False)
    console.print(_table(rows))
    return 0


if __name__ == "__main__":
    run_command(main)
