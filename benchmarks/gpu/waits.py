"""Times how long a GPU idles when the host waits for it, in conditionals and loop iterations.

`python -m benchmarks.gpu.waits [--out FILE]`. The steps of pipelines contain such waits, which
`jaxptd/analysis/hlo/timeline.py` counts. A chain of small matmuls runs plainly, with a conditional
around each, in one loop whose length is computed, and in loops of one iteration, each with and
without CUDA graphs. The extra time per matmul is the wait. `python -m benchmarks.gpu.waits
--compiled [--out FILE]` needs no GPU: it counts the waits in pipeline steps compiled for H200s, as
a mean over the stages.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.lib.compiler import PACKAGES, compile_only, on_h200s
from benchmarks.lib.pages import append, head, joined, parser, printed
from benchmarks.lib.timing import first_gpu
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hlo.text import Pipeline
from jaxptd.analysis.hlo.timeline import host_waits
from jaxptd.analysis.profiling import NAMED
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.errors import run_command
from jaxptd.mesh import Layout

LENGTH, REPEATS = 64, 30
HEAD = ("chain", "us per matmul, with CUDA graphs", "wait", "us per matmul, without", "wait")


def work(x: Array) -> Array:
    """A matmul and a kernel that scales its result: a few microseconds."""
    return lax.optimization_barrier(x @ x * 1e-3 + 1.0)


def plain(x: Array, number: Array) -> Array:
    for _ in range(LENGTH):
        x = work(x)
    return x


def conditional(x: Array, number: Array) -> Array:
    for i in range(LENGTH):
        x = lax.cond(number > i, work, lambda x: x, x)
    return x


def loop(x: Array, number: Array) -> Array:
    return lax.while_loop(lambda c: c[0] < number, lambda c: (c[0] + 1, work(c[1])), (0, x))[1]


def one_trip_loops(x: Array, number: Array) -> Array:
    first = jnp.minimum(number - LENGTH, 0)  # 0, which XLA does not know
    for _ in range(LENGTH):
        x = lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, work(c[1])), (first, x))[1]
    return x


WAYS: dict[str, Callable[[Array, Array], Array]] = {
    "plain": plain,
    "one conditional per matmul": conditional,
    "one loop over all": loop,
    "one loop of one iteration per matmul": one_trip_loops,
}


def seconds(way: Callable[[Array, Array], Array], options: dict[str, Any]) -> float:
    arguments = jnp.ones((1024, 1024), jnp.bfloat16), jnp.int32(LENGTH)
    run = jax.jit(way).lower(*arguments).compile(compiler_options=options)
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def rows() -> Iterator[tuple[str, ...]]:
    """Times each chain with and without CUDA graphs, and compares it with the plain one."""
    plainly: list[float] = []
    for name, way in WAYS.items():
        times = [1e6 * seconds(way, each) / LENGTH for each in ({}, NAMED)]
        plainly = plainly or times
        pairs = zip(times, plainly, strict=True)
        cells = (f"{each:.1f}" for took, least in pairs for each in (took, took - least))
        yield (name, *cells)


# ---- counted in compiled steps ------------------------------------------------------------------

SCHEDULES, STAGES = ("1f1b", "interleaved", "zb-h1", "zb-v"), (4, 8)
MODEL = ModelConfig(hidden_size=128, num_heads=4, seq_length=64, vocab_size=640)
MICRO_BATCHES = 16
COUNTED = ("schedule", "p", "m", "ticks", "waits of a step", "of a micro-batch", "of a tick")


def waits(schedule: str, stages: int) -> tuple[int, float]:
    """(ticks, the host's waits in them and in the rest of the step), as means over stages."""
    train = TrainConfig(global_batch_size=MICRO_BATCHES, micro_batches=MICRO_BATCHES)
    model = dataclasses.replace(MODEL, num_layers=2 * stages)
    program = on_h200s(Config(model, Layout(pp=stages, schedule=schedule), train=train))
    text, plan = compile_step(program).as_text(), program.resolved.plan
    return plan.schedule.ticks, host_waits(text, Pipeline(stages, plan.trips))


def counted() -> Iterator[list[str]]:
    for schedule, stages in itertools.product(SCHEDULES, STAGES):
        ticks, found = waits(schedule, stages)
        each = f"{found:.0f}", f"{found / MICRO_BATCHES:.1f}", f"{found / ticks:.1f}"
        yield [schedule, *map(str, (stages, MICRO_BATCHES, ticks)), *each]


def main(argv: Sequence[str] | None = None) -> int:
    """Times waits on this machine's first GPU, or counts those in compiled pipelines."""
    made = parser("gpu.waits", main)
    made.add_argument(
        "--compiled", action="store_true", help="count waits in compiled steps; no GPU is needed"
    )
    options = made.parse_args(argv)
    if options.compiled:
        compile_only()
        text = joined(versions(*PACKAGES[2:]), table([COUNTED, *printed(counted())]))
    else:
        device = first_gpu().device_kind
        text = joined(f"{device}; {versions()}", table([HEAD, *printed(rows())]))
    append(options.out, head("How long a GPU idles when its host waits", "gpu.waits"), text)
    return 0


if __name__ == "__main__":
    run_command(main)
