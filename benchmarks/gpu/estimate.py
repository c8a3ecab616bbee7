"""Estimates the time of training steps from programs compiled for H200s; no GPU is needed.

`python -m benchmarks.gpu.estimate [--cases "145b" ...] [--out FILE]` prints a table of GPT steps,
estimated by `jaxptd.analysis.hlo.timeline`. The rates of an H200 were measured with `timed.py`:
710 TFLOP/s for matmuls, 3.4 TFLOP/s per element of a head for cuDNN's attention (218 for heads of
64), 3.0 TB/s for other kernels. Those of collectives have not been measured yet: 350 GB/s per GPU
inside a node of eight, 50 beyond it. Grouped matmuls of experts run at 70 % of the rate of other
matmuls, which is a goal and not measured either; experts are balanced. A pipeline's step is longer
by the time that its stages wait, including hops (`jaxptd.pipeline.statistics.makespan`). Nothing is
run, and what a real GPU adds (launches, latencies, kernels that slow each other down) is missing.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import compiled
from benchmarks.gpu.compiled import EXPERTS, MEDIUM, XL, Case, Packaged
from benchmarks.lib.compiler import PACKAGES, axis_sizes, compile_only, on_h200s
from benchmarks.lib.pages import append, head, joined, parser, printed
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hardware import PEAK_FLOPS
from jaxptd.analysis.hlo.kernels import ATTENTION, OTHER, PRODUCT
from jaxptd.analysis.hlo.text import Pipeline
from jaxptd.analysis.hlo.timeline import AxisNames, Rates, Times, estimate
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config
from jaxptd.errors import run_command
from jaxptd.mesh import Layout
from jaxptd.models.families import architecture_of, sizes_of
from jaxptd.parts.moe import MoEShape
from jaxptd.pipeline.statistics import Durations, makespan

PRODUCTS = 710e12  # FLOP/s; these four from steps on an H200, `benchmarks/results/timed.md`
PRODUCTS_8_BITS = 1350e12
ATTENTION_RATE = 3.4e12  # FLOP/s per element of a head
GROUPED = 0.7 * PRODUCTS  # of experts: a goal, not measured yet
KERNELS = 3.0e12  # bytes per second, other kernels
NODE, INSIDE, BEYOND = 8, 350e9, 50e9  # GPUs; bytes per second that each sends
_PLAIN = "--data.source=none --layout.tp=8 --layout.dp=24 --layout.collective_matmul=false"
_PLAIN += " --layout.zero=0 --layout.schedule=1f1b --model.remat=full --train.micro_batches=96"
_ZBV = "--data.source=none"
_LOOPED = "--data.source=none --model.remat=dots --layout.schedule=interleaved"
_SUMS = "--data.source=none --layout.tp=1 --layout.sequence_parallel=false --layout.zero=1"
_SUMS += " --train.micro_batches=4"
_WIDE = "--layout.pp=1 --layout.tp=1 --layout.sequence_parallel=false --model.scan_layers=true"
_WIDE += " --layout.collective_matmul=false --model.remat=full --train.global_batch_size=256"
_EIGHT_NODES = "--layout.ep=1 --layout.zero=3 --train.micro_batches=4"
_SPLIT = "--layout.replica_state=split"
_HSDP = {
    "llama3-70b zero3 64": Packaged("llama3-70b", f"{_WIDE} {_EIGHT_NODES} --layout.dp=64"),
    "llama3-70b zero3 2 x 32": Packaged(
        "llama3-70b", f"{_WIDE} {_EIGHT_NODES} --layout.replicas=2 --layout.dp=32"
    ),
    "llama3-70b zero3 2 x 32 split": Packaged(
        "llama3-70b", f"{_WIDE} {_EIGHT_NODES} --layout.replicas=2 --layout.dp=32 {_SPLIT}"
    ),
    "qwen3-30b-a3b zero3 64": Packaged("qwen3-30b-a3b", f"{_EIGHT_NODES} --layout.dp=64"),
    "qwen3-30b-a3b zero3 8 x 8": Packaged(
        "qwen3-30b-a3b", f"{_EIGHT_NODES} --layout.replicas=8 --layout.dp=8"
    ),
    "qwen3-30b-a3b zero3 8 x 8 split": Packaged(
        "qwen3-30b-a3b", f"{_EIGHT_NODES} --layout.replicas=8 --layout.dp=8 {_SPLIT}"
    ),
}
CASES: dict[str, Case | Packaged] = {
    **_HSDP,
    "145b": Packaged("gpt-145b", _ZBV),
    "145b 1f1b, full": Packaged("gpt-145b", _PLAIN),
    "145b 1f1b, full, zero 1": Packaged("gpt-145b", f"{_PLAIN} --layout.zero=1"),
    "145b two sequences": Packaged("gpt-145b", f"{_ZBV} --train.micro_batches=48"),
    "145b tp4": Packaged("gpt-145b", f"{_ZBV} --layout.tp=4 --layout.dp=48"),
    "145b interleaved": Packaged("gpt-145b", f"{_LOOPED} --layout.virtual_stages=5"),
    "350m dp8 zero0": Case(MEDIUM, 64, Layout(dp=8), "dots"),
    "350m dp8 zero1": Case(MEDIUM, 64, Layout(dp=8, zero=1), "dots"),
    "350m dp8": Case(MEDIUM, 64, Layout(dp=8, zero=2), "dots"),
    "350m dp8 unrolled": Case(MEDIUM, 64, Layout(dp=8, zero=2), "dots", scan=False),
    "1.5b zero1": Packaged("gpt2-1.5b", f"{_SUMS} --layout.dp=8 --train.global_batch_size=256"),
    "1.5b zero1 dp16": Packaged(
        "gpt2-1.5b", f"{_SUMS} --layout.dp=16 --train.global_batch_size=512"
    ),
    "1.5b zero3": Case(XL, 64, Layout(dp=8, zero=3), "full"),
    **{name: compiled.CASES[name] for name in EXPERTS},
    "1.5b zero3 unrolled": Case(XL, 64, Layout(dp=8, zero=3), "full", scan=False),
}
HEAD = ("case", "layout", "B", "remat, layers", "matmuls, attention s", "others s", "sent s")
HEAD += ("hidden", "pipeline", "step s", "MFU", "peak GiB")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated step of a config: a device's times, the pipeline's waits, peak memory."""

    times: Times
    pipeline: float
    parameters: int  # that a token passes through
    peak: int

    @property
    def seconds(self) -> float:
        return self.times.total * self.pipeline

    def mfu(self, config: Config) -> float:
        """6 FLOPs for each parameter that a token passes through, as a share of the GPUs' peak."""
        tokens = config.train.global_batch_size * config.model.seq_length
        rate = 6 * self.parameters * tokens / self.seconds / config.layout.num_devices
        return rate / PEAK_FLOPS["H200"]


