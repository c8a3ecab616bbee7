"""One training step of jaxptd beside the peer's: time, temporary memory, bytes between devices.

`python -m benchmarks.peers.step [--layouts one dp ...] [--remat none dots ...] [--steps N] [--out
FILE]`

Both programs start from the same parameters and batch, and must give the same loss and gradient
norm for three steps, or nothing is measured. Then they are timed in one run, in turns (A B A B
...), because the speed of a shared machine drifts. The devices are simulated on the CPU, so times
compare the work of two programs and do not show how they scale. On a busy machine they mean
nothing: `--steps 0` leaves them out.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lib.measure import TOLERANCE, DifferentError, Run, compared, mib, ring_bytes, write
from benchmarks.peers.gspmd import Peer
from jaxptd.analysis.compiled_step import compile_step, random_batch
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from jaxptd.errors import Parser, run_command
from jaxptd.mesh import Layout, make_mesh
from jaxptd.run.devices import prepare
from jaxptd.step import Program

LAYOUTS = {
    "one": Layout(),
    "dp": Layout(dp=8),
    "tp": Layout(tp=8),
    "tp-sp": Layout(tp=8, sequence_parallel=True),
    "dp-tp": Layout(dp=2, tp=4),
    "dp-tp-sp": Layout(dp=2, tp=4, sequence_parallel=True),
}
MODEL = ModelConfig(num_layers=4, hidden_size=256, num_heads=8, seq_length=256, vocab_size=1024)
TRAIN = TrainConfig(global_batch_size=8, platform="cpu")
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=1)  # at its full rate from step 0
GOALS = {"time": 1.0, "temp": 0.8, "bytes": 1.0}


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A program's figures: seconds a step, if timed; temporary bytes; ring bytes."""

    median: float | None
    fastest: float | None
    temp: int
    ring: int
    ring_per_layer: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two programs of one config."""

    config: Config

    @property
    def programs(self) -> tuple[Program, Peer]:
        mesh = make_mesh(self.config.layout)
        return Program(self.config, mesh), Peer(self.config, mesh)

    @property
    def deeper(self) -> "Pair":
        """The same with one more layer."""
        model = self.config.model
        model = dataclasses.replace(model, num_layers=model.num_layers + 1)
        return Pair(dataclasses.replace(self.config, model=model))

    def start(self) -> tuple[Run, Run]:
        """Compiles both, and starts them from the same parameters and batch."""
        ours, peer = self.programs
        drawn = random_batch(self.config)
        drawn["targets"] = np.maximum(drawn["targets"], 0)  # the peer's loss is over every token
        batch = jax.device_put(drawn, ours.batches.shardings["tokens"])
        state = ours.init_state()
        host: Any = {name: np.asarray(p) for name, p in state["params"].items()}
        peers = peer.init_state(ours.resolved.blueprint.to_canonical(host))
        return Run(compile_step(ours), state, batch), Run(compile_step(peer), peers, batch)


def check_same(runs: Sequence[Run], steps: int = 3) -> None:
    """Runs both for some steps; the third is the first that depends on all of AdamW.

    Raises:
        DifferentError: loss or gradient norm differ by more than `TOLERANCE`.
    """
    for step in range(steps):
        ours, peers = (run.step() for run in runs)
        for name, value in ours.items():
            if not abs(value - peers[name]) <= TOLERANCE * abs(peers[name]):
                raise DifferentError(f"step {step}: {name} is {value}, the peer's {peers[name]}")


def measure(config: Config, steps: int) -> list[Numbers]:
    """Measures jaxptd and the peer, `steps` timed steps each, in turns."""
    pair = Pair(config)
    runs = pair.start()
    check_same(runs)
    for run in runs:
        run.seconds.clear()
    for _ in range(steps):
        for run in runs:
            run.step()
    return [
        _numbers(run, program, deeper)
        for run, program, deeper in zip(runs, pair.programs, pair.deeper.programs, strict=True)
    ]


def _numbers(run: Run, program: Any, deeper: Any) -> Numbers:
    ring = ring_bytes(run.compiled, program.mesh)
    more = ring_bytes(compile_step(deeper), deeper.mesh) if program.mesh.size > 1 else 0
    temp = run.compiled.memory_analysis().temp_size_in_bytes
    seconds = run.seconds
    median, fastest = (statistics.median(seconds), min(seconds)) if seconds else (None, None)
    return Numbers(median, fastest, temp, ring, more - ring)


HEAD: tuple[str, ...] = (
    "layout",
    "layers",
    "remat",
    "step, s: median",
    "fastest",
    "temporary, MiB",
)
HEAD += ("ring bytes a step, MiB", "ring bytes a layer, MiB")


def row(config: Config, ours: Numbers, peers: Numbers) -> list[str]:
    """Makes one line of the table, with `jaxptd / peer = ratio` in each cell."""

    def cell(name: str, form: Any) -> str:
        mine, theirs = getattr(ours, name), getattr(peers, name)
        return "not timed" if mine is None else compared(mine, theirs, form)

    def seconds(value: float) -> str:
        return f"{value:.3f}"

    layers = "scan" if config.model.scan_layers else "unrolled"
    return [
        str(config.layout),
        layers,
        config.model.remat,
        cell("median", seconds),
        cell("fastest", seconds),
        cell("temp", mib),
        cell("ring", mib),
        cell("ring_per_layer", mib),
    ]


def report(rows: Sequence[Sequence[str]], steps: int) -> str:
    """Makes the Markdown page."""
    model = (
        f"L={MODEL.num_layers}, D={MODEL.hidden_size}, {MODEL.num_heads} heads, "
        f"T={MODEL.seq_length}, B={TRAIN.global_batch_size}, V={MODEL.vocab_size}, float32"
    )
    return "\n".join(
        [
            "# A training step beside plain `jax.jit` with sharding rules",
            "",
            f"{versions('flax', 'optax')} 8 simulated CPU devices.",
            "",
            f"Model: {model}; AdamW, clipping. Each cell: jaxptd / peer = ratio. "
            f"Goals: time at most {GOALS['time']}x, temporary memory at most {GOALS['temp']}x, "
            f"bytes at most {GOALS['bytes']}x the peer's.",
            f"Times: {f'{steps} steps each, in turns' if steps else 'none, the machine was busy'}. "
            "Temporary memory: of one device's program. "
            "Ring bytes: those that each device sends. "
            "Both had the same loss and gradient norm to 1e-5 before they were measured.",
            "",
            table([HEAD, *rows]),
            "",
            "XLA on GPU and TPU replaces an all-reduce by a reduce-scatter if each device uses "
            "only one slice; XLA on CPU does not. The peer's are counted as reduce-scatters. Both "
            "are compiled without `cse_barrier_expander`, which on CPU would undo "
            "`jax.checkpoint`.",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures a training step of jaxptd and of plain jit with sharding rules, side by side."""
    parser = Parser(prog="python -m benchmarks.peers.step", description=main.__doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    remats = ("none", "dots", "attention", "full")
    parser.add_argument("--remat", nargs="+", choices=remats, default=["none"])
    ways = ("scan", "unrolled")
    parser.add_argument("--layers", nargs="+", choices=ways, default=["scan"], help="default: scan")
    parser.add_argument(
        "--steps", type=int, default=11, help="timed steps of each (default: 11); 0: no times"
    )
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args(argv)
    prepare(Config(model=MODEL, layout=LAYOUTS["dp"], train=TRAIN))
    rows = []
    for layers in args.layers:
        for remat in args.remat:
            model = dataclasses.replace(MODEL, remat=remat, scan_layers=layers == "scan")
            for name in args.layouts:
                config = Config(model, LAYOUTS[name], optimizer=OPTIMIZER, train=TRAIN)
                rows.append(row(config, *measure(config, args.steps)))
                print("  ".join(rows[-1]), flush=True)
    text = report(rows, args.steps)
    if args.out:
        write(args.out, text)
    return 0


if __name__ == "__main__":
    run_command(main)
