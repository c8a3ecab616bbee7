"""The progress line fits its terminal, with the most important items first."""

import io

import pytest
from rich.console import Console

from jaxptd.run.progress import ROOM, left_text, metrics_parts, metrics_text, progress_line

ROW = {
    "step": 200,
    "loss": 3.14159,
    "grad_norm": 1.2345,
    "tokens_per_second": 12345.6,
    "mfu": 0.4123,
    "validation_loss": 2.5,
    "perplexity": 12.18,
}


def line(width: int, row: dict = ROW) -> str:
    console = Console(force_terminal=False, file=io.StringIO(), width=width)
    console.print(progress_line(200, 1200, metrics_parts(row, 90.0), width=width))
    return console.file.getvalue().rstrip("\n")


@pytest.mark.parametrize("width", range(30, 200, 7))
def test_it_is_one_line_with_room_for_ctrl_c(width):
    assert "\n" not in line(width)
    assert len(line(width).rstrip()) <= width - ROOM
    assert line(width).startswith("step 200/1200")


def test_a_wider_terminal_shows_more():
    shown = {width: line(width) for width in (40, 60, 70, 100, 110, 160)}
    assert "loss 3.1416" in shown[40]
    assert "12,346 tokens/s" in shown[60] and "left" not in shown[60]
    assert "1.5 min left" in shown[70] and "MFU" not in shown[70]
    assert "MFU 41.2%" in shown[100]
    assert "validation 2.5000" in shown[110] and "gradient" not in shown[110]
    assert "gradient norm 1.23" in shown[160]
    for text in shown.values():
        assert "━" in text


def test_what_is_unknown_is_not_shown():
    row = {**ROW, "mfu": None, "grad_norm": None, "loss": None}
    assert "MFU" not in line(200, row)
    assert "norm" not in line(200, row)
    assert "loss not finite" in line(200, row)
    assert metrics_text({"step": 1, "loss": 1.0, "tokens_per_second": 2.0}) == (
        "loss 1.0000  2 tokens/s"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.0, ""),
        (4.4, "4 s left"),
        (90.0, "1.5 min left"),
        (5000.0, "83.3 min left"),
        (7200.0, "2.0 h left"),
        (300_000.0, "3.5 days left"),
    ],
)
def test_the_time_left_in_words(seconds, text):
    assert left_text(seconds) == text


def test_each_evaluated_set_is_shown():
    row = {**ROW, "perplexity": 12.2, "validation_loss/law": 3.0, "perplexity/law": 20.1}
    words = "validation 2.5000 (perplexity 12.20)  validation law 3.0000 (perplexity 20.10)"
    assert words in metrics_text(row)
    assert "validation law 3.0000" in metrics_parts(row, 60.0)
