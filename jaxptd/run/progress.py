"""What a person sees while a run trains: a bar on a terminal, elsewhere a line a logged step.

And the numbers in it: `Meter` times the steps and holds their metrics.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxptd.analysis.hardware import peak_flops
from jaxptd.errors import UserError
from jaxptd.step import Program
from jaxptd.step.skipping import check_in_row, check_parameters

# Of a step, as a person wants to read them; the scale there is in float16 only.
METRICS = ("loss", "grad_norm", "learning_rate", "skipped", "loss_scale")
COUNTS = ("skipped", "skipped_in_row")


class Output(Console):
    """A console that falls silent when its reader has gone (`| head`): the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Display:
    """Prints to `console`; the bar is there between `steps(...)` entered and left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: Any = None
        self._total = 0

    @contextlib.contextmanager
    def steps(self, *, done: int, total: int) -> Iterator[None]:
        """Shows progress from step `done` to step `total`."""
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self._total = total
        self._progress = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal
        )
        with self._progress:
            self._task = self._progress.add_task("", total=total, completed=done, text="compiling")
            yield

    def advance(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def report(self, row: dict[str, Any], *, seconds_left: float) -> None:
        """One logged step."""
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        text = f"loss {loss}  {row['tokens_per_second']:,.0f} tokens/s"
        if row.get("skipped"):
            text += f"  {row['skipped']} skipped"
        if "validation_loss" in row:
            text += (
                f"  validation {row['validation_loss']:.4f} (perplexity {row['perplexity']:.2f})"
            )
        if self._progress is not None:
            self._progress.update(self._task, text=text)
        if not self._console.is_terminal or "validation_loss" in row:
            left = f"  {seconds_left / 60:.1f} min left" if not self._console.is_terminal else ""
            self.say(f"step {row['step']}/{self._total}  {text}{left}")

    def say(self, line: str) -> None:
        text = printable(line, self._console.encoding)
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def printable(text: str, encoding: str) -> str:
    """The text with what an output of this encoding cannot show as question marks."""
    return text.encode(encoding, "replace").decode(encoding)


class Meter:
    """Times steps, without compilation, evaluations and checkpoints, and holds their metrics.

    Only the first step cannot be told apart from its compilation, if it is logged by itself.

    Args:
        program: what runs.
        step: the steps after this one are measured.
        saved: -> steps of the checkpoints that there are.
        waiting: -> what is entered while it waits for a step.
    """

    def __init__(
        self,
        program: Program,
        step: int,
        saved: Callable[[], Sequence[int]] = lambda: (),
        waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._program, self._saved, self._waiting = program, saved, waiting
        self._first, self._first_seconds = step + 1, 0.0
        self._step, self._metrics = step, dict[str, jax.Array]()
        self.restart()

    def restart(self) -> None:
        """Times from here."""
        self.wait()
        self._since, self._time = self._step, time.perf_counter()

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step just started, once the one before it has ended.

        So there is always a step for the device to go on with, and never more than one.
        """
        self.wait()
        self._step, self._metrics = step, metrics
        if step == self._first:
            self.wait()
            self._first_seconds = time.perf_counter() - self._time
            self.restart()

    def wait(self) -> dict[str, float]:
        """Metrics of the newest step, once it has ended.

        Raises:
            UserError: it was one too many in a row that were skipped.
        """
        with self._waiting():
            values = {n: int(x) if n in COUNTS else float(x) for n, x in self._metrics.items()}
        if values:
            limit = self._program.config.train.max_skipped
            check_in_row(self._step, values, limit=limit, saved=self._saved)
        return values

    def row(self) -> dict[str, Any]:
        """The newest step's line of metrics.jsonl; step_time is the mean since the last one.

        Of a skipped step, what is not finite is None.
        """
        values = self.wait()
        shown = {n: values[n] for n in METRICS if n in values}
        finite = {n: x if math.isfinite(x) else None for n, x in shown.items()}
        row = {"step": self._step, **finite, **self._speed()}
        self.restart()
        return row

    @property
    def skipping(self) -> bool:
        """Whether the newest step was skipped. Raises UserError as `wait`.

        Its state is sound, but what it goes out from may be what makes steps unsound, and should
        not take the place of an older checkpoint.
        """
        return bool(self.wait()["skipped_in_row"])

    def check(self, params: Mapping[str, jax.Array]) -> None:
        """Raises UserError as `wait`, or if a parameter of the newest step is not finite."""
        self.wait()
        check_parameters(self._step, params)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside counts for no step."""
        self.wait()
        before = time.perf_counter()
        yield
        self._time += time.perf_counter() - before

    def _speed(self) -> dict[str, Any]:
        config, model = self._program.config.train, self._program.config.model
        steps = self._step - self._since
        seconds = (time.perf_counter() - self._time) / steps if steps else self._first_seconds
        a_step = config.global_batch_size * model.seq_length
        peak = peak_flops(self._program.mesh)
        return {
            "tokens": self._step * a_step,
            "tokens_per_second": a_step / seconds,
            "step_time": seconds,
            "mfu": a_step * self._flops_per_token() / seconds / peak if peak else None,
        }

    def _flops_per_token(self) -> float:
        """6 a parameter of a product, and attention's 12 L D T (arXiv 2204.02311, appendix B)."""
        model, infos = self._program.config.model, self._program.infos
        looked_up = {"positions.table"} | (set() if model.tie_embeddings else {"tokens.table"})
        matrices = [n for n, info in infos.items() if info.decay and n not in looked_up]
        weights = sum(math.prod(infos[name].shape) for name in matrices)
        return 6 * weights + 12 * model.num_layers * model.hidden_size * model.seq_length


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Raises UserError, naming the first value that is not finite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise UserError(
                f"{name} is {value} at step {step}, which is not saved; start again in another "
                "train.run_dir with a smaller optimizer.learning_rate or more warmup_steps"
            )
