"""Compiles a training step for H200s on any machine, and shows what it would need.

`python -m benchmarks.gpu.compile_gpu --config configs/gpt2-124m.yaml [--layout.dp 1 ...]`

XLA compiles ahead of time for the hardware described in `jaxptd/hardware/h200.txtpb`, down to
kernels and schedule. This shows each GPU's memory, kernels, collectives, and the bytes moved by
kernels other than matmuls. It does not show time, and matmuls are not autotuned, because both need
the hardware.

Needs `pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13` in versions that
match JAX. CUDA itself is not needed.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.lib.compiler import PACKAGES, axis_sizes, compile_only, on_h200s
from benchmarks.lib.pages import append, gib, head, joined, parser, printed
from benchmarks.lib.timing import collectives
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hlo.kernels import summary
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import parse
from jaxptd.config import Config
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command

HEAD = ("GPUs", "layout", "B per GPU", "layers", "remat", "attention", "peak GiB")
HEAD += (
    "temp GiB",
    "state GiB",
    "kernels",
    "GB moved by kernels other than matmuls",
    "collectives",
)


def line(config: Config) -> list[str]:
    program = on_h200s(config)
    kernel, mesh = program.resolved.model.attention, program.mesh
    compiled = compile_step(program)
    axes = axis_sizes(mesh)
    moved = (
        f"{each.kind} {'x'.join(each.axes)} {each.count} ({sent / 2**20:,.0f} MiB)"
        for each in collectives(compiled, mesh)
        if (sent := each.wire_bytes(axes)) >= 2**20
    )
    memory, kernels = compiled.memory_analysis(), summary(compiled.as_text())
    sizes = memory.peak_memory_in_bytes, memory.temp_size_in_bytes, memory.argument_size_in_bytes
    model, first = config.model, config.model.remat_layers
    some = "" if first is None else f", first {first} of {model.num_layers}"
    return [
        str(config.layout.num_devices),
        str(config.layout),
        str(config.train.global_batch_size // config.layout.sample_shards),
        "scan" if model.scan_layers else "unrolled",
        f"{model.remat}{some}",
        kernel,
        *map(gib, sizes),
        f"{kernels.count}",
        f"{kernels.other_bytes / 1e9:.1f}",
        ", ".join(moved) or "none",
    ]


def variants(config: Config, options: Mapping[str, Any]) -> Iterator[Config]:
    """The config with each remat policy, with scanned and with unrolled layers."""
    for layers in options["layers"] or [None]:
        for remat in options["remats"] or [None]:
            model = dataclasses.replace(
                config.model,
                remat=remat or config.model.remat,
                scan_layers=layers == "scan" if layers else config.model.scan_layers,
            )
            yield dataclasses.replace(config, model=model)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the training step of a config for H200s; no GPU is needed."""
    made = parser("gpu.compile_gpu", main, config=True)
    remats, ways = ("none", "dots", "attention", "full"), ("scan", "unrolled")
    made.add_argument("--remats", nargs="+", choices=remats, help="several, instead of one")
    made.add_argument("--layers", nargs="+", choices=ways, help="several, instead of one")
    made.add_argument("--title", default="A training step compiled for H200s")
    config, options = parse(made, argv)
    config = with_vocabulary(config)
    compile_only()
    rows = printed(map(line, variants(config, options)))
    section = joined(f"## {options['title']}", versions(*PACKAGES), table([HEAD, *rows]))
    title = head("Training steps compiled for H200s", "gpu.compile_gpu")
    append(options["out"], title, section)
    return 0


if __name__ == "__main__":
    run_command(main)
