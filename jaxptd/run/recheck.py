"""Tells faulty hardware from bad data: `train.check_steps`.

A skipped step leaves parameters and moments as they were, so it can be run again on the same batch
from the same state, without a second state in memory. If it is skipped again, its data or the
parameters are the cause; if not, a device computed wrong. Copies of the state on several devices
are also compared after each step; these differ only if the hardware is faulty.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxptd.distributed import coordination
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.errors import UserError
from jaxptd.step import Program
from jaxptd.step.batch import Batch
from jaxptd.step.program import Programs
from jaxptd.step.replicas import checksums, difference, has_copies
from jaxptd.step.state import Metrics, State

SHOWN = ("loss", "grad_norm")
DOCTOR = "jaxptd doctor compares the arithmetic of devices"


def require_copies(program: Program) -> None:
    """Raises UserError if copies are to be compared and no device holds any."""
    if program.config.train.check_steps == "replicas" and not has_copies(program):
        raise UserError(
            f"train.check_steps=replicas with layout ({program.config.layout}): no two devices "
            "hold copies of a parameter, so there is nothing to compare; use train.check_steps="
            "skipped"
        )


@dataclasses.dataclass(frozen=True)
class Recheck:
    """Checks each step of a run that has ended, before the next one begins.

    Args:
        program: of the run.
        programs: compiles, in all processes together.
        watchdog: of the main thread.
        save: saves a state as that of a step.
        good_steps: returns the steps with good checkpoints.
        say: prints a line.
    """

    program: Program
    programs: Programs
    watchdog: Watchdog
    save: Callable[[State, int], None]
    good_steps: Callable[[], list[int]]
    say: Callable[[str], None]

    def __call__(self, step: int, batch: Batch, state: State, metrics: Metrics) -> State:
        """The state to go on from: the one given, or the same one computed again.

        Args:
            step: its number.
            batch: of the step.
            state: after the step.
            metrics: of the step.

        Raises:
            UserError: the hardware is faulty; says where, and which state is saved.
        """
        how = self.program.config.train.check_steps
        if how == "replicas":
            self._compare(step, state)
        if how != "none" and self._is_skipped(metrics):
            return self._again(step, batch, state, metrics)
        return state

    def _is_skipped(self, metrics: Metrics) -> bool:
        """Waits for a step. True if it was skipped."""
        with self.watchdog.phase(Phase.WAITING):
            return int(metrics["skipped_in_row"]) > 0

    # ---- a skipped step, again ------------------------------------------------------------------

    def _again(self, step: int, batch: Batch, state: State, metrics: Metrics) -> State:
        """Runs a skipped step again; the state after it, if it is skipped again.

        A program that computes the metrics alone keeps the state. Only if that finds nothing wrong,
        the state is saved, and the step itself, whose program may round otherwise, decides.
        """
        before = {**state, **self._counters(state["step"], state["guard"])}
        program = self.program.step_metrics
        with self.programs.ready("step_metrics", program, before, batch) as run:
            again = run(before, batch)
        if self._is_skipped(again):
            self._blame_data(step, metrics)
            return state
        saved = self._saved(before, step - 1)
        step_itself = self.program.train_step
        with self.programs.ready("train_step", step_itself, before, batch) as train_step:
            after, again = train_step(before, batch)
        if self._is_skipped(again):
            self._blame_data(step, metrics)
            return after
        devices = self.program.mesh.devices
        hosts = {device.process_index for device in devices.flat}
        where = f"one of the {devices.size} devices"
        where += f" of {len(hosts)} processes" * (len(hosts) > 1)
        raise UserError(
            f"step {step} was skipped with {_shown(metrics)}; run again on the same batch from the "
            f"same state it has {_shown(again)}: {where} computed wrong. {saved}; find the device "
            f"({DOCTOR}), leave it out, and resume"
        )

    @cached_property
    def _counters(self) -> Callable[[Array, Mapping[str, Array]], dict[str, Any]]:
        """(step, guard) -> those before a skipped step; the count of good steps is lost."""

        def before(step: Array, guard: Mapping[str, Array]) -> dict[str, Any]:
            one_less = {name: guard[name] - 1 for name in ("skipped", "in_row")}
            return {"step": step - 1, "guard": {**guard, **one_less}}

        like = self.program.abstract_state
        shardings = jax.tree.map(lambda x: x.sharding, {k: like[k] for k in ("step", "guard")})
        return jax.jit(before, out_shardings=shardings)

    def _saved(self, state: State, step: int) -> str:
        """Saves the state before a step, if the run saves any; says what it may resume from."""
        if self.program.config.checkpoint.every == 0 or step == 0:
            return "Nothing is saved"
        with self.watchdog.phase(Phase.SAVING):
            known = str(step in self.good_steps())
            # All processes do what the first one sees: a network's folder may look older elsewhere.
            if coordination.share("recheck", known)[0] == "False":  # a saved one may have a loss
                self.save(state, step)
        return f"The state of step {step}, before it, is saved"

    def _blame_data(self, step: int, metrics: Metrics) -> None:
        size = self.program.config.train.global_batch_size
        first = (step - 1) * size
        self.say(
            f"warning: step {step} was skipped with {_shown(metrics)}, and again when it was run "
            f"a second time: not the hardware, but samples {first} to {first + size - 1} or the "
            "parameters are the cause"
        )

    # ---- copies of the state --------------------------------------------------------------------

    @cached_property
    def _checksums(self) -> Callable[[State], dict[str, Array]]:
        return checksums(self.program)

    def _compare(self, step: int, state: State) -> None:
        """Raises UserError if devices hold copies of parameters or moments that differ."""
        with self.programs.ready("checksums", self._checksums, state) as run:
            sums = run(state)
        with self.watchdog.phase(Phase.WAITING):
            found = difference({k: np.asarray(x) for k, x in sums.items()}, self.program.mesh)
        if found is None:
            return
        with self.watchdog.phase(Phase.SAVING):
            good = self.good_steps()
        last = f"the last good checkpoint is step {max(good)}" if good else "there is no checkpoint"
        raise UserError(
            f"after step {step} copies of the same parameters or moments differ: on {found}; the "
            f"state is not saved, {last}; leave the device out ({DOCTOR}), and resume"
        )


def _shown(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {float(jnp.asarray(metrics[name])):.6g}" for name in SHOWN)
