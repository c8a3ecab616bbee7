"""Measures the progress of a run and shows it: a line on a terminal, rows elsewhere."""

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, TextIO

import jax
import numpy as np
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxptd.analysis.hardware import peak_flops
from jaxptd.config import Config
from jaxptd.data import Data
from jaxptd.distributed.coordination import is_first
from jaxptd.errors import discard
from jaxptd.models.families import family_of, work_of
from jaxptd.pipeline.statistics import bubble
from jaxptd.run.evaluation import EMA
from jaxptd.step import Program

# ---- the time that a run has left ----------------------------------------------------------------

Pause = Literal["evaluation", "save"]
RECENT = 120.0  # seconds of recent steps to average over
FEWEST = 10  # at least this many steps, however long they are
PAUSES = 3  # evaluations, or saves, to average over
FORWARD = 1 / 3  # of the FLOPs of a step
SLOWER = 1.5  # cap on the first evaluation, which compiles, as a multiple of its expected duration


class TimeLeft:
    """Estimates the remaining time: steps, evaluations and saves left, times recent durations.

    Compilation happens once, so it must not count: the caller leaves out the first step, and the
    first evaluation, whose duration includes compilation, counts only until there is a second.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        train, data = config.train, config.data
        sets = (data.validation_fraction > 0) + len(data.validation or {})
        self._end = train.steps
        self._every: dict[Pause, int] = {
            "evaluation": train.eval_every if sets else 0,
            "save": config.checkpoint.every,
        }
        self._batches = train.eval_batches * sets * (1 + (config.optimizer.ema_decay > 0))
        self._steps, self._seconds = deque[float](), 0.0
        self._pauses: dict[Pause, list[float]] = {"evaluation": [], "save": []}

    def add_step(self, seconds: float) -> None:
        """Records the duration of a step, without evaluations and saves."""
        self._steps.append(seconds)
        self._seconds += seconds
        while len(self._steps) > FEWEST and self._seconds > RECENT:
            self._seconds -= self._steps.popleft()

    def add_pause(self, pause: Pause, seconds: float) -> None:
        """Records the duration of an evaluation or a save."""
        self._pauses[pause].append(seconds)

    def after(self, step: int) -> float | None:
        """Seconds from the end of a step to the end of the run; None before a step is measured."""
        if step >= self._end:
            return 0.0
        if not self._steps:
            return None
        seconds = self._seconds / len(self._steps)
        pauses = (self._number(p, step) * self._duration(p, seconds) for p in self._pauses)
        return (self._end - step) * seconds + sum(pauses)

    def _number(self, pause: Pause, step: int) -> int:
        """Evaluations or saves after a step; the last step of a run always has one."""
        every = self._every[pause]
        return -(-self._end // every) - step // every if every else 0

    def _duration(self, pause: Pause, step_seconds: float) -> float:
        """Seconds of an evaluation or a save."""
        first, later = self._pauses[pause][:1], self._pauses[pause][1:][-PAUSES:]
        if later:
            return sum(later) / len(later)
        if pause == "save":
            return sum(first)
        expected = self._batches * step_seconds * FORWARD
        return min([*first, SLOWER * expected]) if first else expected


# ---- output whose failure does not end a run -----------------------------------------------------


class OptionalStream:
    """A text stream that reports its first failure on stderr and drops everything from then on.

    It reports nothing if the reader has gone (`| head`).

    Args:
        stream: to write to. None if there is none.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._try("write", printable(text, self.encoding))
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def isatty(self) -> bool:
        return bool(self._try("isatty"))

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    def _try(self, method: str, *args: str) -> object:
        """Calls a method of the stream; None if it fails or has failed before."""
        if self._stream is None:
            return None
        try:
            return getattr(self._stream, method)(*args)
        except (OSError, ValueError) as error:  # ValueError: closed
            stream, self._stream = self._stream, None
            discard(stream)
            if not isinstance(error, BrokenPipeError):
                reason = getattr(error, "strerror", None) or error
                _warn(f"warning: cannot write the output ({reason}); the run continues")
            return None


