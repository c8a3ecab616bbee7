"""Times programs: checks their results first, then times them alternately or as training steps."""

import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from benchmarks.lib.compiler import axis_sizes
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.costs.collective import Collective, add_up
from jaxptd.errors import UserError

TOLERANCE = 1e-5  # relative, float32: sums in a different order


class DifferentError(AssertionError):
    """The compared programs do not compute the same thing."""


def collectives(compiled: Any, mesh: Mesh) -> list[Collective]:
    """A compiled program's collectives by kind and axes, if XLA's partitioner did not make them.

    The partitioner's have other axes, and on CPU XLA lacks the pass that turns them into
    reduce-scatters.
    """
    return add_up(collectives_from_hlo(compiled.as_text(), axis_sizes(mesh)))


# ---- training steps -----------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A compiled step with its state: `step` runs it once."""

    compiled: Any
    state: Any
    batch: Any
    seconds: list[float] = dataclasses.field(default_factory=list)

    def step(self) -> dict[str, float]:
        """Runs and times one step; returns its loss and gradient norm."""
        start = time.perf_counter()
        self.state, metrics = jax.block_until_ready(self.compiled(self.state, self.batch))
        self.seconds.append(time.perf_counter() - start)
        return {name: float(metrics[name]) for name in ("loss", "grad_norm")}


Step = Callable[[], Callable[[], Any]]  # starts a step -> waits for it and returns its result


def queued(step: Step, steps: int) -> tuple[list[float], list[Any]]:
    """The seconds from the end of each step to the end of the next, and all results.

    Steps run as in training: one is always queued behind the running one. The first time is that of
    the first step alone, which may include compilation.

    Args:
        step: starts a step.
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


# ---- a race -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """One way to compute a function of arrays, sharded over a mesh; `ours` or a peer's."""

    name: str
    function: Callable[..., Array]  # on a device's blocks; if not `local`, on whole sharded arrays
    specs: Sequence[PartitionSpec]  # of the arguments; the result has the first one's
    ours: bool = dataclasses.field(default=False, kw_only=True)
    local: bool = dataclasses.field(default=True, kw_only=True)
    typed: bool = dataclasses.field(default=True, kw_only=True)  # passes check_vma=True

    def shardings(self, mesh: Mesh) -> list[NamedSharding]:
        """Those of the arguments."""
        return [NamedSharding(mesh, spec) for spec in self.specs]

    def gradients(self, mesh: Mesh, *, apart: bool = False) -> Any:
        """Makes the jitted `arguments, dy -> y, gradients`; apart: all of y before backward."""

        def both(*arrays: Array) -> tuple[Array, ...]:
            y, backward = jax.vjp(self.function, *arrays[:-1])
            dy = arrays[-1]
            if apart:
                y, dy = lax.optimization_barrier((y, dy))  # in training dy depends on y
            return y, *backward(dy)

        given, made = (*self.specs, self.specs[0]), (self.specs[0], *self.specs)
        if self.local:
            specs: dict[str, Any] = {"in_specs": given, "out_specs": made}
            return jax.jit(jax.shard_map(both, mesh=mesh, **specs, check_vma=self.typed))
        lay = partial(jax.tree.map, partial(NamedSharding, mesh))
        return jax.jit(both, in_shardings=lay(given), out_shardings=lay(made))


@dataclasses.dataclass
class Runner:
    """A compiled program with its arguments and its figures."""

    program: Program
    compiled: Any
    arrays: Sequence[Any]
    error: float = dataclasses.field(default=0.0, kw_only=True)
    seconds: list[float] = dataclasses.field(default_factory=list, kw_only=True)

    def laid_out(self, right: ArrayLike) -> np.ndarray:
        """Arranges a reference result in this program's order."""
        return np.asarray(right)

    def check(self, expected: Sequence[ArrayLike]) -> None:
        """Sets `error` to the largest relative error of the results.

        Raises:
            DifferentError: it is more than `TOLERANCE`.
        """
        found = self.compiled(*self.arrays)
        for ours, right in zip(found, map(self.laid_out, expected), strict=True):
            error = np.linalg.norm(np.asarray(ours) - right) / np.linalg.norm(right)
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
    """Checks every program, then times each `steps` times, alternating between them."""
    for run in runs:
        run.check(expected)
    for _ in range(steps):
        for run in runs:
            start = time.perf_counter()
            jax.block_until_ready(run.compiled(*run.arrays))
            run.seconds.append(time.perf_counter() - start)


# ---- on a GPU -----------------------------------------------------------------------------------


def first_gpu() -> Any:
    """Returns the first device, which must be a GPU.

    Raises:
        UserError: JAX finds no GPU.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise UserError("JAX finds no GPU; pip install 'jax[cuda13]'")
    return device


def answer(module: str, *arguments: str) -> dict[str, Any]:
    """Runs `python -m module` -> the JSON of its last line; {"error": words} if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word"]
        return {"error": lines[-1].removeprefix("error: ")[:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])
