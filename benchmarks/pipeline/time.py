"""A step of one model and batch in several layouts, timed; and bubbles, from a layer's times.

Makes the output of `python -m benchmarks.pipeline --time`.
"""

import os
from collections.abc import Sequence

from benchmarks.lib.measure import TOLERANCE, mib
from benchmarks.lib.race import race
from benchmarks.pipeline.layer import calls, durations
from benchmarks.pipeline.programs import (
    MODEL,
    PEER,
    SEQUENCES,
    STAGES,
    Named,
    Step,
    program_of,
    start,
    words,
)
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, TrainConfig
from jaxptd.mesh import SCHEDULES, Layout
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.statistics import Durations, makespan, simulate
from jaxptd.pipeline.table import Schedule

DEVICES, MICRO_BATCHES = 8, 8
RACED = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", PEER)
TIMES: tuple[str, ...] = (
    "layout",
    "program",
    "micro-batches",
    "median, ms",
    "of dp's",
    "fastest, ms",
)
TIMES += ("temporary, MiB a device", "largest error")
SIMULATED: tuple[str, ...] = (
    "schedule",
    "m",
    "makespan, ms",
    "where neighbours wait, ms",
    "of a step without idle time",
    "bubble",
)
SIMULATED += ("by formula", "formula")
FORMULAS: dict[str, tuple[str, ...]] = {
    "gpipe": ("(p-1)/m",),
    "1f1b": ("(p-1)/m",),
    "interleaved": ("(p-1)/(mV)",),
    "zb-h1": ("(p-1)(F+B-W)", "(p-1)(F+B-2W)"),
    "zb-h2": ("(p-1)(F+B-2W)",),
}


# ---- in one run -----------------------------------------------------------------------------


def programs() -> list[Named]:
    """Lists data parallelism, then every pipeline, all with one global batch."""
    dp = DEVICES // STAGES
    found = [Named("dp", program_of("dp", "none", MICRO_BATCHES // STAGES, Layout(dp=DEVICES)))]
    for name in RACED:
        layout = Layout(pp=STAGES, dp=dp, schedule="gpipe" if name == PEER else name)
        found.append(Named(name, program_of(name, "none", MICRO_BATCHES, layout)))
    return found


def raced(steps: int) -> list[Step]:
    """Compares every program with one device, then times each `steps` times, in turns."""
    one = program_of("one", "none", MICRO_BATCHES * DEVICES // STAGES, Layout())
    expected = start(Named("one", one)).step()
    runs = [start(named) for named in programs()]
    race(runs, expected, steps=steps)
    return runs


def row(run: Step, dp: Step) -> list[str]:
    """Makes a line of the first table."""
    config = run.program.program.config
    sizes = (f"{axis}={size}" for axis, size in config.layout.sizes.items() if size > 1)
    return [
        " ".join(sizes),
        run.program.name,
        str(config.train.micro_batches),
        f"{run.median * 1e3:.0f}",
        f"{run.median / dp.median:.2f}",
        f"{min(run.seconds) * 1e3:.0f}",
        mib(run.temp),
        f"{run.error:.0e}",
    ]


# ---- from a layer's times -------------------------------------------------------------------


def by_formula(schedule: Schedule, name: str, stage: Durations) -> float:
    """The bubble of a stage by formula, divided by its work."""
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    F, B, W = stage
    idle = {"(p-1)(F+B-W)": F + B - W, "(p-1)(F+B-2W)": F + B - 2 * W}
    return (p - 1) / (m * V) * (idle[name] / (F + B + W) if name in idle else 1)


def simulated(layer: Durations, backward: float, times: Sequence[int] = (2, 4)) -> list[list[str]]:
    """Makes the second table's rows; layer, backward: seconds of one layer, halves and whole."""
    rows, layers = [], MODEL.num_layers // STAGES
    split = Durations(*(layers * 1e3 * each for each in layer))
    whole = Durations(split.F, layers * 1e3 * backward / 2, layers * 1e3 * backward / 2)
    for m in (STAGES * n for n in times):
        for name in SCHEDULES:
            schedule = make_schedule(name, stages=STAGES, micro_batches=m)
            stage = split if schedule.splits else whole
            found, names = simulate(schedule, stage), FORMULAS.get(name, ())
            waiting = makespan(Plan(schedule, {"blocks": (1,) * schedule.parts}), stage)
            formulas = [f"{by_formula(schedule, each, stage):.3f}" for each in names]
            cells = [
                name,
                str(m),
                f"{found.makespan:.1f}",
                f"{waiting:.1f}",
                f"{found.makespan / (m * sum(stage)):.3f}",
            ]
            rows.append([*cells, f"{found.bubble:.3f}", "; ".join(formulas), "; ".join(names)])
    return rows


# ---- reported -------------------------------------------------------------------------------


def report(steps: int) -> str:
    """Both tables."""
    load = os.getloadavg()[0]
    runs = raced(steps)
    train = TrainConfig(global_batch_size=SEQUENCES, platform="cpu")
    layer, backward = durations(calls(Config(model=MODEL, train=train)), runs=3 * steps)
    F, B, W = (each * 1e3 for each in layer)
    return (
        f"{versions()} {DEVICES} simulated devices. Load of "
        f"the machine before, without this: {load:.1f}.\n\n{words()} One global batch of "
        f"{MICRO_BATCHES * SEQUENCES * DEVICES // STAGES} for all. Every program was within "
        f"{TOLERANCE:.0e} (relative, in norm) of one device, loss and gradients, before it was "
        f"timed; then {steps} steps each, interleaved. The devices share the machine's cores, so "
        "these times compare the work of the programs, copies and waiting, and have no bubble: a "
        "stage that idles leaves its core to another.\n\n"
        f"{table([TIMES, *(row(run, runs[0]) for run in runs)])}\n\n"
        f"A layer and micro-batch by itself, median of {3 * steps}, ms: F {F:.2f}, B {B:.2f}, "
        f"W {W:.2f}; backward that is not split {backward * 1e3:.2f}. A stage that has cores of "
        f"its own, p={STAGES}, {MODEL.num_layers // STAGES} layers a stage, embedding, head and "
        "sending left out: simulated, with each operation as soon as its input is there, and as in "
        "the executor, where stages that exchange something wait for each other. Bubble: of a "
        "stage, over its work; formulas too, those in F, B and W over m(F+B+W). Of the two beside "
        "zb-h1 its source (arXiv 2401.10241, section 2) has the first for it, the second for "
        "zb-h2; they hold where W takes no longer than F and B.\n\n"
        f"{table([SIMULATED, *simulated(layer, backward)])}\n"
    )
