"""A pipeline's step compiled for H200s: memory, and what a tick does.

Makes the output of `python -m benchmarks.pipeline --gpu --config configs/gpt-145b.yaml`.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.measure import gib
from benchmarks.pipeline.text import Tick, hops, tick
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hlo.timeline import Move
from jaxptd.analysis.report import table, versions
from jaxptd.compiling import PLUGINS, gpus
from jaxptd.config import Config, Remat
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

SCHEDULES = ("1f1b", "interleaved")
REMATS: tuple[Remat, ...] = ("full", "dots")
NEEDS: tuple[str, ...] = ("schedule", "remat", "slots: saved, mail", "peak GiB", "temp GiB")
NEEDS += ("state GiB", "compiled in, s")
TICKS: tuple[str, ...] = ("schedule", "remat", "ticks", "loops of 0 or 1 trips")
TICKS += ("loops over layers", "conditionals", "MiB copied: gradients, weights, pools")
TICKS += ("of anything else", "hops: MiB, and the work between start and done")
INTRODUCTION = """All figures are of one GPU; nothing was run or timed. Peak: all that the program
needs, state included. A tick: one at which every loop runs, once. Copied: by copy instructions in
the loop over ticks; those of gradients, weights and pools have the shape of what that loop carries.
Hops: every permute between stages in the program's text.
"""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The figures of a compiled step; memory in bytes: peak, temporary, state."""

    config: Config
    slots: dict[str, int]
    memory: tuple[int, int, int]
    seconds: float
    ticks: int
    tick: Tick
    hops: list[Move]

    @property
    def _named(self) -> list[str]:
        return [self.config.layout.schedule, self.config.model.remat]

    @property
    def needs(self) -> list[str]:
        """Its row of the first table."""
        slots = f"{self.slots['saved_blocks']}, {self.slots['mail']}"
        return [*self._named, slots, *map(gib, self.memory), f"{self.seconds:.0f}"]

    @property
    def at_a_tick(self) -> list[str]:
        """Its row of the second."""
        tick = self.tick
        copied = (f"{size / 2**20:.1f}" for size in (tick.carried, tick.others))
        loops = map(str, (self.ticks, tick.loops, tick.known, tick.conditionals))
        hops = ", ".join(f"{hop.bytes / 2**20:.1f} {hop.hidden_by}" for hop in self.hops)
        return [*self._named, *loops, *copied, hops]


def compiled(config: Config) -> Compiled:
    """Compiles a config's step for H200s."""
    mesh = make_mesh(config.layout, gpus(config.layout.num_devices))
    program: Any = Program(config, mesh)
    start = time.perf_counter()
    step = compile_step(program)
    seconds = time.perf_counter() - start
    memory, text = step.memory_analysis(), step.as_text()
    held = (
        memory.peak_memory_in_bytes,
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
    )
    plan = program.resolved.plan
    ticks = plan.schedule.ticks
    sizes = {str(axis): n for axis, n in mesh.shape.items()}
    found = tick(text, ticks, activation(config))
    return Compiled(config, plan.slots, held, seconds, ticks, found, hops(text, sizes))


def activation(config: Config) -> tuple[int, ...]:
    """The shape of a micro-batch's activation on a device of one tp group, `[B, T, D]`."""
    train, layout = config.train, config.layout
    sequences = train.global_batch_size // (layout.dp * train.micro_batches)
    cut = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    return sequences, config.model.seq_length // cut, config.model.hidden_size


def variants(config: Config) -> list[Config]:
    """Lists the config with every schedule and remat policy."""
    return [
        dataclasses.replace(
            config,
            layout=dataclasses.replace(config.layout, schedule=schedule),
            model=dataclasses.replace(config.model, remat=remat),
        )
        for remat in REMATS
        for schedule in SCHEDULES
    ]


def report(configs: Sequence[Config]) -> str:
    """Makes the tables of all configs."""
    found = []
    for config in configs:
        found.append(compiled(config))
        print(*found[-1].needs, flush=True)
    model, train, layout = configs[0].model, configs[0].train, configs[0].layout
    title = (
        f"{model.num_layers} layers, hidden {model.hidden_size}, sequence {model.seq_length}, "
        f"pp={layout.pp} tp={layout.tp} dp={layout.dp}"
        f"{', sequence parallelism' if layout.sequence_parallel else ''}, {model.dtype}, "
        f"{train.micro_batches} micro-batches of "
        f"{train.global_batch_size // (layout.dp * train.micro_batches)}"
    )
    return "\n".join(
        [
            f"{versions(*PLUGINS.split())}\n\n{INTRODUCTION}\n{title}.\n",
            table([NEEDS, *(each.needs for each in found)]),
            "\nA tick:\n",
            table([TICKS, *(each.at_a_tick for each in found)]),
            "",
        ]
    )
