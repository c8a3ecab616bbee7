"""Goals for speed at scale, and how far we are, in one table; no GPU is needed.

`python -m benchmarks.gpu.goals [--only 145B ...] [--out FILE]` compiles steps for H200s, and some
for simulated devices, in about ten minutes on two cores. Seconds are estimates (`estimate.py`);
bytes and counts are exact. Rows marked "timed" were measured on one H200 by `benchmarks.one_device`
and are read from `benchmarks/results/gpu.json`.
"""

import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.context.ring import Size, ours, start
from benchmarks.gpu import compiled, estimate
from benchmarks.gpu.waits import waits
from benchmarks.lib.compiler import PACKAGES, compile_only, on_h200s
from benchmarks.lib.pages import RESULTS, append, head, joined, parser, printed
from benchmarks.one_device import cases as one_device
from benchmarks.one_device.cases import mfu
from benchmarks.peers import step as peers
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hardware import BANDWIDTH, PEAK_FLOPS
from jaxptd.analysis.hlo.kernels import OTHER, kernels
from jaxptd.analysis.hlo.text import Pipeline
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config
from jaxptd.errors import run_command
from jaxptd.mesh import Layout, make_mesh
from jaxptd.parts.sizes import elements_on_device
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.statistics import EQUAL, expected_bubble, makespan
from jaxptd.run.devices import prepare

OURS = "jaxptd-triton"
TIMED = RESULTS / "gpu.json"
LARGE = 1_000_000  # elements; a matrix has more, a bias or norm fewer
HEAD = ("what", "goal", "reached", "")


class Figure(NamedTuple):
    """A figure, its goal (a maximum or a minimum), and the format of both."""

    value: float
    goal: float
    least: bool = False
    form: str = "{:.2f}"

    @property
    def reached(self) -> bool:
        return self.value >= self.goal if self.least else self.value <= self.goal


def share(value: float, goal: float, form: str = "{:.0%}") -> Figure:
    """A percentage that should be at least as large as its goal."""
    return Figure(value, goal, least=True, form=form)


def case(name: str) -> Config:
    """The config of a case of `compiled.py` or `estimate.py`."""
    every: Mapping[str, Any] = compiled.CASES | estimate.CASES
    return every[name].config


@functools.cache
def _estimated(name: str) -> estimate.Estimate:
    return estimate.measure(case(name))


@functools.cache
def _compiled(name: str) -> Mapping[str, float]:
    return compiled.measure(compiled.CASES[name])


