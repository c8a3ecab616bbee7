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
    begin = time.perf_counter()
    results = [step()()]
    ends = [begin, time.perf_counter()]
    waiting = step() if steps > 1 else None
    for number in range(1, steps):
        following = step() if number < steps - 1 else None
        results.append(waiting())
        ends.append(time.perf_counter())
        waiting = following
    return [end - start for start, end in itertools.pairwise(ends)], results
