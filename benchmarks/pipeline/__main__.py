"""Schedules of a pipeline: bubble, memory and messages, counted, compiled and timed.

`python -m benchmarks.pipeline [--out FILE]` counts in the schedules' tables, beside the formulas.
`python -m benchmarks.pipeline --memory [--out FILE]` shows the temporary memory of the compiled
step as the number m of micro-batches grows, and what a tick copies, beside GPipe made by
differentiating a scan (`programs.py`); `text.py` reads the ticks.
`python -m benchmarks.pipeline --time [--out FILE]` times a step of one model and batch in several
layouts, in one run; and simulates the bubbles of stages that do not share cores, from the measured
times of a layer's forward and of the two halves of its backward.
`python -m benchmarks.pipeline --gpu --config configs/gpt-145b.yaml [--out FILE]` compiles for
H200s, see `gpu.py`.
`python -m benchmarks.pipeline --waits [--out FILE]` counts how often a GPU's host waits for its
device, in steps compiled for H200s.

Letters: p stages, m micro-batches, V chunks a stage; F, B, W a forward, the gradient of the input
and that of the weights, of one micro-batch and a stage's layers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.lib.measure import append
from benchmarks.pipeline import gpu as pipeline_gpu
from benchmarks.pipeline import memory as pipeline_memory
from benchmarks.pipeline import time as pipeline_time
from benchmarks.pipeline import waits as pipeline_waits
from benchmarks.pipeline.programs import STAGES
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import make_parser, parse
from jaxptd.config import Config, TrainConfig
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import UserError, run_command
from jaxptd.mesh import SCHEDULES, Layout
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.statistics import bubble, expected_bubble, expected_peak, messages, peak
from jaxptd.pipeline.table import Schedule
from jaxptd.run.devices import prepare

INTRODUCTION = """# Pipelines

Made by `python -m benchmarks.pipeline` with the option that each title names; its head says what is
measured and what is not.

"""
COUNTED: tuple[str, ...] = ("schedule", "p", "m", "ticks", "by theory", "bubble", "by formula")
COUNTED += ("peak, micro-batches", "by formula", "messages", "by formula")


def expected_ticks(schedule: Schedule) -> int:
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    return (3 if schedule.splits else 2) * m * V + (1 if schedule.splits else 2) * (p - 1)


def expected_messages(schedule: Schedule) -> int:
    """One message each way per micro-batch over every edge between parts that leaves a stage."""
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    return 2 * m * (p * V - 1 - (schedule.placement == "v"))


def counted(schedule: Schedule) -> list[str]:
    """Makes a row of the first table."""

    def number(value: Any) -> str:
        return "" if value is None else f"{value:.4g}"

    formula = expected_peak(schedule)
    return [
        schedule.name,
        *map(str, (schedule.stages, schedule.micro_batches)),
        *map(str, (schedule.ticks, expected_ticks(schedule))),
        number(bubble(schedule)),
        number(expected_bubble(schedule)),
        number(peak(schedule).max()),
        number(None if formula is None else formula.max()),
        *map(str, (messages(schedule), expected_messages(schedule))),
    ]


def schedules(sizes: Sequence[int] = (4, 8, 16), times: Sequence[int] = (1, 2, 4, 8)) -> str:
    """The first table."""
    rows = [
        counted(make_schedule(name, stages=p, micro_batches=p * more))
        for name in SCHEDULES
        for p in sizes
        for more in times
    ]
    return (
        f"{versions()}\n\nEvery operation takes one unit (a whole backward two, a chunk its "
        "share), sending takes none. Bubble: idle time between a stage's first and last "
        "operation over its work, the largest of all stages. Peak: of the stage that holds most; "
        f"no formula: not known for these sizes.\n\n{table([COUNTED, *rows])}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the costs of a pipeline's schedules: counted, compiled or timed."""
    parser = make_parser("python -m benchmarks.pipeline", main.__doc__ or "")
    parser.add_argument("--memory", action="store_true", help="memory as m grows, compiled")
    parser.add_argument("--time", action="store_true", help="time of a step, in one run")
    parser.add_argument("--gpu", action="store_true", help="compile the config for H200s")
    parser.add_argument("--waits", action="store_true", help="waits of a GPU's host, compiled")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each (default: 7)")
    parser.add_argument("--out", default="", help="Markdown file to append the tables to")
    config, options = parse(parser, argv)
    title, body = section(config, options)
    print(body)
    if options["out"]:
        append(Path(options["out"]), INTRODUCTION, f"## {title}\n\n{body}")
    return 0


def section(config: Config, options: Mapping[str, Any]) -> tuple[str, str]:
    """Makes the title and text that the options ask for.

    Raises:
        UserError: they ask for several, for no step, or for a config without a pipeline.
    """
    chosen = [name for name in ("memory", "time", "gpu", "waits") if options[name]]
    if len(chosen) > 1:
        raise UserError(f"--{' --'.join(chosen)}: each is a run of its own; use one of them")
    if options["steps"] < 1:
        raise UserError(f"--steps {options['steps']}: use 1 or more")
    if options["gpu"] and config.layout.pp == 1:
        raise UserError("--gpu: layout.pp=1 is no pipeline; use --config configs/gpt-145b.yaml")
    if options["gpu"]:
        jax.config.update("jax_platforms", "cpu")  # the steps are only compiled for GPUs
        body = pipeline_gpu.report(pipeline_gpu.variants(with_vocabulary(config)))
        return "Compiled for H200s: `--gpu --config FILE`", body
    if options["waits"]:
        jax.config.update("jax_platforms", "cpu")
        return "Waits of a GPU's host, compiled for H200s: `--waits`", pipeline_waits.report()
    if not chosen:
        return "Counted in tables: no option", schedules()
    devices = STAGES if options["memory"] else pipeline_time.DEVICES
    layout = Layout(pp=STAGES, dp=devices // STAGES)
    train = TrainConfig(global_batch_size=devices // STAGES, platform="cpu")
    prepare(Config(layout=layout, train=train))
    if options["memory"]:
        return "Memory, simulated devices: `--memory`", pipeline_memory.report()
    return "Time, simulated devices: `--time`", pipeline_time.report(options["steps"])


if __name__ == "__main__":
    run_command(main)
