"""Compiles the programs of a run, in all of its processes together."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxptd.distributed import coordination
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.step.compiled import CompiledStep


class Programs:
    """Compiles each jitted program of a run when it is first used, and tells the watchdog so."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._compiled: dict[str, Callable] = {}

    @contextlib.contextmanager
    def ready(self, name: str, program: Callable, *args: Any) -> Iterator[Callable]:
        """Yields the program, compiled, for one call with these arguments.

        Args:
            name: of the program in this run.
            program: jitted.
            args: what it will be called with; of the same shapes each time.
        """
        first = name not in self._compiled
        with self._watchdog.phase(Phase.COMPILING if first else Phase.WAITING):
            if first:
                self._compiled[name] = compile_together(name, program, *args)
            yield self._compiled[name]


def compile_together(name: str, program: Callable, *args: Any) -> Callable:
    """Compiles a jitted program for these arguments, and waits until all processes have done so.

    Without that, the process that runs it first would wait for the others to compile it, and gloo
    waits for 30 s only. A run of one process compiles in the first call.
    """
    if isinstance(program, CompiledStep):
        program = program.jitted  # a run places its batches itself
    if coordination.is_alone():
        return program
    compiled = program.lower(*args).compile()  # type: ignore[attr-defined]
    coordination.barrier(f"compile.{name}", seconds=coordination.DAY)
    return compiled
