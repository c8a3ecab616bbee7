"""Compares the peak memory model with training steps compiled for H200s; no GPU is needed.

`python -m benchmarks.memory.peak [--steps 'plain*' ...] [--out benchmarks/results]`

Compiles each step of `peak_steps.yaml` that is not yet in the folder's `peak.csv`, and appends its
row as soon as it is compiled, so a stopped run continues where it was. `--predict` compiles nothing
and only recomputes the model's columns. Then prints the errors as a Markdown table. If the file has
every step, also writes them to `peak.md`. A step is the text of its settings, `SECTION.FIELD=VALUE`
each, so that a table's row describes it completely.

Columns: name and settings; XLA's bytes of one device (peak, arguments, temporaries, those in host
memory); `compiled`, the bytes that the step needs in device memory, which are arguments and
temporaries. (XLA's own peak ignores gaps between arrays and includes host memory.) Then the model's
parts, its total, and its error in percent. `benchmarks/gpu/compile_gpu.py` says what compiling
needs.
"""

import csv
import dataclasses
import fnmatch
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from benchmarks.lib.compiler import PACKAGES, UNTRIED, compile_only, on_h200s
from benchmarks.lib.pages import RESULTS, gib, head, joined, parser, renew, write
from jaxptd.analysis import memory_model
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.peak import Peak, peak
from jaxptd.analysis.report import table, versions
from jaxptd.compiling import device_bytes
from jaxptd.config import Config, ModelConfig, TrainConfig, nested
from jaxptd.errors import UserError, run_command
from jaxptd.mesh import Layout
from jaxptd.step.resolved import resolve

FILE, PAGE = "peak.csv", "peak.md"
COMPILED = ("peak", "arguments", "temporaries", "host_arguments", "host_temporaries", "compiled")
PARTS = tuple(field.name for field in dataclasses.fields(Peak))
COLUMNS = ("name", "settings", *COMPILED, *PARTS, "model", "error_percent")
HEAD = ("step", "layout", "remat", "M", "compiled GiB", "model GiB", "error", "fullest at")
Row = dict[str, str]


def _steps(name: str) -> dict[str, str]:
    """The settings of each step of a list in `peak_steps.yaml`, by step name."""
    file, found = yaml.safe_load(Path(__file__).with_name("peak_steps.yaml").read_text()), {}
    for line in file[name].splitlines():
        step, (model, batch, micro_batches, *options) = line[:22].strip(), line[22:].split()
        cut = options.index(":") if ":" in options else len(options)
        of_model = [*file["models"][model].split(), "dtype=bfloat16", *options[:cut]]
        train = [f"global_batch_size={batch}", f"micro_batches={micro_batches}"]
        sections = {"model": of_model, "layout": options[cut + 1 :], "train": train}
        found[step] = " ".join(f"{s}.{each}" for s, those in sections.items() for each in those)
    return found


HELD_OUT = _steps("held_out")
STEPS = _steps("steps") | HELD_OUT


def config_of(settings: str) -> Config:
    """Makes a config from the text of its settings; later settings override earlier ones."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "layout": {}, "train": {}}
    for setting in settings.split():
        name, _, value = setting.partition("=")
        section, _, field = name.partition(".")
        sections[section][field] = yaml.safe_load(value)
    train = TrainConfig(**sections["train"])
    return Config(
        ModelConfig(**nested(sections["model"])), Layout(**sections["layout"]), train=train
    )


def predict(config: Config) -> Peak:
    """The model's prediction for a config on GPUs."""
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    resolved = resolve(config, SimpleNamespace(devices=SimpleNamespace(flat=[gpu])))
    state = memory_model.state(config, resolved.zero)
    return peak(config, state, resolved.plan)