def _warn(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


# ---- the line on a terminal, fitted to its width -------------------------------------------------

ROOM = 3  # columns left free for the ^C that a terminal prints after the line
SHORTEST, LONGEST = 8, 40  # columns of the bar
# Scores of an evaluation in the line, and their format.
LOSS = "validation_loss"
SCORES = {
    "perplexity": "perplexity {:.2f}",
    "validation_dice": "Dice {:.3f}",
    "validation_hd95": "HD95 {:.2f} px",
    "validation_accuracy": "accuracy {:.3f}",
}
STOPPING = "stopping after this step; Ctrl-C again ends at once"
MINUTE, HOUR, DAY = 60, 3600, 86400  # seconds


def progress_line(step: int, total: int, parts: list[str], *, width: int) -> RenderableType:
    """The step, a bar, and as many of the parts as fit.

    Args:
        step: number of steps done.
        total: number of steps in all.
        parts: texts, the most important first.
        width: columns of the terminal.
    """
    number = f"step {step}/{total}"
    width -= ROOM + len(number) + 1
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        if len(longer) + 1 + SHORTEST <= width:
            text = longer
    bar = max(0, min(LONGEST, width - len(text) - 1))
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row(
        Text(number, no_wrap=True),
        ProgressBar(total=total, completed=step, width=bar) if bar >= SHORTEST else "",
        Text(text, no_wrap=True),
    )
    return row


def metrics_text(row: Mapping[str, Any]) -> str:
    """The metrics of a logged step, as in a line of a log."""
    return "  ".join([*_always(row), *_mfu(row), *_skipped(row), *_validation(row)])


def metrics_parts(row: Mapping[str, Any], seconds_left: float | None) -> list[str]:
    """The metrics of a logged step, the most important first, for `progress_line`."""
    norm = row.get("grad_norm")
    return [
        *_always(row),
        *([text] if (text := left_text(seconds_left)) else []),
        *_skipped(row),
        *_mfu(row),
        *(f"{title} {row[name]:.4f}" for title, name in _losses(row)),
        *([f"gradient norm {norm:.3g}"] if norm is not None else []),
    ]


def left_text(seconds: float | None) -> str:
    """The time left in words; empty if unknown or none is left."""
    if not seconds:
        return ""
    if seconds < MINUTE:
        return f"{seconds:.0f} s left"
    if seconds < 100 * MINUTE:
        return f"{seconds / MINUTE:.1f} min left"
    if seconds < 2 * DAY:
        return f"{seconds / HOUR:.1f} h left"
    return f"{seconds / DAY:.1f} days left"


def _always(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"loss {'not finite' if row['loss'] is None else format(row['loss'], '.4f')}"
    yield f"{row['tokens_per_second']:,.0f} tokens/s"


def _mfu(row: Mapping[str, Any]) -> Iterator[str]:
    if row.get("mfu") is not None:
        yield f"MFU {row['mfu']:.1%}"


def _skipped(row: Mapping[str, Any]) -> Iterator[str]:
    if row.get("skipped"):
        yield f"{row['skipped']} skipped"


def _validation(row: Mapping[str, Any]) -> Iterator[str]:
    for title, name in _losses(row):
        end = name.removeprefix(LOSS)
        scores = {f"{score}{end}": text for score, text in SCORES.items()}
        texts = [text.format(row[score]) for score, text in scores.items() if score in row]
        shown = f" ({', '.join(texts)})" * bool(texts)
        yield f"{title} {row[name]:.4f}{shown}"


def _losses(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names each evaluated set's loss as a line shows it, and as a row has it."""
    found = {name: name.removeprefix(LOSS) for name in row if name.startswith(LOSS)}
    return [(f"validation{x.replace(EMA, ' ema').replace('/', ' ')}", n) for n, x in found.items()]


# ---- times and metrics of steps ------------------------------------------------------------------

# In the order of a row of metrics.jsonl; the loss scale exists only in float16.
METRICS = ("loss", "grad_norm", "learning_rate", "skipped", "loss_scale")
COUNTS = ("skipped", "skipped_in_row")

Values = dict[str, float]


def by_layer(name: str, x_L: np.ndarray) -> Values:
    """A metric of each layer by names such as `expert_load/3`; layers that have none have NaN."""
    return {f"{name}/{layer}": float(x) for layer, x in enumerate(x_L) if not np.isnan(x)}


class Meter:
    """Times steps, excluding compilation, evaluations and checkpoints, and holds their metrics.

    The first step's time includes its compilation if that step is logged by itself.

    Args:
        program: runs the steps.
        step: measures the steps after this one.
        check: called with the number and metrics of each step once it has ended; may raise.
        waiting: makes the context in which the meter waits for a step.
    """

    def __init__(
        self,
        program: Program,
        step: int,
        *,
        check: Callable[[int, Values], None] = lambda step, metrics: None,
        waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._program, self._check, self._waiting = program, check, waiting
        model = program.config.model
        self._terms = tuple(family_of(model).losses(model))  # present if there are several
        self._first, self._first_seconds = step + 1, 0.0
        self._step, self._metrics = step, dict[str, jax.Array]()
        self._left, self._ended, self._end_time = TimeLeft(program.config), step, 0.0
        self.restart()

    def restart(self) -> None:
        """Starts a new measurement after the newest step."""
        self.wait()
        self._since, self._time = self._step, time.perf_counter()

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step just started, once the step before it has ended.

        This keeps exactly one step queued on the device.
        """
        self.wait()
        self._step, self._metrics = step, metrics
        if step == self._first:
            self.wait()
            self._first_seconds = time.perf_counter() - self._time
            self.restart()

    def wait(self) -> Values:
        """Waits until the newest step has ended, checks its metrics and returns them."""
        with self._waiting():
            values: Values = {}
            for name, x in self._metrics.items():
                values |= by_layer(name, np.asarray(x)) if np.ndim(x) else {name: float(x)}
            values |= {name: int(values[name]) for name in COUNTS if name in values}
        if values:
            self._note_end()
            self._check(self._step, values)
        return values

    def _note_end(self) -> None:
        """Measures the newest step, which has ended, once; skips the first, which compiles."""
        now, ended = time.perf_counter(), self._ended
        if self._step > ended:
            if self._step != self._first:
                self._left.add_step((now - self._end_time) / (self._step - ended))
            self._ended, self._end_time = self._step, now

    def seconds_left(self) -> float | None:
        """Seconds until the end of the run, with evaluations and saves; None if not yet known."""
        return self._left.after(self._step)

    def row(self) -> dict[str, Any]:
        """Returns the newest step's row of metrics.jsonl, and starts a new measurement.

        `step_time` is the mean since the last row. A non-finite value, which only a skipped step
        has, becomes None.
        """
        values = self.wait()
        names = (*METRICS[:1], *self._terms, *METRICS[1:], *(n for n in values if "/" in n))
        shown = {n: values[n] for n in names if n in values}
        finite = {n: x if math.isfinite(x) else None for n, x in shown.items()}
        row = {"step": self._step, **finite, **self._speed()}
        self.restart()
        return row

    @property
    def skipping(self) -> bool:
        """True if the newest step was skipped.

        Its state is finite, but may be the cause of the skipping, so a checkpoint of it should not
        replace an older one.
        """
        return bool(self.wait()["skipped_in_row"])

    @contextlib.contextmanager
    def paused(self, pause: Pause | None) -> Iterator[None]:
        """Excludes the time spent inside from the step times.

        Args:
            pause: an evaluation or a save, which will recur. None for anything else.
        """
        self.wait()
        before = time.perf_counter()
        yield
        spent = time.perf_counter() - before
        self._time += spent
        self._end_time += spent
        if pause:
            self._left.add_pause(pause, spent)

    def _speed(self) -> dict[str, Any]:
        config, model = self._program.config.train, self._program.config.model
        steps = self._step - self._since
        seconds = (time.perf_counter() - self._time) / steps if steps else self._first_seconds
        tokens, flops = (config.global_batch_size * each for each in work_of(model))
        peak = peak_flops(self._program.mesh)
        return {
            "tokens": self._step * tokens,
            "tokens_per_second": tokens / seconds,
            "step_time": seconds,
            "mfu": flops / seconds / peak if peak else None,
        }


# ---- display: a bar on a terminal, lines elsewhere -----------------------------------------------

Row = dict[str, Any]
VALIDATION = (LOSS, *SCORES)
REFRESH = 8  # times a second
WARNING = "warning"  # the first word of lines that --quiet still prints


class Output(Console):
    """Standard output of the first process; the other processes print nothing.

    May be made before the processes have joined. Falls silent when the reader has gone (`| head`)
    so that the run continues.
    """

    _silent = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    @property  # an attribute in rich's class
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
        self._row: Row = {}  # the last logged row and the last validation loss
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
        """The texts after the bar, the most important first."""
        if self._stopping:
            return [STOPPING]
        if self._row:
            return metrics_parts(self._row, self._left)
        return [left_text(self._left)] if self._compiled else ["compiling"]

    def advance(self, step: int, seconds_left: float | None = None) -> None:
        """Records that a step has started (and so has compiled), and the time left."""
        self._step, self._left, self._compiled = step, seconds_left, True

    def stopping(self) -> None:
        """Shows that the run stops after the current step; may be called in any thread."""
        self._stopping = True

    def close(self) -> None:
        """Removes the progress line, so that the process may end at once."""
        if self._live is not None:
            self._live.stop()

    def report(self, row: Row, *, seconds_left: float | None) -> None:
        """Shows the metrics of a logged step."""
        kept = {k: x for k, x in self._row.items() if k.partition("/")[0] in VALIDATION}
        self._row, self._left = {**kept, **row}, seconds_left
        on_terminal = self._console.is_terminal
        if not on_terminal or _losses(row) or row["step"] == self._total:
            left = "" if on_terminal else left_text(seconds_left)
            parts = [f"step {row['step']}/{self._total}", metrics_text(row), left]
            self.say("  ".join(part for part in parts if part))

    def say(self, line: str) -> None:
        """Prints a line verbatim, neither wrapped nor parsed as markup."""
        text = printable(line, self._console.encoding)
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


class JsonDisplay(Display):
    """Prints a JSON object per line: the rows of metrics.jsonl, and other lines as a `message`.

    Args:
        console: prints the lines.
        quiet: print only warnings, besides the rows.
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
    """Replaces characters that an output's encoding lacks with question marks."""
    return text.encode(encoding, "replace").decode(encoding)


def summary(program: Program, devices: str, data: Data) -> str:
    """Describes a run in one line: parameters, devices, layout, attention kernel, data."""
    parameters = sum(math.prod(info.shape) for info in program.infos.values())
    resolved, some = program.resolved, ""
    if program.config.freezes_some:
        sizes = [math.prod(x.shape) for x in resolved.zero.infos.values() if not x.frozen]
        some = f", of which {sum(sizes) / 1e6:.2f} M train,"
    kernel, obstacle = resolved.model.attention, resolved.attention_obstacle
    layout = str(program.config.layout)
    if resolved.plan:
        layout += f" (bubble {bubble(resolved.plan.schedule):.0%})"
    return (
        f"{parameters / 1e6:.2f} M parameters{some} on {devices}, layout {layout}; "
        f"attention: {kernel}{f' (cudnn: {obstacle})' if obstacle else ''}; "
        f"{'kernels: triton; ' * (resolved.model.kernels == 'triton')}{_rates(program.config)}"
        f"{data.train.amount}"
    )


def _rates(config: Config) -> str:
    """The factors of the learning rate, by patterns of names."""
    rates = (config.optimizer.rates or {}).items()
    return "".join(f"learning rate x {factor:g}: {pattern}; " for pattern, factor in rates)
