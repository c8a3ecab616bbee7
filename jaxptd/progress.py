"""What a person sees while a run trains: a bar on a terminal, a line for each logged step elsewhere."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


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
        text = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s"
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
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
