"""Compares a pair of matmuls on a grid with 1D and peers: time, memory, bytes, messages.

`python -m benchmarks.grid.summa2d [--devices 4 8 --size 4096x256x1024 1024x1024x1024 --out FILE]`

Measures y = (x w1) w2, an MLP without its nonlinearity, and the gradients of x, w1 and w2 in
float32, with every algorithm of a row x col grid, compared with

- *Megatron*: w1 sharded by columns, w2 by rows, tokens sharded between pairs (sequence
  parallelism);
- *autodiff*: blocks all-gathered on the grid, backward by autodiff;
- *jit*: every operand and result sharded both ways, the rest left to XLA's partitioner.

Every program must give the result of one device, or nothing is measured. Then all are timed in one
run, alternating between them. The devices are simulated on the CPU, so times compare work, copies
and waiting, and do not show how they scale.

Letters: M tokens, D model, F hidden.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.lib.compiler import axis_sizes
from benchmarks.lib.pages import joined, mib, parser, renew
from benchmarks.lib.timing import Program, Runner, collectives, race
from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, TrainConfig
from jaxptd.errors import UserError, run_command
from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.layers.tensor_parallel import PackedWeight
from jaxptd.mesh import SQUARE, Layout, Matmul2D, make_mesh
from jaxptd.run.devices import prepare

SLICES = (1, 2, 4)  # of gather


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a pair: tokens, model, hidden."""

    M: int
    D: int
    F: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of x, w1, w2 and the gradient of y."""
        return [(1, self.M, self.D), (self.D, self.F), (self.F, self.D), (1, self.M, self.D)]

    def random(self) -> list[np.ndarray]:
        """Draws standard normal arrays; w1 and w2 are scaled so that h and y are too."""
        rng, lengths = np.random.default_rng(0), (1, self.D, self.F, 1)
        return [
            rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(length))
            for shape, length in zip(self.shapes, lengths, strict=True)
        ]

    def __str__(self) -> str:
        return f"M={self.M}, D={self.D}, F={self.F}"


@jax.jit
def plain(x: Array, w1: Array, w2: Array, dy: Array) -> tuple[Array, ...]:
    """Computes y, dx, dw1, dw2 on one device."""
    y, backward = jax.vjp(lambda x, w1, w2: (x @ w1) @ w2, x, w1, w2)
    return y, *backward(dy)


# ---- the programs ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair(Program):
    """One way to compute x[1, M, D] w1[D, F] w2[F, D] -> y[1, M, D] in a layout."""

    layout: Layout = dataclasses.field(kw_only=True)

    def kept(self, mesh: Mesh, arrays: Sequence[Any]) -> int:
        """Bytes of the residuals of `jax.vjp` on a device, between forward and backward."""

        def residuals(*blocks: Array) -> list[Array]:
            return jax.tree.leaves(jax.vjp(self.function, *blocks)[1])

        if self.local:
            blocks = jax.shard_map(
                lambda *x: [leaf.ravel() for leaf in residuals(*x)],
                mesh=mesh,
                in_specs=tuple(self.specs),
                out_specs=P(mesh.axis_names),  # the blocks of all devices, one after the other
            )
            found = jax.eval_shape(blocks, *arrays)
            return sum(x.size * x.dtype.itemsize for x in found) // mesh.size
        lowered = jax.jit(residuals, in_shardings=tuple(self.shardings(mesh))).lower(*arrays)
        laid = zip(lowered.out_info, lowered.compile().output_shardings, strict=True)
        return sum(math.prod(lay.shard_shape(x.shape)) * x.dtype.itemsize for x, lay in laid)


def form(name: str, layout: Layout, *, ours: bool, again: bool = False) -> Pair:
    """The pair in one of jaxptd's forms; again: backward gathers the first input again."""
    held = make_tensor_parallel(layout)

    def first(x: Array, w1: Array) -> Array:
        (h,) = held.column_parallel(x, [PackedWeight(w1)])
        return h

    column = jax.checkpoint(first) if again else first

    def products(x: Array, w1: Array, w2: Array) -> Array:
        return held.row_parallel(column(x, w1), w2, 0)

    x = P(None, held.axes.tokens, *held.axes.hidden_spec())
    specs = x, P(*held.axes.column_spec(1, 0)), P(*held.axes.row_spec(1, 0))
    return Pair(name, products, specs, layout=layout, ours=ours)


