"""Drawn cases in several processes at once, which add to one record."""

import dataclasses
import multiprocessing
from collections.abc import Callable
from typing import Any

SHARED = 4  # cases in a row with the same step on one device


@dataclasses.dataclass(frozen=True)
class Share:
    """Every K-th group of cases that share the step of one device.

    Args:
        number: of the share, from 0.
        of: K, shares together.
    """

    number: int = 0
    of: int = 1

    def has(self, case: int) -> bool:
        """True for the numbers of this share's cases."""
        return case // SHARED % self.of == self.number


def run_in_processes(work: Callable[..., None], count: int, *given: Any) -> list[int]:
    """Calls `work(Share, *given)` for each share, in a new process; returns their exit codes.

    A process that a signal ended has its number, below 0.

    Args:
        work: a function of a module, which the processes import.
        count: processes at once.
        given: the same for all.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    shares = [Share(number, count) for number in range(count)]
    processes = [context.Process(target=work, args=(share, *given)) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode or 0 for process in processes]
