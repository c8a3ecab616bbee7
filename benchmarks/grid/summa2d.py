"""A pair of products on a grid of devices: time, memory, bytes, messages, beside 1D and the peers.

`python -m benchmarks.grid.summa2d [--devices 4 8 --size 4096x256x1024 1024x1024x1024 --out FILE]`

Measures y = (x w1) w2, an MLP without its nonlinearity, and the gradients of x, w1 and w2, float32,
with every algorithm of a row x col grid beside

- *Megatron*: w1 sharded by columns, w2 by rows, tokens sharded between pairs (sequence
  parallelism);
- *autodiff*: blocks all-gathered on the grid, backward by autodiff;
- *jit*: every operand and result sharded both ways, the rest left to XLA's partitioner.

Every program must give the result of one device, or nothing is measured. Then all are timed in one
run, in turns. The devices are simulated on the CPU, so times compare work, copies and waiting, and
do not show how they scale. `--gpu` adds the time of a pair in bfloat16 on one GPU.

Letters: M tokens, D model, F hidden.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.grid.summa2d_programs import SLICES, Program, Size, grids, plain, programs
from benchmarks.lib.measure import TOLERANCE, collectives, mib, write
from benchmarks.lib.race import Runner, race
from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.hardware import peak_of
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, TrainConfig
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.mesh import Layout, make_mesh
from jaxptd.run.devices import prepare


@dataclasses.dataclass
class Run(Runner):
    """A program; kept: bytes for backward on a device; wire: bytes sent, by axes."""

    kept: int = 0
    wire: dict[str, int] = dataclasses.field(default_factory=dict)
    messages: int = 0


def start(program: Program, mesh: Mesh, arrays: Sequence[np.ndarray]) -> Run:
    """Compiles the program and shards its arguments over the mesh."""
    shardings = program.shardings(mesh)
    laid = [jax.device_put(*each) for each in zip(arrays, (*shardings, shardings[0]), strict=True)]
    compiled = program.gradients(mesh).lower(*laid).compile(compiler_options=CPU_OPTIONS)
    run = Run(program, compiled, laid, program.kept(mesh, laid[:3]))
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    for each in collectives(compiled, mesh):
        axes = "x".join(each.axes)
        run.wire[axes] = run.wire.get(axes, 0) + each.wire_bytes(sizes)
        run.messages += each.count
    return run


def measure(size: Size, devices: int, *, steps: int) -> list[Run]:
    """Checks every program, then times each `steps` times, in turns."""
    arrays = size.random()
    runs = [start(each, make_mesh(each.layout), arrays) for each in programs(devices)]
    race(runs, plain(*arrays), steps=steps)
    return runs


# ---- one GPU --------------------------------------------------------------------------------

GPU_SIZES = (Size(65536, 2048, 8192), Size(8192, 8192, 8192))


def floor(sizes: Sequence[Size] = GPU_SIZES, *, steps: int = 11, gpu: bool = True) -> str:
    """Times a pair in bfloat16 on this process's first device, and reports it as text.

    With `gpu`, only a GPU is measured.
    """
    device = jax.devices()[0]
    if gpu and device.platform != "gpu":
        return f"No GPU here (JAX finds {device.device_kind}): no floor in bfloat16."
    peak = peak_of(device.device_kind)
    rows = [["M", "D", "F", "median, ms", "TFLOP/s", "of the peak"]]
    for size in sizes:
        seconds = _alone(size, device, steps)
        rate = size.flops / seconds
        share = f"{rate / peak:.2f}" if peak else ""
        sizes_MDF = map(str, dataclasses.astuple(size))
        rows.append([*sizes_MDF, f"{seconds * 1e3:.2f}", f"{rate / 1e12:.1f}", share])
    return f"One {device.device_kind}, forward and backward, nothing moved.\n\n{table(rows)}"


def _alone(size: Size, device: Any, steps: int) -> float:
    """The median seconds of a pair, forward and backward, in bfloat16."""
    arrays = [jax.device_put(jnp.ones(shape, jnp.bfloat16), device) for shape in size.shapes]
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        jax.block_until_ready(plain(*arrays))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first one compiled


def floor_apart() -> str:
    """Runs `floor` in a process of its own, because this process simulates its devices."""
    apart = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, apart) as process:
        return process.submit(floor).result()


# ---- reported -------------------------------------------------------------------------------

HEAD = ["program", "grid", "median, ms", "of the fastest peer's", "temporary, MiB a device"]
HEAD += ["kept for backward, MiB", "sent by a device, MiB", "messages", "largest error"]


def share(run: Run, runs: Sequence[Run]) -> float:
    """The median of a program, divided by that of the fastest peer."""
    return run.median / min(each.median for each in runs if not each.program.ours)


def row(run: Run, runs: Sequence[Run]) -> list[str]:
    """Makes one line of the table."""
    layout, ratio = run.program.layout, f"{share(run, runs):.2f}"
    sent = " + ".join(f"{axes} {size / 2**20:.2f}" for axes, size in sorted(run.wire.items()))
    return [
        run.program.name,
        f"tp={layout.tp}" if layout.tp > 1 else f"{layout.row} x {layout.col}",
        f"{run.median * 1e3:.0f}",
        f"**{ratio}**" if run.program.ours else ratio,
        mib(run.temp),
        mib(run.kept),
        f"{sent} = {sum(run.wire.values()) / 2**20:.2f}",
        str(run.messages),
        f"{run.error:.0e}",
    ]


def section(size: Size, devices: int, runs: Sequence[Run]) -> str:
    """Makes the table of one size on so many devices."""
    title = f"## {devices} devices, {size}"
    return f"{title}\n\n{table([HEAD, *(row(run, runs) for run in runs)])}"


ABOUT = f"""\
By `python -m benchmarks.grid.summa2d`: y = (x w1) w2 and the gradients of x[M, D], w1[D, F] and
w2[F, D], float32.

