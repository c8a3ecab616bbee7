"""Attention of a sequence sharded over a ring of devices: time, temporary memory, bytes, work.

`python -m benchmarks.context.ring [--devices 8 --length 2048 8192 --chunk 512 128 --steps 11 --out
FILE]`

Measures one causal attention with its gradients, float32: jaxptd's zigzag, blockwise and RSA beside

- *gather*: k and v all-gathered, then `jax.nn.dot_product_attention(implementation="xla")`;
- *jit*: the same left to XLA's partitioner, by sharding constraints;
- *ringattention*: the authors' package of that name, the program that it runs on a CPU.

Every program must give the output and gradients of plain softmax attention on one device, or
nothing is measured. Then all are timed in one run, in turns. The devices are simulated on the CPU,
so times compare work and do not show how it scales. The last table counts products, device by
device: on real devices the slowest determines the time of a step.

Letters: B batch, T query, S key, H head size.
Source: Liu et al., arXiv 2310.01889 (github.com/forhaoliu/ringattention 0.1.2); Li et al.,
arXiv 2105.13120 (RSA).
"""

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from benchmarks.context.ring_programs import CUT, INSTALL, RINGATTENTION, Program, ours, programs
from benchmarks.lib.measure import TOLERANCE, collectives, mib, write
from benchmarks.lib.race import Runner, race
from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.device_flops import work_per_device
from jaxptd.analysis.report import table, versions
from jaxptd.attention.ring import Ring
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.mesh import Layout, RingKind, make_mesh
from jaxptd.run.devices import prepare

GOALS = {"temp": 1.0, "time": 0.9, "work": 1.02}


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of the arrays: batch, tokens, heads, head size."""

    batch: int
    length: int
    heads: int
    head_size: int

    def random(self) -> list[np.ndarray]:
        """Draws q, k, v and the gradient of the output."""
        rng, shape = np.random.default_rng(0), dataclasses.astuple(self)
        return [rng.standard_normal(shape, np.float32) for _ in range(4)]

    def __str__(self) -> str:
        return f"B={self.batch}, T={self.length}, {self.heads} heads of {self.head_size}"


@dataclasses.dataclass
class Run(Runner):
    """A program whose results have the tokens in the order of its ring."""

    order: np.ndarray
    moved: str

    def laid_out(self, right: ArrayLike) -> np.ndarray:
        return np.asarray(right)[:, self.order]


@jax.jit
def plain(q: Array, k: Array, v: Array, do: Array) -> tuple[Array, ...]:
    """Computes o, dq, dk, dv of softmax attention as papers write it, one head at a time."""

    def head(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        def attention(q_BTH: Array, k_BSH: Array, v_BSH: Array) -> Array:
            s_BTS = jnp.einsum("BTH,BSH->BTS", q_BTH, k_BSH) * q_BTH.shape[-1] ** -0.5
            s_BTS = jnp.where(np.tri(s_BTS.shape[-1], dtype=bool), s_BTS, -jnp.inf)
            return jnp.einsum("BTS,BSH->BTH", jax.nn.softmax(s_BTS), v_BSH)

        o, backward = jax.vjp(attention, *arrays[:3])
        return o, *backward(arrays[3])

    results = lax.map(head, tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v, do)))
    return tuple(jnp.moveaxis(x, 0, 2) for x in results)


def start(program: Program, mesh: Mesh, arrays: Sequence[np.ndarray]) -> Run:
    """Compiles the program and puts its arguments on the mesh, in the order of its ring."""
    order = Ring("cp", program.kind).order(arrays[0].shape[1], mesh.shape["cp"])
    laid = [jax.device_put(x[:, order], NamedSharding(mesh, CUT)) for x in arrays]
    compiled = program.gradients(mesh).lower(*laid).compile(compiler_options=CPU_OPTIONS)
    return Run(program, compiled, laid, order, moved(compiled, mesh))


def moved(compiled: Any, mesh: Mesh) -> str:
    """`collective-permute 20 (3.0 MiB), ...`: executions and bytes that each device sends."""
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    return ", ".join(
        f"{each.kind} {each.count} ({each.wire_bytes(sizes) / 2**20:.2f} MiB)"
        for each in collectives(compiled, mesh)
    )


def measure(size: Size, mesh: Mesh, *, chunks: Sequence[int], steps: int) -> list[Run]:
    """Checks every program, then times each `steps` times, in turns."""
    arrays = size.random()
    runs = [start(program, mesh, arrays) for program in programs(mesh, chunks)]
    race(runs, plain(*arrays), steps=steps)
    return runs


# ---- reported -------------------------------------------------------------------------------

HEAD = ["program", "chunk", "temporary, MiB a device", "of the best peer's", "median, ms"]
HEAD += ["of the best peer's", "moved by a device", "largest error"]


def rivals(run: Run, runs: Sequence[Run]) -> list[Run]:
    """The peers to compare with a program: those with the same chunk, and those without chunks."""
    peers = [each for each in runs if not each.program.ours]
    return [each for each in peers if each.program.chunk in (run.program.chunk, None)]


def share(run: Run, runs: Sequence[Run], name: str) -> float | None:
    """`temp` or `median` of one of our programs, divided by the least of its rivals'."""
    others = [getattr(each, name) for each in rivals(run, runs)]
    return getattr(run, name) / min(others) if run.program.ours and others else None


