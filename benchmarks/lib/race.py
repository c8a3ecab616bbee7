"""Races compiled programs: each is compared with right results, then all are timed in one run."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from benchmarks.lib.measure import TOLERANCE, DifferentError


@dataclasses.dataclass
class Runner:
    """A compiled program, named `program.name`, with its arguments and its figures."""

    program: Any
    compiled: Any
    arrays: Sequence[Any]
    error: float = dataclasses.field(default=0.0, kw_only=True)
    seconds: list[float] = dataclasses.field(default_factory=list, kw_only=True)

    def step(self) -> Any:
        """Runs and times it once."""
        start = time.perf_counter()
        results = jax.block_until_ready(self.compiled(*self.arrays))
        self.seconds.append(time.perf_counter() - start)
        return results

    def laid_out(self, right: ArrayLike) -> np.ndarray:
        """Arranges a right result in the order of this program."""
        return np.asarray(right)

    def check(self, expected: Sequence[ArrayLike]) -> None:
        """Sets `error`, the largest relative error of the results.

        Raises:
            DifferentError: it is more than `TOLERANCE`.
        """
        for found, right in zip(self.step(), map(self.laid_out, expected), strict=True):
            error = np.linalg.norm(np.asarray(found) - right) / np.linalg.norm(right)
            self.error = max(self.error, float(error))
        if not self.error <= TOLERANCE:
            raise DifferentError(f"{self.program.name} is {self.error:.1e} off one device")

    @property
    def temp(self) -> float:
        return self.compiled.memory_analysis().temp_size_in_bytes

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def race(runs: Sequence[Runner], expected: Sequence[ArrayLike], *, steps: int) -> None:
    """Checks every program, then times each `steps` times, in turns."""
    for run in runs:
        run.check(expected)
        run.seconds.clear()
    for _ in range(steps):
        for run in runs:
            run.step()