- jaxptd: x, w1, w2, h = x w1 and y in blocks on the grid; backward moves the blocks again.
- autodiff: the blocks all-gathered, then a local product; backward is JAX's.
- jit: the same blocks by sharding constraints, with XLA's partitioner.
- Megatron: w1 sharded by columns, w2 by rows, x and y by tokens (sequence parallelism), by jaxptd;
  the gathered x is kept, or gathered again in backward.

Every program was within {TOLERANCE:.0e} (relative, in norm) of one device, product and gradients,
before it was timed. Temporary memory is that of one device's program, with h and the blocks that
arrive, without operands and results. Kept for backward: the residuals of `jax.vjp`, at least the
device's blocks of x (D wide), h, w1 and w2. Sent: if every collective runs as a ring. On CPUs a
broadcast and a sum for one device are all-reduces; on GPUs summa's broadcasts are XLA's, which send
half as much. Messages: collectives in the jaxpr; XLA merges some.
"""


def report(sections: Sequence[str], *, devices: Sequence[int], steps: int) -> str:
    """The Markdown page."""
    simulated = " and ".join(map(str, devices))
    head = f"{versions()} {simulated} simulated CPU devices; {steps} runs each, interleaved."
    title = "# A pair of products on a grid beside its peers"
    return "\n\n".join(block.strip() for block in [title, head, ABOUT, *sections]) + "\n"


def parse_size(text: str) -> Size:
    """`MxDxF`."""
    try:
        M, D, F = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not MxDxF") from error
    return Size(M, D, F)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line.

    Raises:
        UserError: the number of devices forms no grid, or a size does not split over them.
    """
    parser = Parser(prog="python -m benchmarks.grid.summa2d", description=main.__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    sizes = [Size(4096, 256, 1024), Size(1024, 1024, 1024)]
    parser.add_argument("--size", type=parse_size, nargs="+", default=sizes, help="MxDxF")
    parser.add_argument("--steps", type=int, default=7, help="timed runs of each (default: 7)")
    parser.add_argument("--gpu", action="store_true", help="also a pair on one GPU, in bfloat16")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args(argv)
    for devices in args.devices:
        if not grids(devices):
            raise UserError(f"--devices {devices} makes no grid, square or 1:2; use 4, 8 or 16")
        unit = devices * max(SLICES)
        for size in args.size:
            if any(each < 1 or each % unit for each in dataclasses.astuple(size)):
                raise UserError(
                    f"--size {size} does not split over {devices} devices in {max(SLICES)} "
                    f"slices; use multiples of {unit}"
                )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures a pair of products on grids of devices beside Megatron's and XLA's."""
    args = options(argv)
    sections = [f"## One GPU, bfloat16\n\n{floor_apart()}"] if args.gpu else []
    rows, cols = grids(max(args.devices))[0]
    layout = Layout(row=rows, col=cols)
    prepare(Config(layout=layout, train=TrainConfig(platform="cpu")))
    for size in args.size:
        for devices in args.devices:
            runs = measure(size, devices, steps=args.steps)
            sections.append(section(size, devices, runs))
            print(sections[-1], flush=True)
    if args.gpu:
        print(sections[0])
    if args.out:
        write(args.out, report(sections, devices=args.devices, steps=args.steps))
    return 0


if __name__ == "__main__":
    run_command(main)
