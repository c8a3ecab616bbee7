"""Measures memory and work of each remat policy in several layouts.

`python -m benchmarks.memory.remat [--layouts one tp ...] [--out benchmarks/results/remat.md]`

Measures a small GPT in float32 on simulated CPU devices. *Saved* is what all layers of one device
save for backward, by formula (`jaxptd/analysis/memory_model.py`); in a pipeline it includes the
values that wait on a stage. *Temporary* is the compiled step's temporary memory. *Matmuls* are the
FLOPs of forward and backward, counted in the step's jaxpr and divided by those of `none`.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.lib.pages import append, head, joined, mib, parser
from jaxptd.analysis import memory_model
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.jaxprs import executed, flops
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, ModelConfig, Remat, TrainConfig
from jaxptd.errors import run_command
from jaxptd.mesh import Layout, make_mesh
from jaxptd.run.devices import prepare
from jaxptd.step import Program

MODEL = ModelConfig(num_layers=8, hidden_size=128, num_heads=8, seq_length=128, vocab_size=256)
SEQUENCES = 8  # on each device along dp
LAYOUTS: dict[str, Layout] = {
    "one": Layout(),
    "tp": Layout(tp=4),
    "sp": Layout(tp=4, sequence_parallel=True),
    "dp": Layout(dp=2, tp=4),
    "grid": Layout(row=2, col=2),
    "pp": Layout(pp=4),
}
# The policy, and the fraction of layers that use it.
POLICIES: tuple[tuple[Remat, float], ...] = (
    ("none", 1),
    ("attention", 1),
    ("dots", 1),
    ("dots", 0.5),
    ("full", 0.5),
    ("full", 1),
)
HEAD = ("remat", "saved MiB", "less than none", "temporary MiB", "less than none")
HEAD += ("matmuls, relative to none",)


def config_of(layout: Layout, remat: Remat, share: float) -> Config:
    """Makes the config of a layout; in a pipeline each sequence is a micro-batch."""
    layers = MODEL.num_layers // layout.pp  # of a part of the model
    first = None if share == 1 else round(share * layers)
    model = dataclasses.replace(MODEL, remat=remat, remat_layers=first)
    batch, micro_batches = SEQUENCES * layout.dp, SEQUENCES if layout.pp > 1 else 1
    train = TrainConfig(global_batch_size=batch, micro_batches=micro_batches, platform="cpu")
    return Config(model=model, layout=layout, train=train)


class Found(NamedTuple):
    """Bytes and FLOPs of a step."""

    kept: int
    temporary: int
    flops: int


def measure(config: Config) -> Found:
    """Compiles one policy in one layout."""
    program = Program(config, make_mesh(config.layout))
    plan = program.resolved.plan
    kept = memory_model.activations(config, plan)
    kept += memory_model.mail(config, plan) if plan else 0
    temporary = compile_step(program).memory_analysis().temp_size_in_bytes
    return Found(kept, temporary, executed(program, flops))


def rows(layout: Layout) -> list[list[str]]:
    """Makes the table's rows, one for each policy."""
    none, *_ = found = [measure(config_of(layout, *policy)) for policy in POLICIES]
    return [
        [
            remat if share == 1 else f"{remat}, half of the layers",
            *(mib(each.kept), mib(none.kept - each.kept)),
            *(mib(each.temporary), mib(none.temporary - each.temporary)),
            f"{each.flops / none.flops:.3f}",
        ]
        for (remat, share), each in zip(POLICIES, found, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the remat policies on simulated devices."""
    made = parser("memory.remat", main)
    made.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    args = made.parse_args(argv)
    chosen = [LAYOUTS[name] for name in args.layouts]
    prepare(config_of(max(chosen, key=lambda layout: layout.num_devices), "none", 1))
    tables = (f"### {each}\n\n{table([HEAD, *rows(each)])}" for each in chosen)
    body = joined(versions(), *tables)
    print(body)
    section = f"## On simulated devices\n\n{body}"
    append(args.out, head("Remat policies", "memory.remat"), section)
    return 0


if __name__ == "__main__":
    run_command(main)
