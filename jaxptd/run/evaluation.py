"""Evaluations of a run: the samples that they read, and the means of their losses."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.data import NOT_COUNTED, Samples
from jaxptd.distributed import coordination
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.errors import UserError
from jaxptd.models.families import family_of
from jaxptd.step import Batch, Program
from jaxptd.step.program import CompiledStep

# ---- batches -------------------------------------------------------------------------------------


def read_batch(
    program: Program,
    windows: Samples,
    *,
    first: int,
    end_of_document: int,
    beyond: float = math.inf,
) -> Batch:
    """Reads the samples `first`, `first + 1`, ...; each process reads only its own devices' rows.

    Args:
        program: the program that takes the batch.
        windows: of training or validation.
        first: sample number of the batch's first row.
        end_of_document: id of the token that ends a document.
        beyond: samples from this number on are masked out of the loss.
    """

    def rows_of(field: str, numbers: slice) -> np.ndarray:
        sample_B = first + np.arange(program.config.train.global_batch_size)[numbers]
        rows = make_rows(windows, field, sample_B, end_of_document=end_of_document)
        inside = (sample_B < beyond).reshape(-1, *[1] * (rows.ndim - 1))
        return np.where(inside, rows, NOT_COUNTED) if field in batches.targets else rows

    batches, make_rows = program.batches, program.resolved.family.rows
    return batches.read(rows_of)


# ---- programs, compiled in all processes together ------------------------------------------------


class Programs:
    """Compiles each jitted program of a run on first use, and tells the watchdog."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog, self._alone = watchdog, coordination.is_alone()
        self._compiled: dict[str, Callable] = {}

    @contextlib.contextmanager
    def ready(self, name: str, program: Callable, *args: Any) -> Iterator[Callable]:
        """Yields the program, compiled, for one call with these arguments.

        Args:
            name: of the program in this run.
            program: jitted.
            args: what it will be called with, of the same shapes each time.
        """
        first = name not in self._compiled
        with self._watchdog.phase(Phase.COMPILING if first else Phase.WAITING):
            if first:  # runs place their batches themselves
                jitted = program.jitted if isinstance(program, CompiledStep) else program
                if not self._alone:  # else the first call compiles
                    jitted = compile_together(name, jitted, *args)
                self._compiled[name] = jitted
            yield self._compiled[name]


def compile_together(name: str, program: Callable, *args: Any) -> Callable:
    """Compiles a jitted program for these arguments, and waits until all processes have done so.

    Otherwise the first process to run it would wait for the others to compile, and gloo waits only
    30 s.
    """
    compiled = program.lower(*args).compile()  # type: ignore[attr-defined]
    coordination.barrier(f"compile.{name}", seconds=coordination.DAY)
    return compiled


LARGEST_LOSS = 700.0  # the exponential of larger losses overflows


def mean_losses(model: ModelConfig, batches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`validation_loss` in nats per target, `perplexity` for token ids, and each of several losses.

    Args:
        model: the evaluated model.
        batches: what `Program.eval_step` returned for each batch.
    """
    family = family_of(model)
    terms = {name: term for name, term in family.losses(model).items() if term.evaluated}
    means = {
        name: sum(float(batch[name]["sum"]) for batch in batches)
        / sum(int(batch[name]["targets"]) for batch in batches)
        for name in terms
    }
    loss = sum(terms[name].weight * mean for name, mean in means.items())
    first = next(iter(means.values()))
    each = {f"validation_{name}": mean for name, mean in means.items()} if len(means) > 1 else {}
    perplexity = {"perplexity": math.exp(min(first, LARGEST_LOSS))} if family.has_vocabulary else {}
    return {"validation_loss": loss, **perplexity, **each}


def evaluated_samples(windows: Samples, train: TrainConfig) -> int:
    """Number of samples that an evaluation reads: `eval_batches` batches, or all there are."""
    return min(train.eval_batches * train.global_batch_size, windows.windows_per_epoch)


def require_targets(windows: Samples, config: Config) -> None:
    """Raises UserError unless an evaluation, which reads the same samples each time, has targets.

    Args:
        windows: the validation windows.
        config: of the run. Without `data.prompt_field` every token is a target.
    """
    if config.data.prompt_field is None:
        return
    number = evaluated_samples(windows, config.train)
    if not any((windows.targets(np.array([i])) != NOT_COUNTED).any() for i in range(number)):
        raise UserError(
            f"data.prompt_field: the {number} sequences of an evaluation hold only prompts and no "
            "answers; raise train.eval_batches, or use another data.validation_fraction"
        )