def rates(sizes: dict[str, int], filled: float = 1.0) -> Rates:
    """The rates of an H200, whose nodes hold neighbours along the last axes of the mesh.

    filled: share of the experts' matmul rows that are in use; tiles without rows end at once.
    """

    def link(axes: AxisNames) -> tuple[str, float]:
        order = list(sizes)
        first = min((order.index(axis) for axis in axes), default=len(order))
        span = math.prod(sizes[axis] for axis in order[first:])
        return ("NVLink", INSIDE) if span <= NODE else ("network", BEYOND)

    return Rates(PRODUCTS, PRODUCTS_8_BITS, ATTENTION_RATE, KERNELS, link, GROUPED / filled)


def measure(config: Config) -> Estimate:
    """Compiles a config's step and estimates its time."""
    program, stages = on_h200s(config), config.layout.pp
    compiled, sizes = compile_step(program), axis_sizes(program.mesh)
    pipeline = Pipeline(stages, program.resolved.trips)
    return Estimate(
        estimate(compiled.as_text(), rates(sizes, filled_rows(config)), sizes, pipeline),
        waiting(program) if stages > 1 else 1.0,
        sum(math.prod(info.shape) for info in program.infos.values()) - idle_parameters(config),
        compiled.memory_analysis().peak_memory_in_bytes,
    )


def filled_rows(config: Config) -> float:
    """The share of a chunk's rows that balanced experts fill."""
    parts = [part for stack in architecture_of(config.model).stacks for part in stack.parts]
    experts = next((part for part in parts if isinstance(part, MoEShape)), None)
    if experts is None:
        return 1.0
    layout, tokens = config.layout, sizes_of(config).tokens
    rows = experts.rows(tokens, layout)[1]
    at_once = tokens // layout.tp if layout.collective_matmul else tokens * layout.ep
    return at_once * experts.chosen / layout.expert_devices / rows


def idle_parameters(config: Config) -> int:
    """Elements of the experts that a token does not pass through."""
    moe, stacks = config.model.moe, architecture_of(config.model).stacks
    if moe is None:
        return 0
    experts = sum(stack.layers * stack.expert_weights for stack in stacks)
    return experts * (moe.num_experts - moe.top_k) // moe.num_experts


def waiting(program: Any) -> float:
    """The time of a pipeline's step, divided by the time that a stage works."""
    plan, again = program.resolved.plan, program.config.model.remat == "full"
    durations = Durations(1.0, 1.0 + again, 1.0)
    return makespan(plan, durations) / (plan.schedule.micro_batches * sum(durations))


def cells(times: Times) -> list[str]:
    """Seconds of matmuls and attention, of other kernels, of collectives, and what is hidden."""
    return [
        f"{times.kernels[PRODUCT] + times.kernels[ATTENTION]:.3f}",
        f"{times.kernels[OTHER]:.3f}",
        f"{sum(times.sent.values()):.3f}",
        f"{times.hidden:.0%}",
    ]


def row(name: str, config: Config, found: Estimate) -> list[str]:
    train, model = config.train, config.model
    pieces = f" in {train.micro_batches}" if train.micro_batches > 1 else ""
    return [
        name,
        str(config.layout),
        f"{train.global_batch_size}{pieces}",
        f"`{model.remat}`, {'loop' if model.scan_layers else 'unrolled'}",
        *cells(found.times),
        f"{found.pipeline:.3f}",
        *(f"{found.seconds:.3f}", f"{found.mfu(config):.1%}", f"{found.peak / 2**30:.1f}"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Estimates the time of training steps from programs compiled for H200s."""
    made = parser("gpu.estimate", main)
    made.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    options = made.parse_args(argv)
    compile_only()
    configs = {name: CASES[name].config for name in options.cases}
    rows = printed(row(name, config, measure(config)) for name, config in configs.items())
    title = head("Training step times, estimated from compiled programs", "gpu.estimate")
    append(options.out, title, joined(versions(*PACKAGES), table([HEAD, *rows])))
    return 0


if __name__ == "__main__":
    run_command(main)
