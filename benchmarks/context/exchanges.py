"""Long sequences on H200s in nodes of 8, predicted and compiled: Llama 3 8B, and Qwen3 235B.

`python -m benchmarks.context.exchanges [--lengths 131072 1048576] [--out FILE]` compiles a step of
one sequence of Llama 3 8B on 64 GPUs for each way to share it and each length. With `--experts` it
compiles Qwen3 235B A22B on 256 GPUs at three lengths, with 2,097,152 tokens a step. It estimates
times as `benchmarks/gpu/estimate.py` does; no GPU is needed, and nothing is run. *Predicted* is
what `jaxptd plan` says before compiling. MFU counts six FLOPs per token and weight, and the scores
of all tokens (`Architecture.flops`).
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
# By length: dp and cp. Experts are on the 8 devices of ep, samples fill the step.
EXPERTS = {4096: (32, 1), 32_768: (8, 4), 131_072: (2, 16)}
TOKENS = 2**21  # of a step with experts
H200 = Cluster(find_accelerator("h200"))
HEAD = ("way", "layout", "T", "matmuls, attention s", "others s", "sent s", "hidden", "step s")
HEAD += ("MFU", "predicted", "peak GiB")


def config_of(layout: Layout, length: int) -> Config:
    """A step of one sequence, whose layers are computed again in backward."""
    base = load_config("llama3-8b")
    model = dataclasses.replace(base.model, seq_length=length, remat="full", scan_layers=True)
    train = dataclasses.replace(base.train, global_batch_size=1, micro_batches=1)
    return dataclasses.replace(base, model=model, layout=layout, train=train)


def config_of_experts(length: int) -> Config:
    """A step of 2,097,152 tokens of Qwen3 235B A22B."""
    base, (dp, cp) = load_config("qwen3-235b-131k"), EXPERTS[length]
    model = dataclasses.replace(base.model, seq_length=length)
    train = dataclasses.replace(base.train, global_batch_size=TOKENS // length)
    layout = dataclasses.replace(base.layout, dp=dp, cp=cp)
    return dataclasses.replace(base, model=model, layout=layout, train=train)


def mfu(config: Config, seconds: float) -> float:
    """Share of the GPUs' peak."""
    flops = architecture_of(config.model).flops * config.train.global_batch_size
    return flops / config.layout.num_devices / seconds / H200.accelerator.bf16_flops


def row(name: str, config: Config) -> list[str]:
    found, predicted = measure(config), predict(config, H200).seconds
    return [
        *(name, str(config.layout), f"{config.model.seq_length:,}"),
        *cells(found.times),
        *(f"{found.seconds:.3f}", f"{mfu(config, found.seconds):.1%}"),
        *(f"{mfu(config, predicted):.1%}", f"{found.peak / 2**30:.1f}"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Compares ways to share a long sequence, in programs compiled for H200s."""
    made = parser("context.exchanges", main)
    made.add_argument("--lengths", nargs="+", type=int, default=[2**17, 2**20], help="tokens")
    made.add_argument("--experts", action="store_true", help="Qwen3 235B A22B on 256 GPUs")
    options = made.parse_args(argv)
    compile_only()
    cases = [(f"{TOKENS // each} sequences", config_of_experts(each)) for each in EXPERTS]
    if not options.experts:
        ways = [(*way, length) for length in options.lengths for way in EXCHANGES.items()]
        cases = [(name, config_of(layout, length)) for name, layout, length in ways]
    rows = printed(row(*each) for each in cases)
    title = head("Long sequences on H200s", "context.exchanges")
    append(options.out, title, joined(versions(*PACKAGES), table([HEAD, *rows])))
    return 0


if __name__ == "__main__":
    run_command(main)
