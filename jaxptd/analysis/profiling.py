"""Measures the times of a training step's parts, and gives lower bounds."""

import collections
import dataclasses
import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxptd.analysis.compiled_step import compile_step, random_batch
from jaxptd.analysis.hardware import BANDWIDTH, PEAK_FLOPS
from jaxptd.analysis.hlo.kernels import (
    ATTENTION,
    OTHER,
    PRODUCT,
    kernels,
    kind_of,
)
from jaxptd.analysis.hlo.text import parse
from jaxptd.analysis.jaxprs import attention_flops, executions, flops
from jaxptd.config import Config
from jaxptd.display import Table
from jaxptd.errors import UserError
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

# ---- parts of a step -----------------------------------------------------------------------------

# A part is a scope of the model, as `jax.named_scope` names it (`SCOPES`), and a kind of kernel.
# Its least time is that of its FLOPs at an H200's peak, or of its bytes at the bandwidth that
# kernels reach there.

PEAK = PEAK_FLOPS["H200"]
REST = "rest"
SCOPES = ("embedding", "norm", "attention", "mlp", "loss", "optimizer", REST)
_SCOPE = re.compile(rf"\b({'|'.join(SCOPES[:-1])})\b")
Times = dict[tuple[str, str], float]  # seconds of a step, by scope and kind


@dataclasses.dataclass(frozen=True, repr=False)
class ProfileReport:
    """The measured seconds of a step's parts.

    Args:
        title: layout and devices.
        times: seconds by scope and kind of kernel.
    """

    title: str
    times: Times

    def table(self) -> Table:
        """The parts, longest first."""
        title = f"{self.title}: {1e3 * sum(self.times.values()):.3g} ms per step"
        return Table(title, ("part", "kernels", "ms per step", "share"), lines(self.times))

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def scope_of(name: str) -> str:
    """The innermost of `SCOPES` in a JAX name."""
    scopes = _SCOPE.findall(name)
    return scopes[-1] if scopes else REST


def least(program: Program, text: str) -> Times:
    """The least seconds of each part of a step on an H200, without collectives.

    text: the scheduled program, compiled for the GPU.
    """
    times: Times = collections.defaultdict(float)
    for equation, count, names in executions(program):
        for kind, weigh in ((PRODUCT, flops), (ATTENTION, attention_flops)):
            times[scope_of(names), kind] += count * weigh(equation) / PEAK
    for kernel in kernels(text):
        if kernel.kind == OTHER:
            times[scope_of(kernel.instruction.op_name), OTHER] += kernel.bytes / BANDWIDTH
    return times


def lines(times: Times) -> list[list[str]]:
    """Rows of a table, longest time first: scope, kind, milliseconds, share."""
    total = sum(times.values())
    longest = sorted(times.items(), key=lambda item: -item[1])
    return [
        [scope, kind, f"{1e3 * seconds:.3g}", f"{seconds / total:.1%}"]
        for (scope, kind), seconds in longest
        if seconds
    ]


# ---- measured times ------------------------------------------------------------------------------

WARM_UP = 2
NAMED = {"xla_gpu_enable_command_buffer": ""}  # CUDA graphs would hide the kernels' names


def measure(config: Config, steps: int, directory: Path) -> Times:
    """Seconds of each part of a step, averaged over devices and over the steps of a trace.

    Args:
        config: the run's.
        steps: number of traced steps, after `WARM_UP` others.
        directory: for the trace.
    """
    program = Program(config, make_mesh(config.layout))
    compiled = compile_step(program, NAMED)
    state, batch = program.init_state(), program.place(random_batch(config))
    for _ in range(WARM_UP):
        state, _ = jax.block_until_ready(compiled(state, batch))
    with jax.profiler.trace(directory):
        for _ in range(steps):
            state, _ = jax.block_until_ready(compiled(state, batch))
    runs = steps * config.layout.num_devices
    return part_times(events(directory), compiled.as_text(), runs)


def events(directory: Path) -> list[dict[str, Any]]:
    """A trace's events that belong to instructions of a program: `ts`, `dur` in us, `args`.

    Raises:
        UserError: there are none.
    """
    all_events = []
    for path in sorted(directory.glob("**/*.trace.json.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            all_events += _of_devices(json.load(file)["traceEvents"])
    if not all_events:
        raise UserError(f"the profiler recorded no instruction of a program in {directory}")
    return all_events


def _of_devices(every: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of instructions; on GPUs only those of streams, as other threads repeat them."""
    on_devices, streams = [], set()
    for event in every:
        args, thread = event.get("args", {}), (event.get("pid"), event.get("tid"))
        if event.get("name") == "thread_name" and args.get("name", "").startswith("Stream"):
            streams.add(thread)
        if event.get("ph") == "X" and "hlo_op" in args:
            on_devices.append((thread, event))
    return [event for thread, event in on_devices if not streams or thread in streams]


def part_times(every: Iterable[dict[str, Any]], text: str, runs: int) -> Times:
    """Seconds of each part in one run of a program.

    Args:
        every: the events of all runs on all devices.
        text: the compiled program's.
        runs: the number of runs.
    """
    computations, _ = parse(text)
    known = {each.name: each for body in computations.values() for each in body}
    times: Times = collections.defaultdict(float)
    for event in every:
        each = known.get(event["args"]["hlo_op"])
        if each is not None and not each.calls:  # a loop's events include those of its body
            part = scope_of(each.op_name), kind_of(each, computations)
            times[part] += event["dur"] * 1e-6 / runs
    return times
