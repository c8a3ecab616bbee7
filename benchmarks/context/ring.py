"""Compares attention over a ring of devices with its peers: time, temporary memory, bytes, work.

`python -m benchmarks.context.ring [--devices 8 --length 2048 8192 --chunk 512 128 --steps 11 --out
FILE]`

Measures one causal attention with its gradients in float32: jaxptd's zigzag, blockwise and RSA,
compared with

- *gather*: k and v all-gathered, then `jax.nn.dot_product_attention(implementation="xla")`;
- *jit*: the same, left to XLA's partitioner through sharding constraints;
- *ringattention*: the authors' package of that name, with the program that it runs on a CPU.

Every program must give the output and gradients of plain softmax attention on one device, or
nothing is measured. Then all are timed in one run, alternating between them. The devices are
simulated on the CPU, so times compare work and do not show how it scales. The last table counts
matmuls device by device: on real devices the slowest determines the time of a step.

Letters: B batch, T query, S key, N heads, H head size.
Source: Liu et al., arXiv 2310.01889 (github.com/forhaoliu/ringattention 0.1.2); Li et al.,
arXiv 2105.13120 (RSA).
"""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from benchmarks.lib.compiler import axis_sizes
from benchmarks.lib.pages import joined, mib, parser, renew
from benchmarks.lib.timing import Program, Runner, collectives, race
from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.device_flops import work_per_device
from jaxptd.analysis.report import table, versions
from jaxptd.attention.attend import AttentionInputs, Ring
from jaxptd.attention.kernel import Dropout, Scores
from jaxptd.attention.xla import Xla
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.errors import UserError, run_command
from jaxptd.layers.dropout import keep_mask
from jaxptd.mesh import Layout, RingKind, make_mesh
from jaxptd.ring_attention import attend
from jaxptd.run.devices import prepare

CUT = P(None, "cp")  # of every array [B, T, N, H]: tokens are sharded over the ring
MOST_WORK = 1.02  # goal for zigzag: the slowest device's work over the mean
RINGATTENTION = "ringattention"
INSTALL = "not installed: `pip install --no-deps ringattention==0.1.2 einops`"

# ---- the programs ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Attention(Program):
    """One way to compute attention over the ring."""

    specs: Sequence[P] = (CUT,) * 3
    chunk: int | None = None  # most queries, and keys, in one matmul; None: no limit
    kind: RingKind = "blockwise"  # the order of tokens


def ours(kind: RingKind, chunk: int | None) -> Attention:
    """jaxptd's attention, with the kernel that multiplies matrices in chunks."""
    kernel = Xla(Dropout(0.0, keep_mask), chunk or 1)  # RSA does not use the kernel
    ring = Ring("cp", kind)

    def attention(q: Array, k: Array, v: Array) -> Array:
        scores = Scores(q.shape[-1] ** -0.5)
        return attend(q, k, v, AttentionInputs(), ring=ring, kernel=kernel, scores=scores)

    return Attention(f"jaxptd {kind}", attention, chunk=chunk, kind=kind, ours=True)


def gather() -> Attention:
    """The peer that gathers all keys and values onto every device."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        k, v = (lax.all_gather(x, "cp", axis=1, tiled=True) for x in (k, v))
        query_T = Ring("cp", "blockwise").positions(q.shape[1])
        seen_TS = query_T[:, None] >= jnp.arange(k.shape[1])
        return jax.nn.dot_product_attention(q, k, v, mask=seen_TS[None, None], implementation="xla")

    return Attention("gather", attention)


def partitioned(mesh: Mesh) -> Attention:
    """The peer of XLA's partitioner: queries and outputs are sharded, keys and values are not."""
    keep = partial(lax.with_sharding_constraint, shardings=NamedSharding(mesh, CUT))
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")

    def attention(q: Array, k: Array, v: Array) -> Array:
        k, v = (lax.with_sharding_constraint(x, NamedSharding(mesh, P())) for x in (k, v))
        return keep(attend(keep(q), k, v))

    return Attention("jit", attention, local=False)


