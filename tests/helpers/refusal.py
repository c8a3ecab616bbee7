"""How a command refuses bad input: one line on stderr that names it, exit code 2, no output."""

from collections.abc import Callable, Sequence

import pytest

from jaxptd.errors import run_command


def refused(capsys: pytest.CaptureFixture, main: Callable, argv: Sequence[str]) -> str:
    """The line with which a command refuses its arguments."""
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: main(argv))
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err
