"""Records what must stay the same when code is only moved or renamed, and compares records.

`python -m benchmarks.yardstick --out DIR` writes into DIR:

- `<layout>.hlo`: the HLO of a training step in ten layouts, before and after XLA's passes on CPUs,
  without references to source lines;
- `comms-<config>.json`: the output of `python -m jaxptd.comms --json` for every config with at most
  eight devices;
- `tests.txt`: the ids of the collected tests, without their folders.

`python -m benchmarks.yardstick --compare OLD NEW` prints the files that differ and exits with 1 if
there are any. Both records must come from the same versions of Python and JAX. Compiled budgets
are checked separately, by `python -m benchmarks.gpu.compiled --check`.
"""

import contextlib
import hashlib
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxptd import Config, Layout, ModelConfig, Program, TrainConfig, load_config, make_mesh
from jaxptd.comms import main as comms
from jaxptd.errors import Parser, run_command

ROOT = Path(__file__).parents[1]
DEVICES = 8
TENSOR = {"tp": 4, "sequence_parallel": True}
# Name, layout, and the fields that differ from MODEL.
LAYOUTS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("one-device", {}, {}),
    ("dp", {"dp": 8}, {}),
    ("tp", {"tp": 4}, {}),
    ("sequence-parallel", TENSOR, {"dropout": 0.1}),
    ("collective-matmul", {**TENSOR, "collective_matmul": True}, {}),
    ("cp-zigzag", {"cp": 4}, {"dropout": 0.1}),
    ("grid-cannon", {"row": 2, "col": 2, "matmul2d": "cannon"}, {}),
    ("pp-1f1b", {"pp": 4}, {"num_layers": 4}),
    ("pp-zb-v-zero-3", {"pp": 2, "dp": 2, "schedule": "zb-v", "zero": 3}, {"num_layers": 4}),
    (
        "everything",
        {"pp": 2, "cp": 2, "tp": 2, "sequence_parallel": True, "zero": 2, "schedule": "zb-h1"},
        {"num_layers": 3, "dropout": 0.1, "dtype": "bfloat16", "remat": "dots"},
    ),
)
MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "seq_length": 16, "vocab_size": 13}


def program(layout: dict[str, Any], model: dict[str, Any]) -> Program:
    config = Config(
        model=ModelConfig(**{**MODEL, **model}),
        layout=Layout(**layout),
        train=TrainConfig(global_batch_size=8, micro_batches=4 if "pp" in layout else 1),
    )
    return Program(config, make_mesh(config.layout))


def without_places(text: str) -> str:
    """A module's text without metadata, names of modules, and tables of source files."""
    text = re.sub(r", metadata=\{[^{}]*\}", "", text)
    text = re.sub(r"HloModule [\w.\-]+", "HloModule step", text)
    return re.sub(r"(?ms)^(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?\n\n", "", text)


def step_text(step: Program) -> Iterator[str]:
    """Yields the HLO of the training step as it enters XLA, and as it leaves it."""
    jitted: Any = step.train_step
    lowered = jitted.lower(step.abstract_state, step.abstract_batch)
    yield lowered.compiler_ir("hlo").as_hlo_text()
    yield lowered.compile().as_text()


def collected_tests() -> str:
    """Lists each test's name and parameters, and how many tests have that id."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ids = [line.partition("::")[2] for line in found.splitlines() if "::" in line]
    return "\n".join(sorted(each for each in ids if each.startswith("test_"))) + "\n"


def counted(config: str) -> str:
    """The output of `comms --json` for a config."""
    printed = io.StringIO()
    kernel = () if load_config(config).model.images else ("--model.attention", "xla")
    with contextlib.redirect_stdout(printed):
        comms(["--config", config, *kernel, "--train.platform", "cpu", "--json"])
    return printed.getvalue()


def records() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields file names and the functions that make their text."""
    for name, layout, model in LAYOUTS:
        made = program(layout, model)
        yield f"{name}.hlo", lambda made=made: "\n".join(map(without_places, step_text(made)))  # type: ignore[misc]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if load_config(path).layout.num_devices <= DEVICES:
            yield f"comms-{path.stem}.json", lambda path=path: counted(str(path))  # type: ignore[misc]
    yield "tests.txt", collected_tests


def differing(old: Path, new: Path) -> list[str]:
    """Lists the files that differ between two directories."""
    names = {path.name for directory in (old, new) for path in directory.iterdir()}

    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"

    return sorted(name for name in names if digest(old / name) != digest(new / name))


def main(argv: Sequence[str] | None = None) -> int:
    """Records compiled programs, counted bytes and test ids, or compares two records."""
    parser = Parser(prog="python -m benchmarks.yardstick", description=main.__doc__)
    parser.add_argument("--out", type=Path, help="directory to write a record into")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--only", default="", help="only files whose names contain this")
    options = parser.parse_args(argv)
    if options.compare:
        names = differing(*options.compare)
        print("\n".join(f"differs: {name}" for name in names) or "the same")
        return int(bool(names))
    if not options.out:
        parser.error("give --out or --compare")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in records():
        if options.only in name:
            (options.out / name).write_text(text(), encoding="utf-8")
            print(name, flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
