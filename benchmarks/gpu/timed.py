"""Times training steps on this machine's GPU and compares them with estimates and plans.

`python -m benchmarks.gpu.timed [--cases 124m "1.5b dots" ...] [--steps 20] [--out FILE]` runs the
single-GPU cases of `benchmarks.gpu.compiled`, each in a process of its own. Steps are timed as in
training. JAX's profiler gives the milliseconds of matmuls, attention and other kernels. It runs the
same program without CUDA graphs, which would hide the kernels' names; *idle* is the rest of that
program's step. *Estimated* is what `benchmarks.gpu.estimate` says about the program that this
machine compiled, *planned* what `jaxptd plan` predicts from the config and the GPU's entry in
`jaxptd/hardware/accelerators.yaml`. A second table splits the milliseconds of other kernels by part
of the step. `--keep DIR` keeps each program's text and trace.
"""

import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.compiled import CASES, Case, Packaged
from benchmarks.gpu.estimate import rates
from benchmarks.lib.pages import head, last_section, parser
from benchmarks.lib.timing import Step, answer, first_gpu, queued
from jaxptd.analysis.compiled_step import compile_step, random_batch
from jaxptd.analysis.hlo.kernels import ATTENTION, KINDS, OTHER, PRODUCT, summary
from jaxptd.analysis.hlo.timeline import estimate
from jaxptd.analysis.jaxprs import attention_flops, executed, flops
from jaxptd.analysis.profiling import NAMED, SCOPES, events, part_times
from jaxptd.analysis.report import table, versions
from jaxptd.calibration.timer import table_name
from jaxptd.config import Config
from jaxptd.errors import UserError, run_command
from jaxptd.hardware import Cluster, accelerators
from jaxptd.mesh import make_mesh
from jaxptd.planner.steps.step import predict
from jaxptd.run.devices import prepare
from jaxptd.step import Program

ONE = {name: case for name, case in CASES.items() if case.config.layout.num_devices == 1}
WARM_UP, TRACED = 5, 5  # steps
HEAD = ("case", "B", "remat, layers", "step ms, median", "10 % to 90 %", "estimated", "planned")
HEAD += ("matmuls ms, TFLOP/s", "attention ms, TFLOP/s", "others ms, TB/s", "idle ms")
HEAD += ("kernels", "peak GiB", "compiled")
PARTS_HEAD = ("other kernels, ms", *SCOPES)
Found = dict[str, Any]
FLOP = {"product_flop": flops, "attention_flop": attention_flops}
# The work of each kind of kernel, by the name that `measure` gives it.
WORK = {PRODUCT: "product_flop", ATTENTION: "attention_flop", OTHER: "other_bytes"}


def measure(case: Case | Packaged, steps: int, keep: Path | None = None) -> Found:
    """Times steps of a case on this machine's first GPU.

    Args:
        case: a case for one device.
        steps: the number of timed steps.
        keep: a new directory for the program's text and its trace.

    Raises:
        UserError: JAX finds no GPU.
    """
    config, compiler = case.config, case.compiler or {}
    prepare(config)
    device = first_gpu()
    program: Any = Program(config, make_mesh(config.layout))
    begin = time.perf_counter()
    compiled = compile_step(program, compiler)
    compiling = time.perf_counter() - begin
    state, batch = program.init_state(), program.place(random_batch(config))

    def step() -> Callable[[], Any]:
        nonlocal state
        state, metrics = compiled(state, batch)
        return lambda: jax.block_until_ready(metrics)

    seconds = queued(step, WARM_UP + steps)[0][WARM_UP:]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    expected = compiled.memory_analysis().peak_memory_in_bytes
    compiled = compile_step(program, compiler | NAMED)
    named = statistics.median(queued(step, WARM_UP + steps)[0][WARM_UP:])
    flop = {name: executed(program, count) for name, count in FLOP.items()}
    timed = {"compiling": compiling, "seconds": seconds, "named": named}
    sizes = {"peak_bytes": memory, "compiled_bytes": expected}
    counted = kinds(step, compiled.as_text(), keep)
    return {"device": device.device_kind} | timed | sizes | flop | counted


