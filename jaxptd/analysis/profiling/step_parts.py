"""Assigns each kernel to a part of the step, and bounds the time of each part from below.

A part is a scope of the model, as `jax.named_scope` names it (`SCOPES`), and a kind of kernel. The
least time is its FLOPs at an H200's peak, or its bytes at the bandwidth that kernels reach there.
"""

import collections
import dataclasses
import re

from jaxptd.analysis.flops import attention_flops, executions, flops
from jaxptd.analysis.hardware import BANDWIDTH, PEAK_FLOPS
from jaxptd.analysis.hlo.kernels import ATTENTION, OTHER, PRODUCT, kernels
from jaxptd.display import Table
from jaxptd.step import Program

PEAK = PEAK_FLOPS["H200"]
REST = "rest"
SCOPES = ("embedding", "norm", "attention", "mlp", "loss", "optimizer", REST)
_SCOPE = re.compile(rf"\b({'|'.join(SCOPES[:-1])})\b")
Times = dict[tuple[str, str], float]  # seconds of a step, by scope and kind


@dataclasses.dataclass(frozen=True, repr=False)
class ProfileReport:
    """The measured seconds of a step's parts.

    Args:
        title: layout and devices.
        times: by scope and kind of kernel.
    """

    title: str
    times: Times

    def table(self) -> Table:
        """The parts, longest first."""
        title = f"{self.title}: {1e3 * sum(self.times.values()):.3g} ms a step"
        return Table(title, ("part", "kernels", "ms a step", "share"), lines(self.times))

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def scope_of(name: str) -> str:
    """The innermost of `SCOPES` in a name that JAX gave."""
    found = _SCOPE.findall(name)
    return found[-1] if found else REST


def least(program: Program, text: str) -> Times:
    """The least seconds of each part of a step on an H200, without collectives.

    text: the scheduled program, compiled for the GPU.
    """
    times: Times = collections.defaultdict(float)
    for equation, count, names in executions(program):
        for kind, weigh in ((PRODUCT, flops), (ATTENTION, attention_flops)):
            times[scope_of(names), kind] += count * weigh(equation) / PEAK
    for kernel in kernels(text):
        if kernel.kind == OTHER:
            times[scope_of(kernel.instruction.op_name), OTHER] += kernel.bytes / BANDWIDTH
    return times


def lines(times: Times) -> list[list[str]]:
    """Rows of a table, longest time first: scope, kind, milliseconds, share."""
    total = sum(times.values())
    longest = sorted(times.items(), key=lambda item: -item[1])
    return [
        [scope, kind, f"{1e3 * seconds:.3g}", f"{seconds / total:.1%}"]
        for (scope, kind), seconds in longest
        if seconds
    ]
