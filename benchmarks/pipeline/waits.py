"""Waits of a GPU's host for its device in a pipeline's step, compiled for H200s.

Makes the output of `python -m benchmarks.pipeline --waits`.
"""

import dataclasses
from typing import Any

from benchmarks.pipeline.programs import MODEL
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hlo.text import Pipeline
from jaxptd.analysis.hlo.timeline import host_waits
from jaxptd.analysis.report import table, versions
from jaxptd.compiling import PLUGINS, gpus
from jaxptd.config import Config, TrainConfig
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
MICRO_BATCHES = 16
HEAD = ("schedule", "p", "m", "ticks", "waits of a step", "of a micro-batch", "of a tick")
INTRODUCTION = """Mean over the stages; nothing was run. A wait: the host reads a number that the
device computed, the predicate of a conditional or the condition of a loop whose length XLA does not
know.
"""


def waits(schedule: str, stages: int) -> tuple[int, float]:
    """(ticks, the host's waits in them and in the rest of the step), the mean over stages."""
    layout = Layout(pp=stages, schedule=schedule)
    train = TrainConfig(global_batch_size=MICRO_BATCHES, micro_batches=MICRO_BATCHES)
    model = dataclasses.replace(MODEL, num_layers=2 * stages)
    config = Config(model=model, layout=layout, train=train)
    program: Any = Program(config, make_mesh(layout, gpus(stages)))
    text, plan = compile_step(program).as_text(), program.resolved.plan
    return plan.schedule.ticks, host_waits(text, Pipeline(stages, plan.trips))


def report(counts: tuple[int, ...] = (4, 8)) -> str:
    """Makes the table."""
    rows = []
    for schedule in SCHEDULES:
        for stages in counts:
            ticks, found = waits(schedule, stages)
            sizes = map(str, (stages, MICRO_BATCHES, ticks))
            each = f"{found:.0f}", f"{found / MICRO_BATCHES:.1f}", f"{found / ticks:.1f}"
            rows.append([schedule, *sizes, *each])
            print(*rows[-1], flush=True)
    return f"{versions(*PLUGINS.split())}\n\n{INTRODUCTION}\n{table([HEAD, *rows])}\n"
