"""Compares training speed with PyTorch on one NVIDIA GPU, in the same run on the same GPU.

`python -m benchmarks.one_device [--cases 124m 1.5b ...] [--steps 20] [--out
benchmarks/results/gpu.md]`

The models are GPT-2 in several sizes, compared with a PyTorch GPT-2 written for speed, and two of
`configs/`, compared with the models of transformers. Each trainer of each case runs in a process of
its own, one after the other, so that neither holds memory that the other needs (see `trainer.py`).
MFU counts the matmuls that a step needs by formula, 6N + 12 L D T per token; causal MFU leaves out
the half of attention that the mask hides. With `--out`, a JSON file next to the table stores every
step's time; it also keeps earlier runs of other cases. Both are written after each case.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.lib.pages import head, last_section, parser, write
from benchmarks.lib.timing import answer
from benchmarks.one_device.cases import CASES, mfu
from benchmarks.one_device.trainer import TRAINERS, add_steps, check_steps
from jaxptd.analysis import hardware
from jaxptd.analysis.report import table
from jaxptd.errors import UserError, run_command

HEAD = ("model", "B, T", "trainer", "tokens/s", "MFU", "causal MFU", "step ms, median")
HEAD += ("10 % to 90 %", "peak GiB", "attention", "against torch")
Result = Mapping[str, Any]  # what a trainer prints


def measure(trainer: str, name: str, steps: int) -> Result:
    """Runs a trainer on a case and returns what it prints, or {"error": words} if it cannot run."""
    arguments = (trainer, "--case", name, "--steps", str(steps))
    return answer("benchmarks.one_device.trainer", *arguments)


def row(name: str, trainer: str, found: Result, peer: Result | None) -> list[str]:
    """Makes a line of the table."""
    case = CASES[name]
    batch, length = case.config.train.global_batch_size, case.config.model.seq_length
    if "error" in found:
        words = f"not measured: {found['error']}"
        return [name, f"{batch}, {length}", trainer, words, *[""] * (len(HEAD) - 4)]
    head = [f"{name}, {found['parameters'] / 1e6:,.0f} M", f"{batch}, {length}", trainer]
    seconds = statistics.median(found["seconds"])
    low, *_, high = statistics.quantiles(found["seconds"], n=10)
    peak = hardware.peak_of(found["device"]) or 0.0  # 0 if we have no data sheet for it
    shares = [mfu(case, seconds, peak, causal=causal) for causal in (False, True)]
    against = peer and "error" not in peer and statistics.median(peer["seconds"]) / seconds
    return [
        *head,
        f"{case.tokens / seconds:,.0f}",
        *("" if math.isnan(share) else f"{share:.1%}" for share in shares),
        f"{1e3 * seconds:.1f}",
        f"{1e3 * low:.1f} to {1e3 * high:.1f}",
        f"{found['peak_bytes'] / 2**30:.1f}",
        found["attention"],
        f"**{against:.2f}x**" if against else "",
    ]


def rows(name: str, found: Mapping[str, Result]) -> list[list[str]]:
    """The rows of a case, one for each trainer."""
    peers = dict.fromkeys(TRAINERS, found["torch"]) | {"torch": None}
    return [row(name, trainer, found[trainer], peers[trainer]) for trainer in TRAINERS]


def versions(found: Mapping[str, Mapping[str, Result]]) -> str:
    """Date, device and versions of the trainers that ran."""
    ran = [each for case in found.values() for each in case.values() if "error" not in each]
    known = {name: version for each in ran for name, version in each["versions"].items()}
    devices = sorted({each["device"] for each in ran})
    words = [f"{name} {version}" for name, version in sorted(known.items())]
    return f"{datetime.now(UTC):%Y-%m-%d}; {', '.join([*devices, *words]) or 'no GPU'}."


def ran(found: Mapping[str, Mapping[str, Result]]) -> bool:
    """True if this library trained a case."""
    return any("error" not in each["jaxptd"] for each in found.values())


def reporter(out: Path) -> Callable[[Sequence[list[str]], Mapping[str, Any]], None]:
    """A function that writes a run's rows and results, and replaces them when called again.

    The tables of earlier runs and the times of other cases stay.

    Raises:
        UserError: the file of times holds something else.
    """
    title = head("One GPU, compared with PyTorch", "one_device")
    section, times = last_section(out, title), out.with_suffix(".json")
    try:
        every = dict(json.loads(times.read_text(encoding="utf-8"))) if times.exists() else {}
    except (ValueError, TypeError) as error:
        raise UserError(f"{times}: no times by case; move it away or name another --out") from error

    def report(lines: Sequence[list[str]], found: Mapping[str, Any]) -> None:
        section(f"{versions(found)}\n\n{table([HEAD, *lines])}\n")
        write(times, json.dumps(every | dict(found), indent=1))

    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Trains models on this machine's first GPU, with jaxptd and with PyTorch."""
    made = parser("one_device", main)
    made.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    add_steps(made)
    options = made.parse_args(argv)
    check_steps(options.steps)
    report = reporter(Path(options.out)) if options.out else None
    lines, found = [], {}
    for name in options.cases:
        found[name] = {trainer: measure(trainer, name, options.steps) for trainer in TRAINERS}
        lines += rows(name, found[name])
        for line in lines[-len(TRAINERS) :]:
            print("  ".join(line), flush=True)
        if report and ran(found):
            report(lines, found)
    if not ran(found):
        raise UserError(f"nothing was measured: {found[options.cases[0]]['jaxptd']['error']}")
    return 0


if __name__ == "__main__":
    run_command(main)
