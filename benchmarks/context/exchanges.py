"""Ways to share one sequence among 64 H200s in 8 nodes, by Llama 3 8B: predicted, and compiled.

`python -m benchmarks.context.exchanges [--lengths 131072 1048576] [--out FILE]` compiles a step of
one sequence for each way and length, and estimates its time as `benchmarks/gpu/estimate.py` does;
no GPU is needed, and nothing is run. *Predicted* is what `jaxptd plan` says before compiling. MFU
counts six FLOPs per token and weight, and the scores of all tokens (`Architecture.flops`).
`benchmarks/gpu/compile_gpu.py` says what compiling needs.
"""

import dataclasses
from collections.abc import Sequence

from benchmarks.gpu.estimate import cells, measure
from benchmarks.lib.compiler import PACKAGES, compile_only
from benchmarks.lib.pages import append, head, joined, parser, printed
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import load_config
from jaxptd.config import Config
from jaxptd.errors import run_command
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.layout import Layout
from jaxptd.models.families import architecture_of
from jaxptd.planner.steps.step import predict

EXCHANGES = {
    "a ring over all devices": Layout(cp=64, zero=3),
    "gathered keys and values": Layout(cp=64, ring="gather", zero=3),
    "Ulysses in a node, a ring between nodes": Layout(cp=8, ulysses=8, zero=3),
    "Ulysses over four nodes": Layout(cp=2, ulysses=32, zero=3),
}
H200 = Cluster(find_accelerator("h200"))
HEAD = ("way", "layout", "T", "matmuls, attention s", "others s", "sent s", "hidden", "step s")
HEAD += ("MFU", "predicted", "peak GiB")


def config_of(layout: Layout, length: int) -> Config:
    """A step of one sequence, whose layers are computed again in backward."""
    base = load_config("llama3-8b")
    model = dataclasses.replace(base.model, seq_length=length, remat="full", scan_layers=True)
    train = dataclasses.replace(base.train, global_batch_size=1, micro_batches=1)
    return dataclasses.replace(base, model=model, layout=layout, train=train)


def mfu(config: Config, seconds: float) -> float:
    """Share of the GPUs' peak."""
    flops = architecture_of(config.model).flops / config.layout.num_devices
    return flops / seconds / H200.accelerator.bf16_flops


def row(name: str, layout: Layout, length: int) -> list[str]:
    config = config_of(layout, length)
    found, predicted = measure(config), predict(config, H200).seconds
    return [
        *(name, str(layout), f"{length:,}"),
        *cells(found.times),
        *(f"{found.seconds:.3f}", f"{mfu(config, found.seconds):.1%}"),
        *(f"{mfu(config, predicted):.1%}", f"{found.peak / 2**30:.1f}"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Compares ways to share a long sequence, in programs compiled for H200s."""
    made = parser("context.exchanges", main)
    made.add_argument("--lengths", nargs="+", type=int, default=[2**17, 2**20], help="tokens")
    options = made.parse_args(argv)
    compile_only()
    ways = [(*way, length) for length in options.lengths for way in EXCHANGES.items()]
    rows = printed(row(*each) for each in ways)
    title = head("Long sequences on 64 H200s", "context.exchanges")
    append(options.out, title, joined(versions(*PACKAGES), table([HEAD, *rows])))
    return 0


if __name__ == "__main__":
    run_command(main)