def ringattention(chunk: int) -> Attention | None:
    """The peer of the package ringattention, or None if it is not installed."""
    module = _module()
    if module is None:
        return None

    def attention(q: Array, k: Array, v: Array) -> Array:
        size = min(chunk, q.shape[1])
        options = {
            "causal_block_size": 1,
            "deterministic": True,
            "dropout_rng": None,
            "attn_pdrop": 0.0,
            "query_chunk_size": size,
            "key_chunk_size": size,
            "dtype": jnp.float32,
            "policy": jax.checkpoint_policies.nothing_saveable,
            "precision": None,
            "prevent_cse": False,  # not needed inside a scan
        }
        return module.ring_attention(q, k, v, None, None, None, "cp", True, options)

    return Attention(RINGATTENTION, attention, chunk=chunk, typed=False)


def _module() -> ModuleType | None:
    """Imports only `ringattention.ringattention_jax`: the package needs a JAX older than 0.8."""
    package = importlib.util.find_spec(RINGATTENTION)
    if package is None or package.origin is None or not importlib.util.find_spec("einops"):
        return None
    path = Path(package.origin).with_name("ringattention_jax.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def programs(mesh: Mesh, chunks: Sequence[int]) -> Iterator[Attention]:
    """Yields all programs; those that take chunks, once for each chunk size."""
    for chunk in chunks:
        yield ours("zigzag", chunk)
        yield ours("blockwise", chunk)
    yield ours("rsa", None)
    yield gather()
    yield partitioned(mesh)
    yield from filter(None, map(ringattention, chunks))


# ---- measured -------------------------------------------------------------------------------


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
    """A program whose results have their tokens in the order of its ring."""

    program: Attention
    order: np.ndarray
    moved: str

    def laid_out(self, right: ArrayLike) -> np.ndarray:
        return np.asarray(right)[:, self.order]


@jax.jit
def plain(q: Array, k: Array, v: Array, do: Array) -> tuple[Array, ...]:
    """Computes o, dq, dk, dv of softmax attention as in the papers, one head at a time."""

    def head(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        def attention(q_BTH: Array, k_BSH: Array, v_BSH: Array) -> Array:
            s_BTS = jnp.einsum("BTH,BSH->BTS", q_BTH, k_BSH) * q_BTH.shape[-1] ** -0.5
            s_BTS = jnp.where(np.tri(s_BTS.shape[-1], dtype=bool), s_BTS, -jnp.inf)
            return jnp.einsum("BTS,BSH->BTH", jax.nn.softmax(s_BTS), v_BSH)

        o, backward = jax.vjp(attention, *arrays[:3])
        return o, *backward(arrays[3])

    results = lax.map(head, tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v, do)))
    return tuple(jnp.moveaxis(x, 0, 2) for x in results)


def start(program: Attention, mesh: Mesh, arrays: Sequence[np.ndarray]) -> Run:
    """Compiles the program and puts its arguments on the mesh, in the order of its ring."""
    order = Ring("cp", program.kind).order(arrays[0].shape[1], mesh.shape["cp"])
    laid = [jax.device_put(x[:, order], NamedSharding(mesh, CUT)) for x in arrays]
    compiled = program.gradients(mesh).lower(*laid).compile(compiler_options=CPU_OPTIONS)
    moved = ", ".join(
        f"{each.kind} {each.count} ({each.wire_bytes(axis_sizes(mesh)) / 2**20:.2f} MiB)"
        for each in (collectives(compiled, mesh) if program.local else ())
    )
    return Run(program, compiled, laid, order, moved)


def measure(size: Size, mesh: Mesh, *, chunks: Sequence[int], steps: int) -> list[Run]:
    """Checks every program, then times each `steps` times, alternating between them."""
    arrays = size.random()
    runs = [start(program, mesh, arrays) for program in programs(mesh, chunks)]
    race(runs, plain(*arrays), steps=steps)
    return runs


