"""Shows the progress of a run: a bar on a terminal, elsewhere a line for each logged step."""

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from jaxptd.data import Data
from jaxptd.distributed.coordination import is_first
from jaxptd.pipeline.statistics import bubble
from jaxptd.run.progress.line import (
    SCORES,
    STOPPING,
    left_text,
    metrics_parts,
    metrics_text,
    progress_line,
)
from jaxptd.step import Program

Row = dict[str, Any]
VALIDATION = ("validation_loss", *SCORES)
REFRESH = 8  # times a second
WARNING = "warning"  # the first word of a line that --quiet leaves


class Output(Console):
    """Standard output of the first process; the other processes print nothing.

    May be made before the processes have joined. Falls silent when the reader has gone (`| head`),
    so the run continues.
    """

    _silent = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    @property  # of rich it is an attribute
    def quiet(self) -> bool:
        return self._silent or not is_first()

    @quiet.setter
    def quiet(self, silent: bool) -> None:
        self._silent = silent

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Display:
    """Prints lines to `console`, and shows a progress line inside `with display.steps(...)`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._step, self._total, self._compiled = 0, 0, False
        self._row: Row = {}  # the last one logged, and the last validation loss
        self._left: float | None = None
        self._stopping = False

    @contextlib.contextmanager
    def steps(self, *, done: int, total: int) -> Iterator[None]:
        """Shows progress from step `done` to step `total`; the line vanishes at the end."""
        self._step, self._total = done, total
        if not self._console.is_terminal:
            yield
            return
        options: dict[str, Any] = {"console": self._console, "transient": True}
        with Live(get_renderable=self._line, refresh_per_second=REFRESH, **options) as live:
            self._live = live
            live.refresh()
            yield

    def _line(self) -> RenderableType:
        return progress_line(self._step, self._total, self._parts(), width=self._console.width)

    def _parts(self) -> list[str]:
        """The texts behind the bar, the most important first."""
        if self._stopping:
            return [STOPPING]
        if self._row:
            return metrics_parts(self._row, self._left)
        return [left_text(self._left)] if self._compiled else ["compiling"]

    def advance(self, step: int, seconds_left: float | None = None) -> None:
        """Notes that a step has started, compiled by now, and how long the run still takes."""
        self._step, self._left, self._compiled = step, seconds_left, True

    def stopping(self) -> None:
        """Shows that the run stops after the present step; may be called in any thread."""
        self._stopping = True

    def close(self) -> None:
        """Removes the progress line, so that the process may end at once."""
        if self._live is not None:
            self._live.stop()

    def report(self, row: Row, *, seconds_left: float | None) -> None:
        """Shows the metrics of a logged step."""
        kept = {name: self._row[name] for name in VALIDATION if name in self._row}
        self._row, self._left = {**kept, **row}, seconds_left
        on_terminal = self._console.is_terminal
        if not on_terminal or "validation_loss" in row or row["step"] == self._total:
            left = "" if on_terminal else left_text(seconds_left)
            parts = [f"step {row['step']}/{self._total}", metrics_text(row), left]
            self.say("  ".join(part for part in parts if part))

    def say(self, line: str) -> None:
        """Prints a line as it is: never wrapped, and not read as markup."""
        text = printable(line, self._console.encoding)
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


class JsonDisplay(Display):
    """Prints a JSON object per line: the rows of metrics.jsonl, other lines as a `message`.

    Args:
        console: prints the lines.
        quiet: print no messages but warnings.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        super().__init__(console)
        self._quiet = quiet

    @contextlib.contextmanager
    def steps(self, *, done: int, total: int) -> Iterator[None]:
        """Shows nothing."""
        yield

    def report(self, row: Row, *, seconds_left: float | None) -> None:
        """Prints the row."""
        super().say(json.dumps(row))

    def say(self, line: str) -> None:
        """Prints the line as a message."""
        if not self._quiet or line.startswith(WARNING):
            super().say(json.dumps({"message": line}))


class QuietDisplay(JsonDisplay):
    """Prints warnings only, as text."""

    def report(self, row: Row, *, seconds_left: float | None) -> None:
        """Prints nothing."""

    def say(self, line: str) -> None:
        """Prints a warning."""
        if line.startswith(WARNING):
            Display.say(self, line)


def make_display(console: Console, *, json: bool, quiet: bool, **_: object) -> Display:
    """Makes the display that the options `--json` and `--quiet` ask for."""
    if json:
        return JsonDisplay(console, quiet=quiet)
    return QuietDisplay(console) if quiet else Display(console)


def printable(text: str, encoding: str) -> str:
    """Replaces characters that the encoding of an output does not have by question marks."""
    return text.encode(encoding, "replace").decode(encoding)


def summary(program: Program, devices: str, data: Data) -> str:
    """Describes a run in one line: parameters, devices, layout, attention kernel, data."""
    parameters = sum(math.prod(info.shape) for info in program.infos.values())
    resolved = program.resolved
    kernel, obstacle = resolved.model.attention, resolved.attention_obstacle
    layout = str(program.config.layout)
    if resolved.plan:
        layout += f" (bubble {bubble(resolved.plan.schedule):.0%})"
    return (
        f"{parameters / 1e6:.2f} M parameters on {devices}, layout {layout}; "
        f"attention: {kernel}{f' (cudnn: {obstacle})' if obstacle else ''}; "
        f"{'kernels: triton; ' * (resolved.model.kernels == 'triton')}"
        f"{data.train.amount}"
    )
