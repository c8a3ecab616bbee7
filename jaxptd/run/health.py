"""Ends a run that diverges, before a state that is not finite is saved."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jaxptd.errors import UserError

START_AGAIN = (
    "start again in another train.run_dir with a smaller optimizer.learning_rate or more "
    "warmup_steps"
)


@dataclasses.dataclass(frozen=True)
class Health:
    """Raises UserError when the steps, parameters or evaluations of a run are unusable.

    Args:
        max_skipped: number of consecutive skipped steps that ends the run.
        good_steps: returns the steps with good checkpoints.
    """

    max_skipped: int
    good_steps: Callable[[], Sequence[int]]

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises UserError, with the reason, if too many steps in a row were skipped.

        Args:
            step: number of the step.
            metrics: of this step.
        """
        if metrics["skipped_in_row"] < self.max_skipped:
            return
        not_finite = [n for n in ("loss", "grad_norm") if not math.isfinite(metrics[n])]
        name = not_finite[0] if not_finite else "grad_norm"
        above = "" if not_finite else ", above optimizer.skip_above,"
        steps = self.good_steps()
        last = (
            f"the last good checkpoint is step {max(steps)}" if steps else "there is no checkpoint"
        )
        resume = "resume from it with another optimizer.skip_above, or " if steps else ""
        raise UserError(
            f"{name} is {metrics[name]:g}{above} at step {step}, the last of "
            f"{metrics['skipped_in_row']:.0f} skipped steps in a row "
            f"(train.max_skipped={self.max_skipped}); {last}; {resume}{START_AGAIN}"
        )

    def check_params(self, step: int, params: Mapping[str, Array]) -> None:
        """Raises UserError naming the first parameter that is not finite after this step."""
        for name, p in params.items():
            if not _is_finite(p):
                raise UserError(
                    f"parameter {name} is not finite after step {step}, which is not saved; "
                    f"{START_AGAIN}"
                )

    def check_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Raises UserError naming the first value that is not finite."""
        for name, value in values.items():
            if not math.isfinite(value):
                raise UserError(
                    f"{name} is {value} at step {step}, which is not saved; {START_AGAIN}"
                )


@jax.jit
def _is_finite(p: Array) -> Array:
    """Checks one parameter at a time, so that only one is on the device even with offloading."""
    return jnp.isfinite(jax.device_put(p, jax.memory.Space.Device)).all()
