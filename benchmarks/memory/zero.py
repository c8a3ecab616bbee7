"""Compiles each ZeRO stage, and state in host memory, for H200s: memory and bytes sent.

`python -m benchmarks.memory.zero --config F [overrides] [--out benchmarks/results/zero.md]`
compiles a config's step at every stage, and with everything that can be in host memory there.
Nothing is run. `benchmarks/gpu/compile_gpu.py` says what this needs.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from benchmarks.lib.compiler import PACKAGES, axis_sizes, compile_only, on_h200s
from benchmarks.lib.pages import append, head, joined, parser, printed
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.count import count
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import parse
from jaxptd.config import Config
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.layout import BATCH_AXES, Offloaded, UpdateOn

STAGES = (0, 1, 2, 3)
HEAD = ("layout", "remat", "B, M per GPU", "state GiB", "in host memory", "temporary GiB")
HEAD += ("in host memory", "over dp, GiB per GPU")


def variants(config: Config) -> Iterator[Config]:
    """Yields the config at every ZeRO stage, and with all that host memory can hold."""
    stages = STAGES if config.layout.sample_shards * config.layout.cp > 1 else (0,)
    for stage in stages:
        yield with_layout(config, zero=stage)
    if config.layout.num_devices == 1:
        for offload in ("optimizer", "parameters", ("optimizer", "parameters")):
            yield with_layout(config, offload=offload)
        yield with_layout(config, offload="optimizer", update_on="host")
    if config.model.remat == "dots" and config.layout.pp == 1:
        for stage in dict.fromkeys((0, stages[-1])):
            yield with_layout(config, zero=stage, offload="activations")
        for update_on in get_args(UpdateOn):
            every = get_args(Offloaded)
            yield with_layout(config, zero=stages[-1], offload=every, update_on=update_on)


def with_layout(config: Config, **fields: Any) -> Config:
    return dataclasses.replace(config, layout=dataclasses.replace(config.layout, **fields))


def line(config: Config) -> list[str]:
    """Makes a row of the table."""
    program, layout = on_h200s(config), config.layout
    found, sizes = compile_step(program).memory_analysis(), axis_sizes(program.mesh)
    # Collectives within a stage are summed over stages, but a GPU is on only one of them.
    sent = sum(c.wire_bytes(sizes) for c in count(program) if {*BATCH_AXES} & {*c.axes})
    memory = (
        found.argument_size_in_bytes,
        found.host_argument_size_in_bytes,
        found.temp_size_in_bytes,
        found.host_temp_size_in_bytes,
        sent // layout.pp,
    )
    batch = (
        f"{config.train.global_batch_size // layout.sample_shards}, {config.train.micro_batches}"
    )
    return [str(layout), config.model.remat, batch, *(f"{x / 2**30:.1f}" for x in memory)]


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles ZeRO's stages, and state in host memory, for GPUs."""
    config, options = parse(parser("memory.zero", main, config=True), argv)
    compile_only()
    config = with_vocabulary(config)
    rows = printed(line(each) for each in variants(config))
    title = f"{config.model.num_layers} layers of {config.model.hidden_size}"
    text = joined(
        f"## {title}, compiled for H200s, not run", versions(PACKAGES[2]), table([HEAD, *rows])
    )
    print(text)
    append(options["out"], head("ZeRO and host memory", "memory.zero"), text)
    return 0


if __name__ == "__main__":
    run_command(main)