def seconds_of_weights(config: Config) -> float:
    """Seconds spent casting or copying weights and adding up gradients, over all micro-batches.

    Counts kernels other than matmuls that run in loops and whose result has as many elements as one
    of a layer's matrices, or as all of a stage's.
    """
    program, layout = on_h200s(config), config.layout
    sizes = {
        elements
        for info in program.infos.values()
        if info.stack
        for whole in [elements_on_device(info, Layout(pp=layout.pp, tp=layout.tp))]
        for elements in (whole, whole // (info.stored_shape[0] // layout.pp))
        if elements >= LARGE
    }
    pipeline = Pipeline(layout.pp, program.resolved.trips)
    every = kernels(compile_step(program).as_text(), pipeline)
    moved = sum(
        kernel.bytes
        for kernel in every
        if kernel.kind == OTHER
        and kernel.count > 1
        and {math.prod(x.shape) for x in kernel.instruction.arrays} & sizes
    )
    return moved / BANDWIDTH


def temporary_memory() -> Iterator[float]:
    """Yields our step's temporary memory over the peer's, for each layout, scanned and unrolled."""
    same = {"optimizer": peers.OPTIMIZER, "train": peers.TRAIN}
    for scan, name in itertools.product((True, False), ("dp", "tp", "tp-sp", "dp-tp")):
        model = dataclasses.replace(peers.MODEL, scan_layers=scan)
        both = peers.Pair(Config(model, peers.LAYOUTS[name], **same)).programs
        sizes = [compile_step(each).memory_analysis().temp_size_in_bytes for each in both]
        yield sizes[0] / sizes[1]


def waiting_of_hops(stages: int = 4, micro_batches: int = 8) -> float:
    """The time of an interleaved step as run, divided by the formula's, which ignores hops."""
    sizes = {"stages": stages, "micro_batches": micro_batches, "virtual_stages": 2}
    schedule = make_schedule("interleaved", **sizes)
    bubble = expected_bubble(schedule)
    assert bubble is not None, f"{stages} stages do not divide {micro_batches} micro-batches"
    layers = {"blocks": (1,) * schedule.parts}
    return makespan(Plan(schedule, layers)) / ((1 + bubble) * micro_batches * sum(EQUAL))


def ring_memory() -> float:
    """MiB of temporary memory for attention over a ring of eight, in the worse token order."""
    mesh, arrays = make_mesh(Layout(cp=8)), Size(1, 2048, 4, 32).random()
    runs = [start(ours(kind, 512), mesh, arrays) for kind in ("zigzag", "blockwise")]
    return max(run.compiled.memory_analysis().temp_size_in_bytes for run in runs) / 2**20


def _hidden(name: str) -> Figure:
    return share(_estimated(name).times.hidden, 0.9)


def _median(name: str, trainer: str) -> float:
    """The measured seconds of a step, from `TIMED`."""
    return statistics.median(json.loads(TIMED.read_text())[name][trainer]["seconds"])


def _timed_mfu(name: str, goal: float) -> Figure:
    peak, seconds = PEAK_FLOPS["H200"], _median(name, OURS)
    return share(mfu(one_device.CASES[name], seconds, peak, causal=False), goal, "{:.1%}")


BIG, DOTS = "145b", "1.5b dots triton"
OF_DOTS = "1.5B, B=16, `dots`, loop, Triton kernels"
GOALS: dict[str, Callable[[], Figure]] = {
    "145B, 1,536 GPUs: step, s": lambda: Figure(_estimated(BIG).seconds, 5.9),
    "145B: MFU": lambda: share(_estimated(BIG).mfu(case(BIG)), 0.46, "{:.1%}"),
    "145B: weight casts and gradient sums, s": lambda: Figure(seconds_of_weights(case(BIG)), 0.35),
    "145B: peak, GiB": lambda: Figure(_estimated(BIG).peak / 2**30, 60, form="{:.1f}"),
    "145B: collectives hidden, share of their time": lambda: _hidden(BIG),
    "1.5B, dp=8, ZeRO 3, loop: hidden": lambda: _hidden("1.5b zero3"),
    "350M, dp=8, ZeRO 2, loop: hidden": lambda: _hidden("350m dp8"),
    "124M, B=32, Triton kernels: other kernels, ms": lambda: Figure(
        _compiled("124m triton")["others_ms"], 9
    ),
    "124M, B=32, cuBLASLt matmuls: peak, GiB": lambda: Figure(
        _compiled("124m cublas")["peak_gib"], 14
    ),
    f"{OF_DOTS}: other kernels, ms": lambda: Figure(_compiled(DOTS)["others_ms"], 65),
    f"{OF_DOTS}: peak, GiB": lambda: Figure(_compiled(DOTS)["peak_gib"], 45),
    "temporary memory over plain jit, worst of 8 layouts": lambda: Figure(
        max(temporary_memory()), 0.8
    ),
    "1f1b host waits per micro-batch, p=4, m=16": lambda: Figure(
        waits("1f1b", 4)[1] / 16, 4, form="{:.1f}"
    ),
    "interleaved as run over theory, p=4, m=8": lambda: Figure(waiting_of_hops(), 1.02),
    "ring attention, T=2048, P=8, chunk 512: temporary MiB": lambda: Figure(ring_memory(), 2.5),
    "124M, timed, Triton kernels: MFU": lambda: _timed_mfu("124m", 0.52),
    "1.5B, timed, Triton kernels: MFU": lambda: _timed_mfu("1.5b", 0.58),
    "2.5B, timed, Triton kernels: MFU": lambda: _timed_mfu("2.5b", 0.60),
    "124M, timed, Triton kernels: tokens per second over PyTorch's": lambda: share(
        _median("124m", "torch") / _median("124m", OURS), 1.15, "{:.4f}"
    ),
}


def row(name: str, found: Figure) -> list[str]:
    goal = f"at {'least' if found.least else 'most'} {found.form.format(found.goal)}"
    return [name, goal, found.form.format(found.value), "reached" if found.reached else "missed"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the goals for speed at scale next to what has been reached."""
    made = parser("gpu.goals", main)
    made.add_argument("--only", nargs="+", default=[""], help="goals whose name contains this")
    options = made.parse_args(argv)
    compile_only()
    prepare(Config(model=peers.MODEL, layout=peers.LAYOUTS["dp"], train=peers.TRAIN))
    chosen = [name for name in GOALS if any(word in name for word in options.only)]
    rows = printed(row(name, GOALS[name]()) for name in chosen)
    title = head("Goals for speed at scale", "gpu.goals")
    append(options.out, title, joined(versions(*PACKAGES), table([HEAD, *rows])))
    return 0


if __name__ == "__main__":
    run_command(main)
