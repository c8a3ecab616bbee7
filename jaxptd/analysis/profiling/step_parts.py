"""What part of a step each kernel belongs to, and the least time that each part takes.

A part is a scope of the model (`SCOPES`: what `jax.named_scope` calls it there) and a kind of
kernel. The least time is its FLOPs at the GPU's peak, or its bytes at the bandwidth that kernels
reach. `step_pictures.py` draws it; `profile.py` measures the same parts where a step can run.
"""

import collections
import re

from jaxptd.analysis.flops import attention_flops, executions, flops
from jaxptd.analysis.hardware import BANDWIDTH, PEAK_FLOPS
from jaxptd.analysis.hlo.kernels import ATTENTION, OTHER, PRODUCT, kernels
from jaxptd.step import Program

PEAK = PEAK_FLOPS["H200"]
REST = "rest"
SCOPES = ("embedding", "norm", "attention", "mlp", "loss", "optimizer", REST)
_SCOPE = re.compile(rf"\b({'|'.join(SCOPES[:-1])})\b")
Times = dict[tuple[str, str], float]  # seconds of a step, by scope and kind


def scope_of(name: str) -> str:
    """The innermost scope in a name that JAX gave."""
    found = _SCOPE.findall(name)
    return found[-1] if found else REST


def least(program: Program, text: str) -> Times:
    """Of a step compiled for a GPU, collectives left out. text: of the compiled program."""
    times: Times = collections.defaultdict(float)
    for equation, count, names in executions(program):
        for kind, weigh in ((PRODUCT, flops), (ATTENTION, attention_flops)):
            times[scope_of(names), kind] += count * weigh(equation) / PEAK
    for kernel in kernels(text):
        if kernel.kind == OTHER:
            times[scope_of(kernel.instruction.op_name), OTHER] += kernel.bytes / BANDWIDTH
    return times


def lines(times: Times) -> list[list[str]]:
    """The rows of a table: scope, kind, milliseconds, share; the longest first."""
    total = sum(times.values())
    longest = sorted(times.items(), key=lambda item: -item[1])
    return [
        [scope, kind, f"{1e3 * seconds:.3g}", f"{seconds / total:.1%}"]
        for (scope, kind), seconds in longest
        if seconds
    ]
