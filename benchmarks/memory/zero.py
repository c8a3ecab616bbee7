"""Memory, time and bytes of each stage of ZeRO, and of state in host memory.

`python -m benchmarks.memory.zero [--out benchmarks/results/zero.md]` measures a small GPT, float32,
on simulated CPU devices. The figures of one device: state by formula and as an argument of the
compiled step, temporary memory of that step, bytes over dp (x cp) in its jaxpr, by formula and in
its compiled program, and the fastest step, taken in turns, divided by stage 0's in the same run
(simulated devices share their cores, so time compares work, not messages).

`python -m benchmarks.memory.zero --gpu --config F [overrides]` compiles a config's step for H200s
with every stage, and with everything possible in host memory; nothing is run (see
`benchmarks/gpu/compile_gpu.py` for what it needs).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from benchmarks.lib.measure import Run, append, mib
from jaxptd.analysis import memory_model
from jaxptd.analysis.collective import PERMUTE, Collective, add_up
from jaxptd.analysis.compiled_step import compile_step, random_batch
from jaxptd.analysis.count import count, formula
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.analysis.report import table, versions
from jaxptd.commands.command_line import make_parser, parse
from jaxptd.compiling import gpus
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import UserError, run_command
from jaxptd.layout import Offloaded, UpdateOn
from jaxptd.mesh import Layout, make_mesh
from jaxptd.run.devices import prepare
from jaxptd.step import Program

MODEL = ModelConfig(num_layers=8, hidden_size=128, num_heads=8, seq_length=64, vocab_size=256)
LAYOUTS = {
    "dp": Layout(dp=8),
    "cp": Layout(dp=4, cp=2),
    "sp": Layout(dp=4, tp=2, sequence_parallel=True),
    "grid": Layout(dp=2, row=2, col=2),
    "pp": Layout(dp=4, pp=2),
}
MICRO_BATCHES = {"pp": 4}  # elsewhere one
STAGES = (0, 1, 2, 3)
ROUNDS = 5
HEAD = ("zero", "state MiB: formula", "compiled", "temporary MiB", "over dp x cp, KiB: jaxpr")
HEAD += ("formula", "compiled", "time, of stage 0")
GPU_HEAD = ("layout", "remat", "B, M a GPU", "state GiB", "in host memory", "temporary GiB")
GPU_HEAD += ("in host memory", "over dp, GiB a GPU")
INTRODUCTION = """# ZeRO and host memory

Made by `python -m benchmarks.memory.zero`, whose head says what is measured.

"""


# ---- simulated devices ----------------------------------------------------------------------


def config_of(name: str, stage: int) -> Config:
    """Makes the config of a layout at a stage."""
    layout = dataclasses.replace(LAYOUTS[name], zero=stage)
    train = TrainConfig(
        global_batch_size=16, micro_batches=MICRO_BATCHES.get(name, 1), platform="cpu"
    )
    return Config(model=MODEL, layout=layout, train=train)


def over_replicas(found: Sequence[Collective]) -> str:
    """KiB of each kind of collective over dp or cp; scalars are left out."""
    sums: dict[str, int] = {}
    for each in found:
        if {"dp", "cp"} & {*each.axes} and each.kind != PERMUTE:
            sums[each.kind] = sums.get(each.kind, 0) + each.bytes
    return ", ".join(f"{kind} {size / 1024:,.0f}" for kind, size in sums.items() if size >= 1024)


@dataclasses.dataclass
class Found:
    """A line of the table without the time; and the step, to be timed."""

    cells: list[str]
    run: Run


def measure(config: Config) -> Found:
    """Compiles one stage of one layout."""
    program = Program(config, make_mesh(config.layout))
    compiled = compile_step(program)
    memory = compiled.memory_analysis()
    state = memory_model.state(config, program.resolved.zero)
    mesh = {str(axis): size for axis, size in program.mesh.shape.items()}
    trips = program.resolved.trips
    moved = add_up(collectives_from_hlo(compiled.as_text(), mesh, trips))
    cells = [
        str(config.layout.zero),
        mib(state["parameters"] + state["optimizer"]),
        mib(memory.argument_size_in_bytes),
        mib(memory.temp_size_in_bytes),
        *map(over_replicas, (count(program), formula(program), moved)),
    ]
    run = Run(compiled, program.init_state(), program.place(random_batch(config)))
    return Found(cells, run)


def section(name: str, rounds: int) -> str:
    """Makes a layout's table, with all stages timed in turns."""
    prepare(config_of(name, 0))
    found = [measure(config_of(name, stage)) for stage in STAGES]
    for _ in range(rounds + 1):  # one to warm up
        for each in found:
            each.run.step()
    fastest = [min(each.run.seconds[1:]) for each in found]
    rows = [
        [*each.cells, f"{seconds / fastest[0]:.2f}"]
        for each, seconds in zip(found, fastest, strict=True)
    ]
    M = MICRO_BATCHES.get(name, 1)
    words = f"{M} micro-batch{'es' if M > 1 else ''}"
    return f"## {LAYOUTS[name]}, {words}\n\n{versions()}\n\n{table([HEAD, *rows])}\n"


# ---- compiled for GPUs ----------------------------------------------------------------------


def variants(config: Config) -> Iterator[Config]:
    """Yields the config with every stage that shards, and with all that host memory can take."""
    stages = STAGES if config.layout.dp * config.layout.cp > 1 else (0,)
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


def gpu_line(config: Config) -> list[str]:
    """Makes a line of the table of H200s."""
    mesh = make_mesh(config.layout, gpus(config.layout.num_devices))
    program = Program(config, mesh)
    compiled = compile_step(program)
    memory = compiled.memory_analysis()
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    # Collectives within a stage are added up over stages; a GPU is on one.
    sent = sum(c.wire_bytes(sizes) for c in count(program) if {"dp", "cp"} & {*c.axes})
    sent //= config.layout.pp
    return [
        str(config.layout),
        config.model.remat,
        f"{config.train.global_batch_size // config.layout.dp}, {config.train.micro_batches}",
        *map(
            gib,
            (
                memory.argument_size_in_bytes,
                memory.host_argument_size_in_bytes,
                memory.temp_size_in_bytes,
                memory.host_temp_size_in_bytes,
                sent,
            ),
        ),
    ]


def gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def gpu_section(config: Config) -> str:
    rows = []
    for each in variants(config):
        rows.append(gpu_line(each))
        print(" | ".join(rows[-1]), flush=True)
    model = config.model
    title = f"{model.num_layers} layers of {model.hidden_size}, compiled for H200s, not run"
    return f"## {title}\n\n{versions('jax-cuda13-plugin')}\n\n{table([GPU_HEAD, *rows])}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures ZeRO's stages, or compiles them for GPUs."""
    parser = make_parser("python -m benchmarks.memory.zero", main.__doc__ or "")
    parser.add_argument("--gpu", action="store_true", help="compile --config for H200s")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps that are timed")
    parser.add_argument("--out", default="", help="Markdown file to append the tables to")
    config, options = parse(parser, argv)
    if options["rounds"] < 1:
        raise UserError(f"--rounds {options['rounds']}: use 1 or more")
    if options["gpu"]:
        jax.config.update("jax_platforms", "cpu")  # the steps are only compiled for GPUs
        made = [gpu_section(with_vocabulary(config))]
    else:
        made = [section(name, options["rounds"]) for name in options["layouts"]]
    for each in made:
        print(each)
        if options["out"]:
            append(Path(options["out"]), INTRODUCTION, each)
    return 0


if __name__ == "__main__":
    run_command(main)
