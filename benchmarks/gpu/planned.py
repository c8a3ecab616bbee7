"""Compares predicted FLOPs and bytes of training steps with compiled ones. Compiles nothing.

`python -m benchmarks.gpu.planned [--out FILE]` predicts every case of `benchmarks.gpu.compiled` and
compares it with the budget of the newest JAX. It compares the FLOPs of matmuls, and the
milliseconds of all kernels that are neither matmul nor attention nor collective. Both sides compute
those milliseconds from bytes, at 4.3 TB/s.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.compiled import CASES, read_budget
from benchmarks.lib.pages import head, joined, parser, renew
from jaxptd.analysis.hardware import BANDWIDTH
from jaxptd.analysis.report import table
from jaxptd.costs.terms import HBM
from jaxptd.errors import run_command
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.planner.steps.step import predict

KERNELS = ("elementwise", "accumulation", "optimizer")
HEAD = ("case", "matmul TFLOP, predicted", "compiled", "difference")
HEAD += ("others, ms, predicted", "compiled", "difference")


class Compared(NamedTuple):
    """A case's matmul FLOPs and other kernels' milliseconds, predicted and compiled."""

    name: str
    tflop: float
    milliseconds: float
    compiled_tflop: float
    compiled_milliseconds: float

    @property
    def flop_error(self) -> float:
        """Difference of the FLOPs, as a share of the compiled ones."""
        return self.tflop / self.compiled_tflop - 1

    @property
    def bytes_error(self) -> float:
        """Difference of the bytes, as a share of the compiled ones."""
        return self.milliseconds / self.compiled_milliseconds - 1

    @property
    def row(self) -> list[str]:
        tflop = f"{self.tflop:,.2f}", f"{self.compiled_tflop:,.2f}", f"{self.flop_error:+.2%}"
        others = f"{self.milliseconds:,.1f}", f"{self.compiled_milliseconds:,.1f}"
        return [self.name, *tflop, *others, f"{self.bytes_error:+.0%}"]


def newest() -> str:
    """The newest version of JAX that has a budget."""
    return max(read_budget(), key=lambda version: [int(part) for part in version.split(".")])


def compared(names: Sequence[str] = ()) -> list[Compared]:
    """Predicts the cases that have a budget; names: which of them (none means all)."""
    stored, cluster = read_budget()[newest()], Cluster(find_accelerator("h200"))
    found = []
    for name in names or [name for name in CASES if name in stored]:
        terms = predict(CASES[name].config, cluster).terms
        flops = sum(term.flops for term in terms if term.kind != "attention")
        moved = sum(t.bytes for t in terms if t.resource == HBM or t.kind in KERNELS)
        figures = stored[name]["product_tflop"], stored[name]["others_ms"]
        found.append(Compared(name, flops / 1e12, 1e3 * moved / BANDWIDTH, *figures))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Compares predicted steps with compiled ones."""
    options = parser("gpu.planned", main).parse_args(argv)
    title = head("Predicted training steps, compared with compiled ones", "gpu.planned")
    text = joined(table([HEAD, *(each.row for each in compared())]))
    print(text)
    if options.out:
        renew(Path(options.out), title + text)
    return 0


if __name__ == "__main__":
    run_command(main)
