"""Compiles training steps for H200s and compares them with a stored budget; no GPU is needed.

`python -m benchmarks.gpu.compiled [--cases 124m ...]` prints a table. `--out FILE` appends it to a
page. `--kernels 20` lists the 20 kernels that move the most bytes. `--check` compares with
`benchmarks/results/budget.json`, which has a section for each version of JAX, and exits with 1 if a
figure is worse. `--store` writes that section.

All figures follow from the program, so they are the same on every machine: peak memory, kernels,
bytes of all kernels except matmuls (as milliseconds at 4.3 TB/s), FLOPs of matmuls and of
attention, and the collectives that overlap with work. For a pipeline they are means over its
stages. Time is not known. `benchmarks/gpu/compile_gpu.py` says what compiling needs; `pip install
-e '.[h200]'` installs it.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.lib.compiler import PACKAGES, axis_sizes, compile_only, on_h200s
from benchmarks.lib.pages import RESULTS, append, head, joined, parser, printed, write
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hardware import BANDWIDTH
from jaxptd.analysis.hlo.kernels import largest, summary
from jaxptd.analysis.hlo.text import Pipeline
from jaxptd.analysis.hlo.timeline import moves
from jaxptd.analysis.jaxprs import attention_flops, executed, flops
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, Kernels, ModelConfig, Remat, TrainConfig
from jaxptd.errors import UserError, run_command
from jaxptd.mesh import Layout

BUDGET = RESULTS / "budget.json"
SLACK = 1.01  # a figure may be worse by this factor
Figures = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on H200s."""

    sizes: tuple[int, int, int]  # L, D, N
    batch: int  # sequences in total
    layout: Layout = dataclasses.field(default_factory=Layout)
    remat: Remat = "none"
    scan: bool = True  # compiles one block for all layers
    length: int = 1024
    kernels: Kernels = "xla"  # for the norms
    # cuBLASLt computes all matmuls. XLA picks it for most of them, but only where it can time them;
    # without a GPU it uses its own kernels.
    cublas: bool = False

    @property
    def compiler(self) -> dict[str, Any] | None:
        return {"xla_gpu_enable_triton_gemm": False} if self.cublas else None

    @property
    def config(self) -> Config:
        layers, hidden, heads = self.sizes
        sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads}
        sizes |= {"seq_length": self.length, "vocab_size": 50257, "vocab_multiple": 128}
        ways = {"remat": self.remat, "scan_layers": self.scan, "kernels": self.kernels}
        model = ModelConfig(dtype="bfloat16", **sizes, **ways)
        return Config(model, self.layout, train=TrainConfig(global_batch_size=self.batch))


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A config of `configs/`, on as many H200s as it asks for."""

    name: str
    options: str = ""  # of the command line, which override it
    compiler: None = None

    @property
    def config(self) -> Config:
        return load_config(self.name, self.options.split())


_LEAN = "--model.remat=full --model.scan_layers=true"
_TP8 = "--layout.tp=8 --layout.sequence_parallel=true --train.micro_batches=128"
# As many of the 32 layers as fit on a GPU with their optimizer state.
_PART = "--layout.dp=1 --layout.zero=0 --model.num_layers=8 --model.remat=none "
_PART += "--model.seq_length=4096 --train.global_batch_size=4 --train.micro_batches=1"
_OFFLOAD = "--data.source=none --layout.dp=1 --layout.tp=1 --layout.sequence_parallel=false"
_OFFLOAD += " --layout.offload=optimizer --train.global_batch_size=8 --train.micro_batches=1"
_UNPIPELINED = "--layout.pp=1 --train.micro_batches=16"
# A public JAX model, marin-community/marin issue 6979: 64 experts of 1024 hidden units (inferred),
# 4 per token, and one that all tokens share.
_GRUG = "--model.num_layers=24 --model.num_heads=16 --model.vocab_size=128256"
_GRUG += " --model.moe.num_experts=64 --model.moe.top_k=4 --model.moe.ffn_hidden_size=1024"
_GRUG += " --model.moe.shared_ffn_hidden_size=1024"
_SPREAD = "--layout.ep=1 --layout.dp=8 --layout.zero=3"
MEDIUM, XL = (24, 1024, 16), (48, 1600, 25)
CASES: dict[str, Case | Packaged] = {
    "124m": Case((12, 768, 12), 32, scan=False),
    "124m cublas": Case((12, 768, 12), 32, scan=False, cublas=True),
    "124m triton": Case((12, 768, 12), 32, scan=False, kernels="triton"),
    "124m scan": Case((12, 768, 12), 32),
    "350m": Case(MEDIUM, 32, remat="dots"),
    "350m dp8": Case(MEDIUM, 64, Layout(dp=8, zero=2), "dots"),
    "350m dp8 unrolled": Case(MEDIUM, 64, Layout(dp=8, zero=2), "dots", scan=False),
    "350m zero3 unrolled": Case(MEDIUM, 64, Layout(dp=8, zero=3), "dots", scan=False),
    "1.5b": Case(XL, 16, remat="full"),
    "1.5b dots": Case(XL, 16, remat="dots"),
    "1.5b dots triton": Case(XL, 16, remat="dots", kernels="triton"),
    "1.5b dots unrolled": Case(XL, 16, remat="dots", scan=False),
    "1.5b unrolled": Case(XL, 16, scan=False),
    "1.5b unrolled triton": Case(XL, 16, scan=False, kernels="triton"),
    "1.5b offload": Packaged("gpt2-1.5b", _OFFLOAD),
    "1.5b tp8": Case((48, 1536, 24), 16, Layout(tp=8, sequence_parallel=True, keep_gathered=True)),
    "1.5b tp8 ring": Case(
        (48, 1536, 24), 16, Layout(tp=8, sequence_parallel=True, collective_matmul=True)
    ),
    "2.5b tp8": Case((54, 1920, 24), 16, Layout(tp=8, sequence_parallel=True)),
    "2.5b grid": Case((54, 1920, 30), 32, Layout(row=2, col=2), "dots", length=512),
    "qwen3-0.6b": Packaged("qwen3-0.6b"),
    "qwen3-0.6b scan": Packaged("qwen3-0.6b", "--model.scan_layers=true --model.remat=dots"),
    "llama3-8b": Packaged("llama3-8b"),
    "llama3-8b 8 layers": Packaged("llama3-8b", f"{_PART} --model.kernels=xla"),
    "llama3-8b 8 layers triton": Packaged("llama3-8b", f"{_PART} --model.kernels=triton"),
    "llama3-8b 8 layers fp8": Packaged(
        "llama3-8b", f"{_PART} --model.kernels=triton --model.products=fp8"
    ),
    "llama3-8b zero3": Packaged("llama3-8b", f"--layout.zero=3 {_LEAN}"),
    "llama3-8b tp8": Packaged("llama3-8b", f"--layout.zero=0 --layout.dp=1 {_TP8} {_LEAN}"),
    "llama3-70b": Packaged("llama3-70b"),
    "llama3-70b gathers": Packaged("llama3-70b", "--layout.collective_matmul=false"),
    "qwen3-30b-a3b": Packaged("qwen3-30b-a3b"),
    "qwen3-30b-a3b ring": Packaged(
        "qwen3-30b-a3b", "--layout.sequence_parallel=true --layout.collective_matmul=true"
    ),
    "qwen3-30b-a3b zero3": Packaged("qwen3-30b-a3b", f"{_SPREAD} --train.micro_batches=4"),
    "mixtral-8x7b": Packaged("mixtral-8x7b"),
    "mixtral-8x7b zero3": Packaged(
        "mixtral-8x7b",
        "--layout.ep=2 --layout.dp=4 --layout.zero=3 --model.remat=full --train.micro_batches=4",
    ),
    "grug zero3": Packaged("qwen3-30b-a3b", f"{_GRUG} {_SPREAD} --train.micro_batches=1"),
    "llama3-70b dp8": Packaged("llama3-70b", f"--layout.dp=8 {_UNPIPELINED}"),
}
EXPERTS = tuple(name for name in CASES if name.startswith(("qwen3-30b", "mixtral", "grug")))
HEAD = ("case", "layout", "B", "layers", "remat", "peak GiB", "kernels", "others, ms")
HEAD += ("matmul TFLOP", "attention TFLOP", "collectives", "over matmuls or attention")


def measure(case: Case | Packaged, kernels: int = 0) -> Figures:
    """Compiles a case and reads its figures; kernels: print this many, the largest first."""
    program, stages = on_h200s(case.config), case.config.layout.pp
    compiled = compile_step(program, case.compiler)
    text, pipeline = compiled.as_text(), Pipeline(stages, program.resolved.trips)
    every = summary(text, pipeline)
    for size, count, words in largest(text, kernels, pipeline):
        print(f"{size / 1e9:7.2f} GB {count:6,}  {words}")
    found = moves(text, axis_sizes(program.mesh), pipeline)
    hidden = sum(each.count for each in found if each.hidden_by != "nothing")
    memory = compiled.memory_analysis()
    peak = memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes  # XLA adds up both
    return {
        "peak_gib": round(peak / 2**30, 2),
        "kernels": every.count,
        "others_ms": round(1e3 * every.other_bytes / BANDWIDTH, 2),
        "product_tflop": round(executed(program, flops) / stages / 1e12, 2),
        "attention_tflop": round(executed(program, attention_flops) / stages / 1e12, 2),
        "collectives": sum(each.count for each in found),
        "hidden": hidden,
    }


KEYS = ("peak_gib", "kernels", "others_ms", "product_tflop", "attention_tflop", "collectives")
KEYS += ("hidden",)


def row(name: str, found: Figures) -> list[str]:
    config = CASES[name].config
    train, model = config.train, config.model
    pieces = f" in {train.micro_batches}" if train.micro_batches > 1 else ""
    return [
        name,
        str(config.layout),
        f"{train.global_batch_size}{pieces}",
        "scan" if model.scan_layers else "unrolled",
        model.remat,
        *(f"{found[key]:,}" for key in KEYS),
    ]


def version() -> str:
    """The version of JAX, as far as the budget distinguishes versions."""
    return ".".join(jax.__version__.split(".")[:2])


def worse(found: Mapping[str, Figures], stored: Mapping[str, Figures]) -> list[str]:
    """Describes the figures that exceed the budget, and the cases that have no budget."""
    lines = []
    for name, figures in found.items():
        if name not in stored:
            lines.append(f"{name} has no budget; python -m benchmarks.gpu.compiled --store")
            continue
        for key, value in figures.items():
            budget = stored[name][key]
            over = value * SLACK < budget if key == "hidden" else value > budget * SLACK
            if over:
                lines.append(f"{name}: {key} is {value:,}, the budget is {budget:,}")
    return lines


def read_budget() -> dict[str, dict[str, Figures]]:
    """Reads the budget: by version of JAX, then by case."""
    return json.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles training steps for H200s and compares them with their budget."""
    made = parser("gpu.compiled", main)
    made.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    made.add_argument("--check", action="store_true", help="exit code 1 if over the budget")
    made.add_argument("--store", action="store_true", help="write the budget of this JAX")
    made.add_argument(
        "--kernels", type=int, default=0, help="print this many, those that move the most bytes"
    )
    options = made.parse_args(argv)
    if options.check and options.store:
        raise UserError("--check and --store: give one of them")
    compile_only()
    found: dict[str, Figures] = {}

    def rows() -> Iterator[list[str]]:
        for name in options.cases:
            found[name] = measure(CASES[name], options.kernels)
            yield row(name, found[name])

    lines = table([HEAD, *printed(rows())])
    if options.out:
        title = head("Training steps compiled for H200s", "gpu.compiled")
        append(options.out, title, joined(versions(*PACKAGES), lines))
    budgets = read_budget()
    if options.store:
        budgets[version()] = budgets.get(version(), {}) | found
        write(BUDGET, json.dumps(budgets, indent=1) + "\n")
    if not options.check:
        return 0
    over = worse(found, budgets.get(version(), {}))
    print("\n".join(over) or "within the budget")
    return int(bool(over))


if __name__ == "__main__":
    run_command(main)
