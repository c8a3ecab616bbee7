"""What a training step moves: its collectives by kind, axis, bytes and executions.

`python -m jaxptd.comms --config F [overrides] [--json]` traces the step, counts every collective of
its jaxpr (scan lengths multiplied in) and of the compiled HLO, and holds both against the formula.
Nothing is run, and no parameter is made.

Bytes are of the whole tensor that a collective makes or sums, on one device: of an all-reduce its
operand, of an all-gather its result, of all others their operand. `wire_bytes` is what a ring sends
from each device: with g devices (g-1)/g of that, twice for an all-reduce, all of it in a permute or
a broadcast. Axes of size 1 move nothing and are left out. What the stages of a pipeline do by
themselves is added up over them: a layer's collectives count once, whichever stage has it.

Source of the formulas: see `formulas.py`.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from jaxptd.analysis.collective import PERMUTE, Collective
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.analysis.jaxprs import inside
from jaxptd.analysis.traffic.step import expected
from jaxptd.collectives import moved_along
from jaxptd.config import Config
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.mesh import Axis, make_mesh, on_gpus
from jaxptd.run.devices import prepare
from jaxptd.step import Program

KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "pbroadcast": "collective-broadcast",
}


def collectives_of(
    jaxpr: Any, mesh: Mesh, trips: Mapping[str, int] = MappingProxyType({})
) -> list[Collective]:
    """Every collective of a jaxpr, like ones added up.

    Args:
        jaxpr: of a program.
        mesh: that it runs on.
        trips: of each loop whose length differs from stage to stage, by its scope, of all stages.

    Raises:
        ValueError: one stands in a loop whose length is not known before it runs.
    """
    sizes = dict(mesh.shape)
    return add_up(_walk(getattr(jaxpr, "jaxpr", jaxpr), sizes.get(Axis.PP, 1), (sizes, trips)))


def _walk(
    jaxpr: Any, times: int, known: tuple[Mapping[str, int], Mapping[str, int]]
) -> Iterator[Collective]:
    """times: that all stages together run it. known: sizes of the axes, and trips."""
    sizes, trips = known
    for equation in jaxpr.eqns:
        if equation.primitive.name in KINDS:
            yield from _read(equation, times, sizes)
        runs, endless = times * equation.params.get("length", 1), False
        if equation.primitive.name == "while":
            scope = str(equation.source_info.name_stack).rpartition("/")[2]
            runs, endless = trips.get(scope, times), scope not in trips
        found = [c for sub in inside(equation) for c in _walk(sub, runs, known)]
        if endless and found:
            raise ValueError(f"{found[0].kind} inside a while loop: how often it runs is not known")
        yield from found


def _read(equation: Any, times: int, sizes: Mapping[str, int]) -> Iterator[Collective]:
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    axes = axes if isinstance(axes, tuple) else (axes,)
    kind = KINDS[equation.primitive.name]
    if kind == PERMUTE:
        along = moved_along(equation.params["perm"], [sizes[axis] for axis in axes])
        axes = tuple(axes[i] for i in along)
    axes = tuple(str(axis) for axis in axes if sizes[axis] > 1)
    if Axis.PP in axes:  # all stages together
        times //= sizes[Axis.PP]
    for variable in equation.outvars if kind == "all-gather" else equation.invars:
        if axes:
            size = math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
            yield Collective(kind, axes, times, times * size)


def add_up(collectives: Iterable[Collective]) -> list[Collective]:
    """One entry for each kind and set of axes, in order of bytes."""
    total: dict[tuple, list[int]] = collections.defaultdict(lambda: [0, 0])
    for each in collectives:
        entry = total[each.kind, tuple(sorted(each.axes))]
        entry[0] += each.count
        entry[1] += each.bytes
    merged = [Collective(*key, *entry) for key, entry in total.items()]
    return sorted(merged, key=lambda c: (-c.bytes, c.kind, c.axes))


def subtract(more: Sequence[Collective], less: Sequence[Collective]) -> list[Collective]:
    """What `more` has beyond `less`."""
    negative = [dataclasses.replace(c, count=-c.count, bytes=-c.bytes) for c in less]
    return [c for c in add_up([*more, *negative]) if c.count or c.bytes]


def count(program: Program) -> list[Collective]:
    """The collectives of a program's training step, from its jaxpr."""
    return collectives_of(_trace(program).jaxpr, program.mesh, _trips(program))


