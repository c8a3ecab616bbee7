"""Compiles a training step for H200s on any machine, and shows what it would need.

`python -m benchmarks.gpu.compile_gpu --config configs/gpt2-124m.yaml [--layout.dp 1 --peer ...]`

XLA compiles ahead of time for the hardware described in `jaxptd/hardware/h200.txtpb`, down to
kernels and schedule. This gives the memory of each GPU, kernels, collectives, and the bytes that
kernels other than matrix products move. It does not give time; products are not tuned, because
that needs the hardware.

Needs, in JAX's version: `pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt
nvidia-cudnn-cu13`. CUDA itself is not needed.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.lib.measure import append, collectives, gib, rows_by_axes
from benchmarks.peers.gspmd import Peer
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hlo.kernels import summary
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import make_parser, parse
from jaxptd.compiling import PLUGINS, gpus
from jaxptd.config import Config, ModelConfig, Remat
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

INTRODUCTION = """# Training steps compiled for H200s

Compiled ahead of time by `python -m benchmarks.gpu.compile_gpu` on a machine without a GPU; nothing
here was run or timed. All figures are of one GPU. Peak: all that the program needs, state included.
Last column but one: bytes moved by kernels other than products, attention and collectives; 4.3 GB
take about a millisecond. Collectives: executions a step, and bytes each GPU sends in a ring. XLA's
scheduler uses free memory to overlap collectives with products, most with unrolled layers. The
peer, plain jit, sums the gradients of matrices over dp in bfloat16; jaxptd sums them in float32,
which is twice the bytes.

"""
HEAD: tuple[str, ...] = (
    "program",
    "GPUs",
    "layout",
    "B a GPU",
    "layers",
    "remat",
    "attention",
    "peak GiB",
)
HEAD += ("temp GiB", "state GiB", "kernels", "GB moved by others than products", "collectives")


def line(config: Config, *, peer: bool) -> tuple[list[str], float]:
    """Makes the table's row for a config; also returns the seconds of compilation."""
    mesh = make_mesh(config.layout, gpus(config.layout.num_devices))
    program: Any = Program(config, mesh)
    kernel = program.resolved.model.attention
    if peer:
        program = Peer(with_even_vocabulary(config), mesh, kernel)
    start = time.perf_counter()
    compiled = compile_step(program)
    seconds = time.perf_counter() - start
    memory, kernels = compiled.memory_analysis(), summary(compiled.as_text())
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    cells = [
        "peer" if peer else "jaxptd",
        str(config.layout.num_devices),
        str(config.layout),
        str(config.train.global_batch_size // config.layout.dp),
        "scan" if config.model.scan_layers else "unrolled",
        in_words(config.model),
        kernel,
        gib(memory.peak_memory_in_bytes),
        gib(memory.temp_size_in_bytes),
        gib(memory.argument_size_in_bytes),
        f"{kernels.count}",
        f"{kernels.other_bytes / 1e9:.1f}",
        rows_by_axes(collectives(compiled, mesh), sizes) or "none",
    ]
    return cells, seconds


def in_words(model: ModelConfig) -> str:
    """Formats a model's remat policy."""
    first = model.remat_layers
    return model.remat if first is None else f"{model.remat}, first {first} of {model.num_layers}"


def with_even_vocabulary(config: Config) -> Config:
    """Copies the config with a vocabulary that splits over tp, which plain jit needs."""
    model, tp = config.model, config.layout.tp
    even = -(-(model.vocab_size or 0) // tp) * tp
    return dataclasses.replace(config, model=dataclasses.replace(model, vocab_size=even))


def with_options(config: Config, *, remat: Remat | None, layers: str | None) -> Config:
    """Copies the config with another remat policy, and with layers scanned or unrolled."""
    model = dataclasses.replace(
        config.model,
        remat=remat or config.model.remat,
        scan_layers=config.model.scan_layers if layers is None else layers == "scan",
    )
    return dataclasses.replace(config, model=model)


def report(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Makes a section of a Markdown page."""
    return (
        f"## {title}\n\n{versions('flax', 'optax', *PLUGINS.split())}\n\n{table([HEAD, *rows])}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the training step of a config for H200s; no GPU is needed."""
    parser = make_parser("python -m benchmarks.gpu.compile_gpu", main.__doc__ or "")
    remats, ways = ("none", "dots", "attention", "full"), ("scan", "unrolled")
    parser.add_argument("--remats", nargs="+", choices=remats, help="several, instead of one")
    parser.add_argument("--layers", nargs="+", choices=ways, help="several, instead of one")
    parser.add_argument("--peer", action="store_true", help="the plain jit program beside it")
    parser.add_argument("--title", default="A training step compiled for H200s")
    parser.add_argument("--out", default="", help="Markdown file to append the table to")
    config, options = parse(parser, argv)
    config = with_vocabulary(config)
    jax.config.update("jax_platforms", "cpu")  # the step is only compiled for GPUs
    rows = []
    for layers in options["layers"] or [None]:
        for remat in options["remats"] or [None]:
            chosen = with_options(config, remat=remat, layers=layers)
            for peer in (False, True)[: 1 + options["peer"]]:
                cells, seconds = line(chosen, peer=peer)
                rows.append(cells)
                print("  ".join(cells), f"(compiled in {seconds:.0f} s)", flush=True)
    if options["out"]:
        append(Path(options["out"]), INTRODUCTION, report(options["title"], rows))
    return 0


if __name__ == "__main__":
    run_command(main)
