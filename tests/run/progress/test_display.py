"""A run's progress, on a terminal and in a pipe."""

import io
import json

import pytest
from rich.console import Console
from screen import screen

from jaxptd.run.progress import Display, Output, make_display, metrics_text, printable

ROW = {"step": 20, "loss": 3.14159, "tokens_per_second": 12345.6}
SHOW_CURSOR = "\x1b[?25h"
EVALUATION = {"validation_loss": 2.5, "perplexity": 12.18}


def shown(*rows) -> str:
    """The output to a pipe of a run that resumes after step 10."""
    console = Console(force_terminal=False, file=io.StringIO(), width=100)
    display = Display(console)
    with display.steps(done=10, total=30):
        for row in rows:
            display.advance(row["step"])
            display.report(row, seconds_left=90.0)
    return console.file.getvalue()


def test_a_pipe_gets_a_plain_line_a_logged_step():
    rows = [ROW, {**ROW, "step": 30, "loss": 2.0, **EVALUATION}]
    assert shown(*rows).splitlines() == [
        "step 20/30  loss 3.1416  12,346 tokens/s  1.5 min left",
        "step 30/30  loss 2.0000  12,346 tokens/s  validation 2.5000 (perplexity 12.18)"
        "  1.5 min left",
    ]


class Terminal:
    """A terminal, showing the display of a run that resumes after step 10 of 30."""

    def __init__(self, width: int = 100) -> None:
        self.width, self.file = width, io.StringIO()
        console = Console(force_terminal=True, file=self.file, width=width)
        self.display = Display(console)

    def press(self, echo: str) -> None:
        """Echoes keys at the cursor, as the terminal does."""
        self.file.write(echo)

    def refresh(self) -> None:
        """Refreshes the display, as happens eight times a second."""
        self.display._live.refresh()

    @property
    def lines(self) -> list[str]:
        return screen(self.file.getvalue(), width=self.width)


def test_a_terminal_gets_a_line_with_a_bar_loss_speed_and_time_left():
    terminal = Terminal()
    with terminal.display.steps(done=10, total=30):
        (line,) = terminal.lines
        assert line.startswith("step 10/30 ━")
        assert line.endswith("compiling")
        for step, left, end in (
            (11, None, "━"),
            (12, 90.0, "━ 1.5 min left"),
        ):  # nothing logged yet
            terminal.display.advance(step, left)
            terminal.refresh()
            assert terminal.lines[0].startswith(f"step {step}/30 ━")
            assert terminal.lines[0].rstrip().endswith(end)
        terminal.display.report(ROW, seconds_left=90.0)
        terminal.display.advance(20, 90.0)
        terminal.refresh()
        (line,) = terminal.lines
        assert line.startswith("step 20/30 ━")
        assert line.endswith("━ loss 3.1416  12,346 tokens/s  1.5 min left")
        terminal.display.advance(21, 50.0)  # steps and time advance, logged or not
        terminal.refresh()
        assert terminal.lines[0].startswith("step 21/30 ━")
        assert terminal.lines[0].endswith("50 s left")
    assert terminal.lines == []


def test_on_a_terminal_evaluations_and_the_last_step_stay_as_lines():
    terminal = Terminal()
    with terminal.display.steps(done=10, total=30):
        for row in (ROW, {**ROW, "step": 24, **EVALUATION}, {**ROW, "step": 30}):
            terminal.display.report(row, seconds_left=90.0)
            terminal.refresh()
    assert terminal.lines == [
        "step 24/30  loss 3.1416  12,346 tokens/s  validation 2.5000 (perplexity 12.18)",
        "step 30/30  loss 3.1416  12,346 tokens/s",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_after_ctrl_c_there_is_no_half_bar_and_no_doubled_line(width):
    terminal = Terminal(width)
    with terminal.display.steps(done=10, total=30):
        terminal.display.say("before")
        terminal.display.report({**ROW, **EVALUATION, "step": 12}, seconds_left=90.0)
        terminal.refresh()
        terminal.press("^C")
        terminal.display.stopping()
        terminal.refresh()
        if width >= 80:
            assert "stopping after this step" in terminal.lines[-1]
        terminal.display.say("stopped at step 13: saved")
        terminal.refresh()
    first, *middle, last = terminal.lines
    assert (first, last) == ("before", "stopped at step 13: saved")
    evaluated = "step 12/30  " + metrics_text({**ROW, **EVALUATION})
    assert "".join(middle).replace(" ", "") == evaluated.replace(" ", "")  # wrapped if narrow


def test_a_process_that_ends_at_once_removes_the_line_before():
    terminal = Terminal()
    with terminal.display.steps(done=10, total=30):
        terminal.display.close()
        assert terminal.lines == []
        assert SHOW_CURSOR in terminal.file.getvalue()


def test_json_is_an_object_a_line_with_rows_and_messages(capsys):
    display = make_display(Console(), json=True, quiet=False)
    with display.steps(done=10, total=30):
        display.say("resuming")
        display.report({**ROW, "mfu": None}, seconds_left=90.0)
        display.advance(20, 90.0)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"message": "resuming"}, {**ROW, "mfu": None}]


def test_quiet_prints_warnings_only(capsys):
    display = make_display(Console(), json=False, quiet=True)
    with display.steps(done=10, total=30):
        display.say("resuming")
        display.say("warning: a checkpoint is damaged")
        display.report(ROW, seconds_left=90.0)
    assert capsys.readouterr().out == "warning: a checkpoint is damaged\n"


def test_quiet_json_has_rows_and_warnings(capsys):
    display = make_display(Console(), json=True, quiet=True)
    display.say("resuming")
    display.say("warning: a checkpoint is damaged")
    display.report(ROW, seconds_left=90.0)
    assert [*map(json.loads, capsys.readouterr().out.splitlines())] == [
        {"message": "warning: a checkpoint is damaged"},
        ROW,
    ]


def test_other_processes_print_nothing_though_the_output_was_made_before_they_joined(monkeypatch):
    output = Output(file=io.StringIO())
    monkeypatch.setattr("jaxptd.run.progress.is_first", lambda: False)
    Display(output).say("a line")
    assert output.file.getvalue() == ""
    monkeypatch.undo()
    Display(output).say("a line")
    assert output.file.getvalue() == "a line\n"


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
    text = shown({**ROW, "loss": None, "skipped": 2}, {**ROW, "skipped": 0})
    assert text.splitlines() == [
        "step 20/30  loss not finite  12,346 tokens/s  2 skipped  1.5 min left",
        "step 20/30  loss 3.1416  12,346 tokens/s  1.5 min left",
    ]