def _trips(program: Program) -> Mapping[str, int]:
    return program.plan.trips if program.config.layout.pp > 1 else {}


def count_compiled(program: Program, options: Mapping[str, Any] | None = None) -> list[Collective]:
    """The collectives of the compiled step, from its HLO; XLA may have merged some into one.

    Args:
        program: whose training step.
        options: of the compiler.
    """
    text = _trace(program).lower().compile(compiler_options=options).as_text()
    return add_up(collectives_from_hlo(text, dict(program.mesh.shape), _trips(program)))


def formula(program: Program) -> list[Collective]:
    """What a program's training step must move."""
    plan = program.plan if program.config.layout.pp > 1 else None
    native = on_gpus(program.mesh)
    return add_up(expected(program.config, program.infos, plan, native=native))


def per_layer(program: Program) -> list[Collective]:
    """What one more layer moves; its gradients make the step's reductions longer, not more."""
    config, parts = program.config, program.config.layout.stage_layers
    model = dataclasses.replace(config.model, num_layers=config.model.num_layers + 1)
    longer = parts and (*parts[:-1], parts[-1] + 1)
    layout = dataclasses.replace(config.layout, stage_layers=longer)
    deeper = dataclasses.replace(config, model=model, layout=layout)
    return subtract(count(dataclasses.replace(program, config=deeper)), count(program))


def _trace(program: Program) -> Any:
    step: Any = program.train_step
    return step.trace(program.abstract_state, program.abstract_batch)


def report(config: Config) -> dict[str, list[Collective]]:
    """The step's collectives: as in the jaxpr, in the HLO, by the formula; and one layer's."""
    program = Program(config, make_mesh(config.layout))
    return {
        "jaxpr": count(program),
        "compiled": count_compiled(program),
        "formula": formula(program),
        "per_layer": per_layer(program),
    }


def _table(title: str, rows: Sequence[Collective], sizes: Mapping[str, int]) -> Table:
    table = Table("collective", "axes", "executions", "bytes", "ring bytes sent", title=title)
    for row in rows:
        table.add_row(
            row.kind,
            " x ".join(row.axes),
            f"{row.count:,}",
            f"{row.bytes:,}",
            f"{row.wire_bytes(sizes):,}",
        )
    return table


TITLES = {
    "jaxpr": "one training step, from the jaxpr",
    "compiled": "one training step, from the compiled HLO",
    "formula": "one training step, by the formula",
    "per_layer": "of which one layer, forward and backward, all micro-batches",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Counts what one training step moves between devices, and holds it against the formula."""
    parser = make_parser("python -m jaxptd.comms", main.__doc__ or "")
    parser.add_argument("--json", action="store_true", help="print JSON")
    config, options = parse(parser, argv)
    config = with_vocabulary(config)
    where = prepare(config)
    sizes = {str(axis): size for axis, size in config.layout.sizes.items()}
    found = report(config)
    if options["json"]:
        plain = {name: [row.as_dict(sizes) for row in each] for name, each in found.items()}
        print(json.dumps({"mesh": sizes, **plain}))
        return 0
    console = Console()
    console.print(f"{config.layout} on {where}", highlight=False)
    for name, rows in found.items():
        console.print(_table(TITLES[name], rows, sizes))
    same = subtract(found["jaxpr"], found["formula"]) == []
    console.print(
        "the jaxpr moves what the formula says"
        if same
        else "the jaxpr does NOT move what the formula says"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
