"""The line that shows the progress of a run on a terminal, fitted to its width."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

ROOM = 3  # columns left free for the ^C that a terminal writes behind the line
SHORTEST, LONGEST = 8, 40  # columns of the bar
# Scores of an evaluation that the line has, and how it shows them.
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
        total: number of all steps.
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
    """The metrics of a logged step, as a line of a log has them."""
    return "  ".join([*_always(row), *_mfu(row), *_skipped(row), *_validation(row)])


def metrics_parts(row: Mapping[str, Any], seconds_left: float | None) -> list[str]:
    """The metrics of a logged step, the most important first, for `progress_line`."""
    norm = row.get("grad_norm")
    return [
        *_always(row),
        *([text] if (text := left_text(seconds_left)) else []),
        *_skipped(row),
        *_mfu(row),
        *([f"validation {row['validation_loss']:.4f}"] if "validation_loss" in row else []),
        *([f"gradient norm {norm:.3g}"] if norm is not None else []),
    ]


def left_text(seconds: float | None) -> str:
    """The time left in words; empty if it is unknown, or none is left."""
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
    if "validation_loss" in row:
        found = [text.format(row[name]) for name, text in SCORES.items() if name in row]
        scores = f" ({', '.join(found)})" * bool(found)
        yield f"validation {row['validation_loss']:.4f}{scores}"
