"""Times of a step's parts, measured by JAX's profiler."""

import collections
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxptd.analysis.compiled_step import compile_step, random_batch
from jaxptd.analysis.hlo import kernels
from jaxptd.analysis.hlo.text import parse
from jaxptd.analysis.profiling.step_parts import Times, scope_of
from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.mesh import make_mesh
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
    computations, _ = parse(text)
    known = {each.name: each for body in computations.values() for each in body}
    times: Times = collections.defaultdict(float)
    for event in every:
        each = known.get(event["args"]["hlo_op"])
        if each is not None and not each.calls:  # a loop's time is that of what it runs
            part = scope_of(each.op_name), kernels.kind_of(each, computations)
            times[part] += event["dur"] * 1e-6 / runs
    return times
