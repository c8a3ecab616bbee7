"""Memory of each device under data, ZeRO, tensor and 2D tensor parallelism: the paper's table 1.

`python -m benchmarks.grid [--out FILE]`
`python -m benchmarks.grid --gpu --config configs/gpt2-2.5b.yaml [--compiler a=b --out FILE]`

The first command compiles a small GPT in float32 for simulated CPU devices. It reads a device's
blocks of parameters, gradients and optimizer state from the compiled program, and the residual
stream and the values that a layer saves for backward from the jaxpr. Every figure is divided by
that of one device with as many sequences as each device has under data parallelism.
The second command compiles a config's step for H200s that need not be there: see `gpu.py`.

Letters: B batch, T position, D model, N heads. The paper's letters: D data, P parameters,
G gradients, A optimizer, M activations, N devices.
Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, tables 1 and 2.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import jax
from jax.sharding import Sharding

from benchmarks.grid import gpu as grid_gpu
from benchmarks.lib.compiler import QUICK, compile_only, compiler_options
from benchmarks.lib.pages import append, head, joined, parser
from jaxptd.analysis.jaxprs import scans
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import parse
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.mesh import Layout, Matmul2D, make_mesh
from jaxptd.run.devices import prepare
from jaxptd.step import Program

DEVICES, SEQUENCES = 4, 8
# No other loop of the step runs 6 or 7 times, so the loop over layers is found by its length.
MODEL = ModelConfig(num_layers=7, hidden_size=64, num_heads=8, seq_length=32, vocab_size=128)

PAPER = {
    "DP": ("D", "P", "G", "A", "M"),
    "TP": ("D", "P/N", "G/N", "A/N", "M"),
    "TP2D": ("D/N", "P/N", "G/N", "A/N", "M/N"),
    "ZeRO": ("D/N", "2P/N", "G/N", "A/N", "M/N"),
}
LAYOUTS: tuple[tuple[str, Layout], ...] = (
    ("DP", Layout(dp=4)),
    ("ZeRO", Layout(dp=4, zero=3)),
    ("TP", Layout(tp=4)),
    ("TP", Layout(tp=4, sequence_parallel=True, keep_gathered=True)),
    *(("TP2D", Layout(row=2, col=2, matmul2d=each)) for each in get_args(Matmul2D)),
)
HEAD = ("N=4", "data", "parameters", "gradients", "optimizer", "activations", "token ids")
KEPT_HEAD = ("", "B T D", "times the number of shards, over one device", "without statistics")
KEPT_HEAD += ("shapes saved per layer",)

# ---- one program ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes on each device."""

    data: int  # the residual stream that enters a layer
    weights: dict[str, int]  # each parameter, by its name
    gradients: int  # all together, after their reduction
    optimizer: int
    ids: int  # of tokens
    kept: tuple[tuple[int, ...], ...]  # shapes of the arrays that a layer saves for backward

    @property
    def activations(self) -> int:
        return 4 * sum(map(math.prod, self.kept))

    @property
    def statistics(self) -> int:
        """Bytes of LayerNorm's statistics: two for each token and norm, `[B, T, 1]`."""
        return 4 * sum(math.prod(shape) for shape in self.kept if shape[2:] == (1,))

    @property
    def figures(self) -> tuple[int, ...]:
        """The figures in the order of the paper's table."""
        parameters = sum(self.weights.values())
        return (self.data, parameters, self.gradients, self.optimizer, self.activations)


def held(layout: Layout, model: ModelConfig = MODEL) -> Held:
    """Compiles a layout's step in float32 and reads what each device holds."""
    train = TrainConfig(global_batch_size=SEQUENCES * layout.dp, platform="cpu")
    config = Config(model=model, layout=layout, train=train)
    program: Any = Program(config, make_mesh(layout))
    arguments = program.abstract_state, program.abstract_batch
    step = program.step_with_gradients
    compiled = step.lower(*arguments).compile(compiler_options=QUICK)
    (state, batch), (whole, tokens) = compiled.input_shardings[0], arguments
    layers = _layers(step.trace(*arguments).jaxpr.jaxpr, model.num_layers)
    return Held(
        4 * math.prod(next(_results(layers, stacked=False))),
        {name: _on_each(x, state["params"][name]) for name, x in whole["params"].items()},
        _on_each(whole["params"], compiled.output_shardings[2]),
        _on_each(whole["optimizer"], state["optimizer"]),
        _on_each(tokens["tokens"], batch["tokens"]),
        tuple(_results(layers, stacked=True)),
    )


