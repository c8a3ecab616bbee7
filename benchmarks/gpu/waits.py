"""Times how long a GPU stands still where the host waits for it: a conditional, a trip of a loop.

`python -m benchmarks.gpu.waits [--out FILE]`. A pipeline's step has such waits, which
`jaxptd/analysis/hlo/timeline.py` counts. A chain of small products runs plainly, under a
conditional each, in a loop whose length is computed, and in loops of one trip, with CUDA graphs
and without. What a product then takes longer is the wait.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.lib.child import first_gpu
from benchmarks.lib.measure import append
from jaxptd.analysis.profiling import NAMED
from jaxptd.analysis.report import table, versions
from jaxptd.errors import Parser, run_command

LENGTH, REPEATS = 64, 30
HEAD = ("chain", "us a product, with CUDA graphs", "wait", "us a product, without", "wait")
INTRODUCTION = """# Waits of the host for a GPU

Made by `python -m benchmarks.gpu.waits`, whose head explains the figures.

"""


def work(x: Array) -> Array:
    """A product, and a kernel that scales it: some microseconds."""
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
    "a conditional each": conditional,
    "a loop of all": loop,
    "a loop of one trip each": one_trip_loops,
}


def seconds(way: Callable[[Array, Array], Array], options: dict[str, Any]) -> float:
    """The median seconds of a chain."""
    arguments = jnp.ones((1024, 1024), jnp.bfloat16), jnp.int32(LENGTH)
    run = jax.jit(way).lower(*arguments).compile(compiler_options=options)
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Times conditionals and loops on this machine's first GPU."""
    parser = Parser(prog="python -m benchmarks.gpu.waits", description=main.__doc__)
    parser.add_argument("--out", default="", help="Markdown file to append the table to")
    options = parser.parse_args(argv)
    device = first_gpu()
    rows: list[tuple[str, ...]] = [HEAD]
    plainly: list[float] = []
    for name, way in WAYS.items():
        times = [1e6 * seconds(way, each) / LENGTH for each in ({}, NAMED)]
        plainly = plainly or times
        pairs = zip(times, plainly, strict=True)
        cells = (f"{each:.1f}" for took, least in pairs for each in (took, took - least))
        rows.append((name, *cells))
        print("  ".join(rows[-1]), flush=True)
    if options.out:
        section = f"{device.device_kind}; {versions()}\n\n{table(rows)}\n"
        append(Path(options.out), INTRODUCTION, section)
    return 0


if __name__ == "__main__":
    run_command(main)
