"""The progress of a run, on a terminal and in a pipe."""

import io

from rich.console import Console

from jaxptd.run.progress import Display, Output, printable

ROW = {"step": 20, "loss": 3.14159, "tokens_per_second": 12345.6}
EVALUATION = {"validation_loss": 2.5, "perplexity": 12.18}


def shown(*, terminal: bool, rows=(ROW,), **options) -> str:
    """The output of a run that resumes after step 10."""
    console = Console(force_terminal=terminal, file=io.StringIO(), width=100, **options)
    display = Display(console)
    with display.steps(done=10, total=30):
        for row in rows:
            display.advance(row["step"])
            display.report(row, seconds_left=90.0)
    return console.file.getvalue()


def test_a_pipe_gets_a_plain_line_a_logged_step():
    rows = [ROW, {**ROW, "step": 30, "loss": 2.0, **EVALUATION}]
    assert shown(terminal=False, rows=rows).splitlines() == [
        "step 20/30  loss 3.1416  12,346 tokens/s  1.5 min left",
        "step 30/30  loss 2.0000  12,346 tokens/s  validation 2.5000 (perplexity 12.18)"
        "  1.5 min left",
    ]


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left():
    text = shown(terminal=True)
    assert "20/30" in text
    assert "━" in text
    assert "loss 3.1416  12,346 tokens/s" in text
    assert "compiling" in text  # until the first report
    assert "step 20/30  loss" not in text  # no line of its own


def test_on_a_terminal_an_evaluation_stays_as_a_line():
    text = shown(terminal=True, rows=[{**ROW, **EVALUATION}])
    assert "step 20/30  loss 3.1416  12,346 tokens/s  validation 2.5000" in text


def test_a_line_is_not_cut_and_not_taken_for_markup():
    console = Console(file=io.StringIO(), width=20)
    line = "a [bold]line[/bold] that is wider than [the console] :smile:"
    Display(console).say(line)
    assert console.file.getvalue() == line + "\n"


def test_a_terminal_of_another_encoding_shows_question_marks():
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    Display(Console(file=file)).say("é\ufffd")
    file.flush()
    assert file.buffer.getvalue() == b"\xe9?\n"
    assert printable("é\ufffd", "utf-8") == "é\ufffd"


def test_a_reader_that_has_gone_does_not_end_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    display = Display(Output(file=Gone()))
    with display.steps(done=0, total=30):
        display.say("to nobody")
        display.report(ROW, seconds_left=90.0)
    assert display._console.file.getvalue() == ""


def test_skipped_steps_are_shown():
    text = shown(terminal=False, rows=[{**ROW, "loss": None, "skipped": 2}, {**ROW, "skipped": 0}])
    assert text.splitlines() == [
        "step 20/30  loss not finite  12,346 tokens/s  2 skipped  1.5 min left",
        "step 20/30  loss 3.1416  12,346 tokens/s  1.5 min left",
    ]