def grid(algorithm: Matmul2D, rows: int, cols: int, slices: int = 1) -> Pair:
    """jaxptd's pair on a grid, with everything in blocks."""
    layout = Layout(row=rows, col=cols, matmul2d=algorithm, matmul2d_slices=slices)
    cut = f" in {slices} slices" if slices > 1 else ""
    return form(f"jaxptd {algorithm}{cut}", layout, ours=True)


X_CUT, W_CUT = P(None, "row", "col"), P("row", "col")


def gathered(rows: int, cols: int) -> Pair:
    """The peer that gathers all blocks, and leaves backward to autodiff."""

    def product(a: Array, b: Array) -> Array:
        a = lax.all_gather(a, "col", axis=a.ndim - 1, tiled=True)
        return a @ lax.all_gather(b, "row", axis=0, tiled=True)

    def products(x: Array, w1: Array, w2: Array) -> Array:
        return product(product(x, w1), w2)

    layout = Layout(row=rows, col=cols)
    return Pair("autodiff", products, (X_CUT, W_CUT, W_CUT), layout=layout)


def partitioned(mesh: Mesh) -> Pair:
    """The peer of XLA's partitioner: every operand and result is sharded both ways."""
    keep = partial(lax.with_sharding_constraint, shardings=NamedSharding(mesh, X_CUT))

    def products(x: Array, w1: Array, w2: Array) -> Array:
        w1, w2 = (lax.with_sharding_constraint(w, NamedSharding(mesh, W_CUT)) for w in (w1, w2))
        h = keep(jnp.einsum("BMD,DF->BMF", keep(x), w1))
        return keep(jnp.einsum("BMF,FD->BMD", h, w2))

    layout = Layout(row=mesh.shape["row"], col=mesh.shape["col"])
    return Pair("jit", products, (X_CUT, W_CUT, W_CUT), layout=layout, local=False)


