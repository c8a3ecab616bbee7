"""Where the time of a training step goes, measured by JAX's profiler on the devices at hand.

`python -m benchmarks.profile --config configs/gpt2-124m.yaml [--steps 5] [--picture step.svg]`

Prints milliseconds of a step by part (`step_parts.py`): a scope of the model, and products,
attention kernel, other kernels or collectives. Times of devices that run at once are averaged;
where kernels lie over each other on one device, each counts in full. The trace itself, which
Perfetto and XProf open, stays where `--trace DIR` says. Random tokens, no data.
"""

import collections
import gzip
import importlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks import kernels
from benchmarks.measure import compile_step, random_batch, table, versions
from benchmarks.schedule import inside
from benchmarks.step_parts import Times, lines, scope_of
from jaxptd.config import Config
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import UserError, run_command
from jaxptd.mesh import make_mesh
from jaxptd.run.devices import prepare
from jaxptd.step import Program

WARM_UP = 2


def measure(config: Config, steps: int, directory: Path) -> Times:
    """Seconds of a step by part, on one device, from a trace of so many steps."""
    program = Program(config, make_mesh(config.layout))
    compiled = compile_step(program, {"xla_gpu_enable_command_buffer": ""})  # it hides names
    state, batch = program.init_state(), program.place(random_batch(config))
    for _ in range(WARM_UP):
        state, _ = jax.block_until_ready(compiled(state, batch))
    with jax.profiler.trace(directory):
        for _ in range(steps):
            state, _ = jax.block_until_ready(compiled(state, batch))
    runs = steps * config.layout.num_devices
    return of_events(events(directory), compiled.as_text(), runs)


def events(directory: Path) -> list[dict[str, Any]]:
    """What a trace says of single instructions of a program: `ts`, `dur` in us, `args`.

    Raises:
        UserError: it has none.
    """
    found = []
    for path in sorted(directory.glob("**/*.trace.json.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found += _of_devices(json.load(file)["traceEvents"])
    if not found:
        raise UserError(f"the profiler left no instruction of a program in {directory}")
    return found


def _of_devices(every: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of instructions; of GPUs what ran on a stream, not what is told of it once more."""
    found, streams = [], set()
    for event in every:
        args, thread = event.get("args", {}), (event.get("pid"), event.get("tid"))
        if event.get("name") == "thread_name" and args.get("name", "").startswith("Stream"):
            streams.add(thread)
        if event.get("ph") == "X" and "hlo_op" in args:
            found.append((thread, event))
    return [event for thread, event in found if not streams or thread in streams]


def of_events(every: Iterable[dict[str, Any]], text: str, runs: int) -> Times:
    """Seconds by part of one of so many runs of a program. text: of the compiled program."""
    computations, _ = kernels.parse(text)
    known = {each.name: each for body in computations.values() for each in body}
    times: Times = collections.defaultdict(float)
    for event in every:
        each = known.get(event["args"]["hlo_op"])
        if each is not None and not inside(each):  # a loop's time is that of what it runs
            part = scope_of(each.op_name), kernels.kind_of(each, computations)
            times[part] += event["dur"] * 1e-6 / runs
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Measures where the time of a training step goes."""
    parser = make_parser("python -m benchmarks.profile", main.__doc__ or "")
    parser.add_argument("--steps", type=int, default=5, help="in the trace, after two")
    parser.add_argument("--picture", default="", help="SVG file to draw")
    parser.add_argument("--trace", default="", help="directory that keeps the trace")
    config, options = parse(parser, argv)
    if options["steps"] < 1:
        raise UserError(f"--steps={options['steps']} must be at least 1")
    trace, drawn = (options[name] and Path(options[name]) for name in ("trace", "picture"))
    if trace and trace.exists():
        raise UserError(f"--trace={trace}: is there already; name a new directory")
    if drawn and drawn.suffix != ".svg":
        raise UserError(f"--picture={drawn}: name a file that ends in .svg")
    if drawn:
        _pictures()
    for option, directory in (("trace", trace), ("picture", drawn and drawn.parent)):
        _make(option, directory)
    config = with_vocabulary(config)
    console = Console()
    where = prepare(config)
    console.print(f"profiling {config.layout} on {where}", highlight=False)
    with tempfile.TemporaryDirectory() as aside:
        times = measure(config, options["steps"], Path(trace or aside))
    print(versions())
    print(table([("part", "kernels", "ms a step", "share"), *lines(times)]))
    if drawn:
        draw(drawn, f"{config.layout}, {where}", times)
    return 0


def _pictures() -> Any:
    """Raises UserError: there is nothing to draw with."""
    try:
        return importlib.import_module("benchmarks.step_pictures")
    except ModuleNotFoundError as error:
        raise UserError(
            f"--picture: {error.name} is not installed; pip install -e '.[viz]'"
        ) from error


def draw(path: Path, title: str, times: Times) -> None:
    """Writes the picture of one step."""
    pictures = _pictures()
    make = partial(pictures.picture, {title: times}, "ms a step, measured")
    pictures.svg.save({path.name: make}, path.parent, pictures.STYLE)


def _make(option: str, directory: Path | str) -> None:
    """Before anything runs. Raises UserError: it cannot be made."""
    try:
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--{option}: {error.strerror}: {directory}") from error


if __name__ == "__main__":
    run_command(main)