def row(run: Run, runs: Sequence[Run]) -> list[str]:
    """Makes one line of the table."""

    def ratio(name: str) -> str:
        found = share(run, runs, name)
        return "" if found is None else f"**{found:.2f}**"

    return [
        run.program.name,
        str(run.program.chunk or ""),
        mib(run.temp),
        ratio("temp"),
        f"{run.median * 1e3:.0f}",
        ratio("median"),
        run.moved,
        f"{run.error:.0e}",
    ]


def section(size: Size, runs: Sequence[Run]) -> str:
    """Makes the table of one length."""
    rows = [row(run, runs) for run in runs]
    if not any(run.program.name == RINGATTENTION for run in runs):
        rows.append([RINGATTENTION, "", INSTALL, *[""] * (len(HEAD) - 3)])
    return f"## {size}\n\n{table([HEAD, *rows])}\n"


def balance(kind: RingKind, devices: int, length: int) -> float:
    """FLOPs of the products on the slowest device, divided by the mean over devices."""
    mesh = make_mesh(Layout(cp=devices))
    shape = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32, sharding=NamedSharding(mesh, CUT))
    traced = ours(kind, length).gradients(mesh).trace(*[shape] * 4)
    work = work_per_device(traced.jaxpr, mesh)
    return float(work.max() / work.mean())


def balances(devices: int, length: int = 256) -> str:
    """Makes the table of work, for 2, 4, .. up to `devices` devices."""
    head = ["devices", "zigzag", "blockwise: contiguous"]
    counts = [n for n in (2, 4, 8, 16, 32, 64) if n <= devices]
    kinds: tuple[RingKind, ...] = ("zigzag", "blockwise")
    rows = [[n, *(f"{balance(kind, n, length):.3f}" for kind in kinds)] for n in counts]
    return table([head, *rows])


ABOUT = f"""\
Causal attention with the gradients of q, k and v, float32. Goals: zigzag and blockwise at most
{GOALS["temp"]}x the temporary memory and {GOALS["time"]}x the time of each peer at the same chunk;
work of the slowest device with zigzag at most {GOALS["work"]}x the mean.

- jaxptd: `Xla` kernel; RSA computes whole rows of scores.
- gather: k and v all-gathered, then `jax.nn.dot_product_attention(implementation="xla")`.
- jit: the same, by XLA's partitioner from sharding constraints.
- ringattention: 0.1.2 from PyPI, its JAX program, `causal_block_size=1`. Chunks are the same for
  queries and keys, and at most a device's tokens.

Every program was within {TOLERANCE:.0e} (relative, in norm) of plain softmax attention on one
device, output and gradients, before it was timed. Temporary memory is that of one device's program
with the scores of one product. Moved: executions, and bytes that each device sends in a ring.
"""


def report(sections: Sequence[str], work: str, *, devices: int, steps: int) -> str:
    """Makes the Markdown page."""
    try:
        peer = f"{RINGATTENTION} {importlib.metadata.version(RINGATTENTION)}"
    except importlib.metadata.PackageNotFoundError:
        peer = f"no {RINGATTENTION}"
    head = f"{versions()} {peer}; {devices} simulated CPU devices; {steps} runs each, interleaved."
    title = "# Attention over a ring beside its peers"
    blocks = [title, head, ABOUT, *sections, "## Work of the slowest device over the mean"]
    note = "FLOPs of products, counted device by device in the jaxpr, masked scores included."
    return "\n\n".join(block.strip() for block in [*blocks, note, work]) + "\n"


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line.

    Raises:
        UserError: a sequence does not split over the devices.
    """
    parser = Parser(prog="python -m benchmarks.context.ring", description=main.__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--length", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--chunk", type=int, nargs="+", default=[512, 128])
    parser.add_argument("--steps", type=int, default=11, help="timed runs of each (default: 11)")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args(argv)
    for length in args.length:
        if length % (2 * args.devices):
            chunks = 2 * args.devices
            raise UserError(f"--length {length} does not split into {chunks} chunks of a zigzag")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures ring attention beside all-gathered attention and the package ringattention."""
    args = options(argv)
    model, layout = ModelConfig(seq_length=args.length[0]), Layout(cp=args.devices)
    prepare(Config(model=model, layout=layout, train=TrainConfig(platform="cpu")))
    sections = []
    for length in args.length:
        size = Size(args.batch, length, args.heads, args.head_size)
        runs = measure(size, make_mesh(layout), chunks=args.chunk, steps=args.steps)
        sections.append(section(size, runs))
        print(sections[-1], flush=True)
    work = balances(args.devices)
    print(work)
    if args.out:
        write(args.out, report(sections, work, devices=args.devices, steps=args.steps))
    return 0


if __name__ == "__main__":
    run_command(main)