def grids(devices: int) -> list[tuple[int, int]]:
    """Rows and columns of the grids that are square or twice as long as wide."""
    sides = [(rows, devices // rows) for rows in range(2, devices) if devices % rows == 0]
    return [(rows, cols) for rows, cols in sides if rows <= 2 * cols and cols <= 2 * rows]


def programs(devices: int) -> Iterator[Pair]:
    """Yields all programs for this number of devices."""
    for rows, cols in grids(devices):
        for slices in SLICES:
            yield grid("gather", rows, cols, slices)
        yield grid("summa", rows, cols)
        for algorithm in SQUARE if rows == cols else ():
            yield grid(algorithm, rows, cols)
        yield gathered(rows, cols)
        yield partitioned(make_mesh(Layout(row=rows, col=cols)))
    line = Layout(tp=devices, sequence_parallel=True)
    yield form("Megatron", line, ours=False)
    yield form("Megatron, gathering again", line, ours=False, again=True)


# ---- measured -------------------------------------------------------------------------------


@dataclasses.dataclass
class Run(Runner):
    """A program; kept: bytes that a device saves for backward; wire: bytes sent, by axes."""

    program: Pair
    kept: int = 0
    wire: dict[str, int] = dataclasses.field(default_factory=dict)
    messages: int = 0


def start(program: Pair, mesh: Mesh, arrays: Sequence[np.ndarray]) -> Run:
    """Compiles the program and shards its arguments over the mesh."""
    shardings = program.shardings(mesh)
    laid = [jax.device_put(*each) for each in zip(arrays, (*shardings, shardings[0]), strict=True)]
    lowered = program.gradients(mesh, apart=True).lower(*laid)
    compiled = lowered.compile(compiler_options=CPU_OPTIONS)
    run = Run(program, compiled, laid, program.kept(mesh, laid[:3]))
    for each in collectives(compiled, mesh) if program.local else ():
        axes = "x".join(each.axes)
        run.wire[axes] = run.wire.get(axes, 0) + each.wire_bytes(axis_sizes(mesh))
        run.messages += each.count
    return run


def measure(size: Size, devices: int, *, steps: int) -> list[Run]:
    """Checks every program, then times each `steps` times, alternating between them."""
    arrays = size.random()
    runs = [start(each, make_mesh(each.layout), arrays) for each in programs(devices)]
    race(runs, plain(*arrays), steps=steps)
    return runs


# ---- reported -------------------------------------------------------------------------------

HEAD = ["program", "grid", "median, ms", "of the fastest peer's", "temporary, MiB per device"]
HEAD += ["saved for backward, MiB", "sent by a device, MiB", "messages", "largest error"]


def share(run: Run, runs: Sequence[Run]) -> float:
    """The median of a program, divided by that of the fastest peer."""
    return run.median / min(each.median for each in runs if not each.program.ours)


def row(run: Run, runs: Sequence[Run]) -> list[str]:
    layout, ratio = run.program.layout, f"{share(run, runs):.2f}"
    sent = " + ".join(f"{axes} {size / 2**20:.2f}" for axes, size in sorted(run.wire.items()))
    return [
        run.program.name,
        f"tp={layout.tp}" if layout.tp > 1 else f"{layout.row} x {layout.col}",
        f"{run.median * 1e3:.0f}",
        f"**{ratio}**" if run.program.ours else ratio,
        mib(run.temp),
        mib(run.kept),
        f"{sent} = {sum(run.wire.values()) / 2**20:.2f}" if sent else "",
        str(run.messages or ""),
        f"{run.error:.0e}",
    ]


def parse_size(text: str) -> Size:
    """`MxDxF`."""
    try:
        M, D, F = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not MxDxF") from error
    return Size(M, D, F)


def check(devices: int, sizes: Sequence[Size]) -> None:
    """Raises UserError if the devices form no grid, or a size does not split over them."""
    if not grids(devices):
        raise UserError(f"--devices {devices} makes no grid, square or 1:2; use 4, 8 or 16")
    unit = devices * max(SLICES)
    for size in sizes:
        if any(each < 1 or each % unit for each in dataclasses.astuple(size)):
            raise UserError(
                f"--size {size} does not split over {devices} devices in {max(SLICES)} "
                f"slices; use multiples of {unit}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Compares a pair of matmuls on grids of devices with Megatron's and XLA's."""
    made = parser("grid.summa2d", main)
    made.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    sizes = [Size(4096, 256, 1024), Size(1024, 1024, 1024)]
    made.add_argument("--size", type=parse_size, nargs="+", default=sizes, help="MxDxF")
    made.add_argument(
        "--steps", type=int, default=7, help="timed runs of each program (default: 7)"
    )
    args = made.parse_args(argv)
    for devices in args.devices:
        check(devices, args.size)
    rows, cols = grids(max(args.devices))[0]
    prepare(Config(layout=Layout(row=rows, col=cols), train=TrainConfig(platform="cpu")))
    sections = []
    for size in args.size:
        for devices in args.devices:
            runs = measure(size, devices, steps=args.steps)
            lines = table([HEAD, *(row(run, runs) for run in runs)])
            sections.append(f"## {devices} devices, {size}\n\n{lines}")
            print(sections[-1], flush=True)
    if args.out:
        title = "# A pair of matmuls on a grid, compared with its peers"
        renew(Path(args.out), joined(title, versions(), *sections))
    return 0


if __name__ == "__main__":
    run_command(main)