def _on_each(arrays: Any, shardings: Any) -> int:
    """Bytes on each device of arrays with these shardings, without scalars such as counters."""

    def block(x: Any, sharding: Sharding) -> int:
        return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize if x.ndim else 0

    return sum(jax.tree.leaves(jax.tree.map(block, arrays, shardings)))


def _layers(jaxpr: Any, layers: int) -> Any:
    """Finds the forward loop over layers; with ZeRO 3 the last layer runs after it."""
    return next(scan for scan in scans(jaxpr) if scan.params["length"] in (layers - 1, layers))


def _results(scan: Any, *, stacked: bool) -> Iterator[tuple[int, ...]]:
    """Shapes of a loop's results on a device: those stacked over iterations, or those carried."""
    for every, one in zip(scan.outvars, scan.params["jaxpr"].out_avals, strict=True):
        if (every.aval.shape != one.shape) == stacked:
            yield one.shape


# ---- the tables -----------------------------------------------------------------------------


def shares(layout: Layout, one: Held, here: Held) -> list[str]:
    """A row of the first table: fractions of one device's bytes, with the paper's entries."""
    named = next(named for named, each in LAYOUTS if each == layout)
    figures = zip(here.figures, one.figures, PAPER[named], strict=True)
    cells = [f"{ours / whole:.3f} ({entry})" for ours, whole, entry in figures]
    return [f"{named}: {layout}", *cells, f"{here.ids / one.ids:.3f}"]


def more_than_nth(one: Held, here: Held) -> str:
    """Lists the parameters of which a device holds more than 1/N, as `1/2 of NAME, ...`."""
    share = {name: one.weights[name] // here.weights[name] for name in one.weights}
    return ", ".join(f"1/{share[name]} of {name}" for name in share if share[name] < DEVICES)


def activations(layout: Layout, one: Held, here: Held) -> list[str]:
    """A row of the second table: what a layer saves, with and without LayerNorm's statistics."""
    shapes = collections.Counter(here.kept)
    rest = (here.activations - here.statistics) / (one.activations - one.statistics)
    return [
        str(layout),
        f"{here.activations / (4 * SEQUENCES * MODEL.seq_length * MODEL.hidden_size):.3f}",
        f"{here.activations / one.activations * layout.num_devices / layout.dp:.4f}",
        f"{rest * layout.num_devices / layout.dp:.4f}",
        ", ".join(f"{n} {list(shape)}" for shape, n in sorted(shapes.items())),
    ]


def on_cpus() -> str:
    """Makes both tables from programs compiled for simulated devices."""
    one, found = held(Layout()), {layout: held(layout) for _, layout in LAYOUTS}
    more = "\n".join(
        f"- {layout}: {more_than_nth(one, found[layout])}."
        for layout in (Layout(tp=4), Layout(row=2, col=2))
    )
    kept = {Layout(): one, **found}
    return joined(
        versions(),
        table([HEAD, *(shares(a, one, b) for a, b in found.items())]),
        f"Parameters that are not sharded over all N devices:\n\n{more}",
        "Activations that a layer saves for backward on each device (`remat: none`):",
        table([KEPT_HEAD, *(activations(a, one, b) for a, b in kept.items())]),
    )


def prepare_devices() -> None:
    """Simulates the devices that the tables need."""
    train = TrainConfig(global_batch_size=DEVICES, platform="cpu")
    prepare(Config(layout=Layout(dp=DEVICES), train=train))


def main(argv: Sequence[str] | None = None) -> int:
    """Shows what each device of a grid holds, on simulated devices or compiled for H200s."""
    made = parser("grid", main, config=True)
    made.add_argument("--gpu", action="store_true", help="compile the config for H200s")
    made.add_argument("--compiler", nargs="+", default=[], help="XLA's options, name=value")
    config, options = parse(made, argv)
    if options["gpu"]:
        compile_only()
        title = f"Compiled for H200s, remat {config.model.remat}"
        body = grid_gpu.report(with_vocabulary(config), compiler_options(options["compiler"]))
    else:
        prepare_devices()
        title, body = "Simulated devices", on_cpus()
    print(body)
    append(options["out"], head("Memory on a grid", "grid"), f"## {title}\n\n{body}")
    return 0


if __name__ == "__main__":
    run_command(main)
