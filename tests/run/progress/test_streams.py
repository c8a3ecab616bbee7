"""Output that fails during a run is dropped, and reported once."""

import io
import os

import pytest

from jaxptd.run.progress import Display, OptionalStream, Output


class Broken(io.StringIO):
    """A stream that fails after some lines."""

    def __init__(self, error: Exception, *, after: int = 0) -> None:
        super().__init__()
        self.error, self.left = error, after

    def flush(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error


FULL, HUNG_UP = OSError(28, "No space left on device"), OSError(5, "Input/output error")


@pytest.mark.parametrize(("error", "reason"), [(FULL, FULL.strerror), (HUNG_UP, HUNG_UP.strerror)])
def test_a_full_disk_or_a_terminal_that_is_gone_is_said_once(capsys, error, reason):
    display = Display(Output(file=OptionalStream(Broken(error, after=1))))
    for number in range(5):
        display.say(f"line {number}")
    assert capsys.readouterr().err == (
        f"warning: cannot write the output ({reason}); the run continues\n"
    )


def test_a_reader_that_has_gone_is_not_worth_a_line(capsys):
    display = Display(Output(file=OptionalStream(Broken(BrokenPipeError()))))
    display.say("line")
    assert capsys.readouterr() == ("", "")


def test_a_closed_stream_and_none_at_all_print_nothing(capsys):
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        display = Display(Output(file=OptionalStream(stream)))
        display.say("line")
        with display.steps(done=0, total=1):
            display.advance(1)
    assert capsys.readouterr().err.count("\n") == 1  # for the first one only


def test_what_the_stream_cannot_encode_is_replaced():
    raw = io.BytesIO()
    stream = OptionalStream(io.TextIOWrapper(raw, encoding="ascii"))
    stream.write("ä \ud800")
    stream.flush()
    assert raw.getvalue() == b"? ?"


def test_the_last_flush_of_python_does_not_fail_either(tmp_path):
    with open("/dev/full", "w") as full:
        stream = OptionalStream(full)
        stream.write("text")
        stream.flush()
        full.flush()
        assert os.write(full.fileno(), b"more") == 4  # no longer to the full device
