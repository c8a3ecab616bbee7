"""Shows the progress of a run: a bar on a terminal, elsewhere a line for each logged step."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxptd.data import Data
from jaxptd.distributed.coordination import is_first
from jaxptd.pipeline.statistics import bubble
from jaxptd.step import Program


class Output(Console):
    """Standard output of the first process; the other processes print nothing.

    Falls silent when the reader has gone (`| head`), so the run continues.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(quiet=not is_first(), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Display:
    """Prints lines to `console`, and shows a progress bar inside `with display.steps(...)`."""

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
        """Moves the bar to a step."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def report(self, row: dict[str, Any], *, seconds_left: float) -> None:
        """Shows the metrics of a logged step."""
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
        """Prints a line as it is: never wrapped, and not read as markup."""
        text = printable(line, self._console.encoding)
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def printable(text: str, encoding: str) -> str:
    """Replaces characters that the encoding of an output does not have by question marks."""
    return text.encode(encoding, "replace").decode(encoding)


def summary(program: Program, devices: str, data: Data) -> str:
    """Describes a run in one line: parameters, devices, layout, attention kernel, data."""
    parameters = sum(math.prod(info.shape) for info in program.infos.values())
    resolved = program.resolved
    kernel, obstacle = resolved.model.attention, resolved.attention_obstacle
    tokens = len(data.train.tokens)
    layout = str(program.config.layout)
    if resolved.plan:
        layout += f" (bubble {bubble(resolved.plan.schedule):.0%})"
    return (
        f"{parameters / 1e6:.2f} M parameters on {devices}, layout {layout}; "
        f"attention: {kernel}{f' (cudnn: {obstacle})' if obstacle else ''}; "
        f"{tokens / 1e6:.2f} M training tokens"
    )
