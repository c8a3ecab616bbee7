"""Times training steps as they run in training: one is always queued behind the one that runs."""

import itertools
import time
from collections.abc import Callable
from typing import Any

Step = Callable[[], Callable[[], Any]]  # starts a step -> waits for its end and returns its result


def queued(step: Step, steps: int) -> tuple[list[float], list[Any]]:
    """The seconds from the end of each step to the end of the next one, and all results.

    The first is of the step itself, which runs alone and may compile.

    Args:
        step: starts one.
        steps: at least 1.
    """
    ends = [time.perf_counter()]
    results = [step()()]
    ends.append(time.perf_counter())
    started = (step() for _ in range(steps - 1))
    running = next(started, None)
    while running:
        following = next(started, None)
        results.append(running())
        ends.append(time.perf_counter())
        running = following
    return [end - start for start, end in itertools.pairwise(ends)], results