def balance(kind: RingKind, devices: int, length: int = 256) -> float:
    """FLOPs of the matmuls on the slowest device, divided by the mean over devices."""
    mesh = make_mesh(Layout(cp=devices))
    shape = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32, sharding=NamedSharding(mesh, CUT))
    traced = ours(kind, length).gradients(mesh).trace(*[shape] * 4)
    work = work_per_device(traced.jaxpr, mesh)
    return float(work.max() / work.mean())


# ---- reported -------------------------------------------------------------------------------

HEAD = ["program", "chunk", "temporary, MiB per device", "of the best peer's", "median, ms"]
HEAD += ["of the best peer's", "moved by a device", "largest error"]
WORK = ["devices", "zigzag", "blockwise: contiguous"]


def share(run: Run, runs: Sequence[Run], name: str) -> float | None:
    """One of our programs' `temp` or `median` over the best peer's, of any or of the same chunk."""
    peers = [each for each in runs if not each.program.ours]
    rivals = [each for each in peers if each.program.chunk in (run.program.chunk, None)]
    if not run.program.ours or not rivals:
        return None
    return getattr(run, name) / min(getattr(each, name) for each in rivals)


def row(run: Run, runs: Sequence[Run]) -> list[str]:
    found = [share(run, runs, name) for name in ("temp", "median")]
    temp, median = ("" if each is None else f"**{each:.2f}**" for each in found)
    name, chunk, time = run.program.name, str(run.program.chunk or ""), f"{run.median * 1e3:.0f}"
    return [name, chunk, mib(run.temp), temp, time, median, run.moved, f"{run.error:.0e}"]


def section(size: Size, runs: Sequence[Run]) -> str:
    rows = [row(run, runs) for run in runs]
    if not any(run.program.name == RINGATTENTION for run in runs):
        rows.append([RINGATTENTION, "", INSTALL, *[""] * (len(HEAD) - 3)])
    return f"## {size}\n\n{table([HEAD, *rows])}"


def work(devices: int) -> str:
    """Makes the table of work for 2, 4, ... up to `devices` devices."""
    counts = [n for n in (2, 4, 8, 16, 32, 64) if n <= devices]
    kinds: tuple[RingKind, ...] = ("zigzag", "blockwise")
    rows = [[n, *(f"{balance(kind, n):.3f}" for kind in kinds)] for n in counts]
    return f"## Work of the slowest device over the mean\n\n{table([WORK, *rows])}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compares ring attention with all-gathered attention and the package ringattention."""
    made = parser("context.ring", main)
    for name, default in (("devices", 8), ("batch", 1), ("heads", 4), ("head-size", 32)):
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--length", type=int, nargs="+", default=[2048, 8192])
    made.add_argument("--chunk", type=int, nargs="+", default=[512, 128])
    made.add_argument(
        "--steps", type=int, default=11, help="timed runs of each program (default: 11)"
    )
    args = made.parse_args(argv)
    chunks = 2 * args.devices
    if wrong := [length for length in args.length if length % chunks]:
        raise UserError(f"--length {wrong[0]} does not split into {chunks} chunks of a zigzag")
    model, layout = ModelConfig(seq_length=args.length[0]), Layout(cp=args.devices)
    prepare(Config(model=model, layout=layout, train=TrainConfig(platform="cpu")))
    sections = []
    for length in args.length:
        size = Size(args.batch, length, args.heads, args.head_size)
        runs = measure(size, make_mesh(layout), chunks=args.chunk, steps=args.steps)
        sections.append(section(size, runs))
        print(sections[-1], flush=True)
    sections.append(work(args.devices))
    print(sections[-1])
    if args.out:
        there = importlib.util.find_spec(RINGATTENTION)
        peer = f"{RINGATTENTION} {importlib.metadata.version(RINGATTENTION)}" if there else ""
        title = "# Ring attention compared with its peers"
        renew(Path(args.out), joined(title, f"{versions()} {peer}".strip(), *sections))
    return 0


if __name__ == "__main__":
    run_command(main)