def kinds(step: Step, text: str, keep: Path | None) -> Found:
    """A program's counts, its estimated seconds, and the profiler's seconds for each kind.

    Args:
        step: starts the program once.
        text: the compiled program.
        keep: a directory for it and its trace.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = keep or Path(temporary)
        with jax.profiler.trace(directory):
            queued(step, TRACED)
        parts = part_times(events(directory), text, TRACED)
    if keep:
        with gzip.open(keep / "program.txt.gz", "wt", encoding="utf-8") as file:
            file.write(text)
    spent = dict.fromkeys(KINDS, 0.0)
    for (_, kind), part in parts.items():
        spent[kind] += part
    others = {scope: parts.get((scope, OTHER), 0.0) for scope in SCOPES}
    every = summary(text)
    estimated = estimate(text, rates({}), {}).total
    counted = {"kernels": every.count, "other_bytes": every.other_bytes, "estimated": estimated}
    return counted | {"kinds": spent, "others": others}


def row(name: str, found: Found) -> list[str]:
    model, train = CASES[name].config.model, CASES[name].config.train
    layers = "loop" if model.scan_layers else "unrolled"
    head = [name, str(train.global_batch_size), f"`{model.remat}`, {layers}"]
    if "error" in found:
        return [*head, f"not measured: {found['error']}", *[""] * (len(HEAD) - len(head) - 1)]
    spent: Mapping[str, float] = found["kinds"]
    rate = {kind: found[key] / spent[kind] / 1e12 for kind, key in WORK.items()}
    low, *_, high = statistics.quantiles(found["seconds"], n=10)
    return [
        *head,
        f"{1e3 * statistics.median(found['seconds']):.1f}",
        f"{1e3 * low:.1f} to {1e3 * high:.1f}",
        f"{1e3 * found['estimated']:.1f}",
        planned(CASES[name].config, found["device"]),
        *(f"{1e3 * spent[kind]:.1f}, {rate[kind]:.{2 * (kind == OTHER)}f}" for kind in WORK),
        f"{1e3 * (found['named'] - sum(spent.values())):.1f}",
        f"{found['kernels']:,}",
        f"{found['peak_bytes'] / 2**30:.1f}",
        # Empty if JAX found the program in its cache, which does not store this figure.
        f"{found['compiled_bytes'] / 2**30:.1f}" if found["compiled_bytes"] else "",
    ]


def ran(found: Mapping[str, Found]) -> dict[str, Found]:
    return {name: each for name, each in found.items() if "error" not in each}


def tables(found: Mapping[str, Found]) -> str:
    every = table([HEAD, *(row(name, each) for name, each in found.items())])
    parts = (
        [name, *(f"{1e3 * each['others'][scope]:.1f}" for scope in SCOPES)]
        for name, each in ran(found).items()
    )
    return f"{every}\n\n{table([PARTS_HEAD, *parts])}"


def planned(config: Config, device_kind: str) -> str:
    """The predicted milliseconds of a step; empty for a GPU that is not in the table."""
    table = accelerators()
    try:
        cluster = Cluster(table[table_name(device_kind, table)])
    except UserError:
        return ""
    return f"{1e3 * predict(config, cluster).seconds:.1f}"


def ask(name: str, steps: int, keep: str) -> Found:
    """Measures a case in a process of its own; {"error": words} if that fails."""
    directory = keep and f"{keep}/{name.replace(' ', '_')}"
    arguments = ("--one", "--cases", name, "--steps", str(steps), "--keep", directory)
    return answer("benchmarks.gpu.timed", *arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Times training steps on this machine's first GPU."""
    made = parser("gpu.timed", main)
    made.add_argument("--cases", nargs="+", choices=tuple(ONE), default=list(ONE))
    made.add_argument(
        "--steps", type=int, default=20, help="timed steps, after five warm-up steps; 2 or more"
    )
    made.add_argument("--keep", default="", help="new directory for the programs and traces")
    made.add_argument(
        "--one", action="store_true", help="run the first case in this process and print JSON"
    )
    options = made.parse_args(argv)
    if options.steps < 2:
        raise UserError(f"--steps={options.steps} must be at least 2")
    if options.keep and Path(options.keep).exists() and not options.one:
        raise UserError(f"--keep={options.keep}: already exists; name a new directory")
    if options.one:
        keep = Path(options.keep) if options.keep else None
        print(json.dumps(measure(ONE[options.cases[0]], options.steps, keep)))
        return 0
    title = head("Training steps on one GPU, timed", "gpu.timed")
    report = last_section(Path(options.out), title) if options.out else None
    found: dict[str, Found] = {}
    for name in options.cases:
        found[name] = ask(name, options.steps, options.keep)
        print("  ".join(row(name, found[name])), flush=True)
        if report and ran(found):
            device = next(iter(ran(found).values()))["device"]
            report(f"{device}; {versions()}\n\n{tables(found)}\n")
    if not ran(found):
        raise UserError(f"nothing was measured: {found[options.cases[0]]['error']}")
    print(tables(found))
    return 0


if __name__ == "__main__":
    run_command(main)
