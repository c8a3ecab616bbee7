"""Counts the waits of a GPU's host for its device within a compiled program.

The condition of a loop whose length XLA does not know is computed on the device, and the host waits
for it before each trip and once more, when the loop ends. A conditional makes it wait once. While
it waits it starts no kernel.
"""

from jaxptd.analysis.hlo.text import WHOLE, Computations, Pipeline, parse


def host_waits(text: str, pipeline: Pipeline = WHOLE) -> float:
    """The waits of one execution of a program; of a pipeline the mean over its stages.

    A loop counts as one trip if neither XLA nor the pipeline knows its length.

    Args:
        text: `compiled.as_text()`.
        pipeline: its stages, whose loops and conditionals run differently often.
    """
    computations, entry = parse(text)
    return _waits(computations, entry, pipeline.stages, pipeline) / pipeline.stages


def _waits(computations: Computations, name: str, times: int, pipeline: Pipeline) -> int:
    """The waits of a computation that is executed so often."""
    found = 0
    for each in computations[name]:
        runs = pipeline.runs(each, times, computations)
        if each.kind == "conditional":
            found += times
        elif each.kind == "while" and each.trip_count is None:
            found += times + sum(number for _, number in runs)
        found += sum(_waits(computations, body, number, pipeline) for body, number in runs)
    return found
