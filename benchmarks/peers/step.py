"""Compares a training step of jaxptd with the peer's: time and temporary memory.

`python -m benchmarks.peers.step [--layouts one dp ...] [--layers scan unrolled] [--steps N]
[--out FILE]`

Both programs start from the same parameters and batch, and must give the same loss and gradient
norm for three steps, or nothing is measured. Then they are timed in one run, alternately (A B A B
...), because the speed of a shared machine drifts. The devices are simulated on the CPU, so times
compare the work of two programs and do not show how they scale. On a busy machine they are
meaningless: `--steps 0` skips them.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.lib.pages import head, joined, mib, parser, printed, renew
from benchmarks.lib.timing import TOLERANCE, DifferentError, Run
from benchmarks.peers.gspmd import Peer
from jaxptd.analysis.compiled_step import compile_step, random_batch
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from jaxptd.errors import run_command
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
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=1)  # full rate from step 0 on


class Numbers(NamedTuple):
    """A program's figures: seconds per step, if timed, and temporary bytes."""

    median: float | None
    fastest: float | None
    temp: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two programs of one config."""

    config: Config

    @property
    def programs(self) -> tuple[Program, Peer]:
        mesh = make_mesh(self.config.layout)
        return Program(self.config, mesh), Peer(self.config, mesh)

    def start(self) -> tuple[Run, Run]:
        """Compiles both programs and starts them from the same parameters and batch."""
        ours, peer = self.programs
        drawn = random_batch(self.config)
        drawn["targets"] = np.maximum(drawn["targets"], 0)  # the peer's loss is over every token
        batch = jax.device_put(drawn, ours.batches.shardings["tokens"])
        state = ours.init_state()
        host: Any = {name: np.asarray(p) for name, p in state["params"].items()}
        peers = peer.init_state(ours.resolved.blueprint.to_canonical(host))
        return Run(compile_step(ours), state, batch), Run(compile_step(peer), peers, batch)


def check_same(runs: Sequence[Run], steps: int = 3) -> None:
    """Runs both for a few steps; the third is the first that depends on all of AdamW.

    Raises:
        DifferentError: losses or gradient norms differ by more than `TOLERANCE`.
    """
    for step in range(steps):
        ours, peers = (run.step() for run in runs)
        for name, value in ours.items():
            if not abs(value - peers[name]) <= TOLERANCE * abs(peers[name]):
                raise DifferentError(f"step {step}: {name} is {value}, the peer's {peers[name]}")


def measure(config: Config, steps: int) -> list[Numbers]:
    """Measures jaxptd and the peer alternately, with `steps` timed steps each."""
    runs = Pair(config).start()
    check_same(runs)
    for run in runs:
        run.seconds.clear()
    for _ in range(steps):
        for run in runs:
            run.step()
    return [
        Numbers(
            statistics.median(run.seconds) if steps else None,
            min(run.seconds, default=None),
            run.compiled.memory_analysis().temp_size_in_bytes,
        )
        for run in runs
    ]


HEAD = ("layout", "layers", "remat", "step, s: median", "fastest", "temporary, MiB")


def row(config: Config, ours: Numbers, peers: Numbers) -> list[str]:
    """Makes one row of the table, with `jaxptd / peer = ratio` in each cell."""

    def cell(name: str, form: Callable[[float], str]) -> str:
        mine, theirs = getattr(ours, name), getattr(peers, name)
        timed = mine is not None
        return f"{form(mine)} / {form(theirs)} = **{mine / theirs:.2f}**" if timed else "not timed"

    cells = cell("median", "{:.3f}".format), cell("fastest", "{:.3f}".format), cell("temp", mib)
    layers = "scan" if config.model.scan_layers else "unrolled"
    return [str(config.layout), layers, config.model.remat, *cells]


def main(argv: Sequence[str] | None = None) -> int:
    """Compares a training step of jaxptd with one of plain jit with sharding rules."""
    made = parser("peers.step", main)
    made.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    ways = ("scan", "unrolled")
    made.add_argument("--layers", nargs="+", choices=ways, default=["scan"], help="default: scan")
    words = "timed steps of each program (default: 11); 0 skips timing"
    made.add_argument("--steps", type=int, default=11, help=words)
    args = made.parse_args(argv)
    prepare(Config(model=MODEL, layout=LAYOUTS["dp"], train=TRAIN))

    def rows() -> Iterator[list[str]]:
        for layers, name in itertools.product(args.layers, args.layouts):
            model = dataclasses.replace(MODEL, scan_layers=layers == "scan")
            config = Config(model, LAYOUTS[name], optimizer=OPTIMIZER, train=TRAIN)
            yield row(config, *measure(config, args.steps))

    found = table([HEAD, *printed(rows())])
    if args.out:
        title = head(
            "A training step, compared with plain `jax.jit` with sharding rules", "peers.step"
        )
        renew(Path(args.out), title + joined(versions("flax", "optax"), found))
    return 0


if __name__ == "__main__":
    run_command(main)