def compile_row(settings: str) -> dict[str, int]:
    """Compiles a step for H200s; the bytes of one device."""
    program = on_h200s(config_of(settings))
    memory = compile_step(program, UNTRIED).memory_analysis()
    return {
        "peak": memory.peak_memory_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "host_arguments": memory.host_argument_size_in_bytes,
        "host_temporaries": memory.host_temp_size_in_bytes,
        "compiled": device_bytes(program, memory),
    }


def row_of(name: str, settings: str, compiled: Mapping[str, Any]) -> Row:
    """Makes a row of the file."""
    found = predict(config_of(settings))
    error = 100 * (found.total / int(compiled["compiled"]) - 1)
    cells = {"name": name, "settings": settings} | {key: compiled[key] for key in COMPILED}
    cells |= {"moment": found.moment} | found.parts
    cells |= {"model": found.total, "error_percent": f"{error:.2f}"}
    return {key: str(cells[key]) for key in COLUMNS}


def read(path: Path) -> list[Row]:
    """Reads the rows of a file; returns none if the file does not exist."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def save(path: Path, rows: Sequence[Row]) -> None:
    """Writes all rows of a file, in the order of `STEPS`."""
    order = list(STEPS)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: order.index(row["name"])))
    write(path, text.getvalue())


def report(rows: Sequence[Row]) -> str:
    """Makes the table of errors and sentences that sum them up."""
    found = [("", rows), ("held out, ", [row for row in rows if row["name"] in HELD_OUT])]
    sentences = [summary(words, those) for words, those in found if those]
    return joined(table([HEAD, *map(_cells, rows)]), *sentences)


def summary(words: str, rows: Sequence[Row]) -> str:
    """Sums up the errors of some rows in a sentence."""
    errors = [float(row["error_percent"]) for row in rows]
    mean = sum(map(abs, errors)) / len(errors)
    return (
        f"{len(rows)} steps, {words}mean error {mean:.2f} %, most above {max(errors):+.2f} %, "
        f"most below {min(errors):+.2f} %."
    )


def _cells(row: Row) -> list[str]:
    config = config_of(row["settings"])
    model = config.model
    first = "" if model.remat_layers is None else f", {model.remat_layers} layers"
    return [
        row["name"],
        str(config.layout),
        model.remat + first,
        str(config.train.micro_batches),
        gib(int(row["compiled"])),
        gib(int(row["model"])),
        f"{float(row['error_percent']):+.1f} %",
        row["moment"],
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Compares the peak memory model with training steps compiled for H200s."""
    made = parser("memory.peak", main, out="folder of peak.csv")
    made.set_defaults(out=str(RESULTS))
    made.add_argument("--steps", nargs="+", default=["*"], help="names of steps, or patterns")
    made.add_argument("--predict", action="store_true", help="compile nothing")
    options = made.parse_args(argv)
    wanted = [n for n in STEPS if any(fnmatch.fnmatch(n, each) for each in options.steps)]
    if not wanted:
        raise UserError(f"--steps {' '.join(options.steps)}: no step has this name; see STEPS")
    path = Path(options.out) / FILE
    rows = {row["name"]: row for row in read(path) if STEPS.get(row["name"]) == row["settings"]}
    if options.predict:
        rows = {name: row_of(name, row["settings"], row) for name, row in rows.items()}
        save(path, list(rows.values()))
    else:
        compile_only()
        for name in wanted:
            if name not in rows:
                rows[name] = row_of(name, STEPS[name], compile_row(STEPS[name]))
                save(path, list(rows.values()))
                print("  ".join(_cells(rows[name])), flush=True)
    if set(rows) == set(STEPS):
        text = joined(versions(*PACKAGES[2:]), report([rows[n] for n in STEPS]))
        title = head("Peak memory: the model against the compiler", "memory.peak")
        renew(path.with_name(PAGE), title + text)
    chosen = [rows[name] for name in wanted if name in rows]
    print(report(chosen) if chosen else f"{path} has no such step")
    return 0


if __name__ == "__main__":
    run_command(main)
