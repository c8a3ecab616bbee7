"""Bad input gives one line and exit code 2; a closed output is not an error."""

import os
import re
import subprocess
import sys

import pytest

from jaxptd.errors import (
    BAD_INPUT,
    ArgumentError,
    Parser,
    UserError,
    did_you_mean,
    quoted,
    run_command,
)


def exit_code(main) -> object:
    with pytest.raises(SystemExit) as stop:
        run_command(main)
    return stop.value.code


def fail_with(message: str):
    def main() -> None:
        raise UserError(message)

    return main


def test_a_user_error_is_one_line_and_exit_code_2(capsys):
    assert exit_code(fail_with("first line\n  second\tline")) == BAD_INPUT == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: first line second line\n"


@pytest.mark.parametrize("code", [None, 0, 1])
def test_the_result_of_main_is_the_exit_code(code):
    assert exit_code(lambda: code) == code


def test_a_defect_keeps_its_traceback():
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(main)


def make_parser() -> Parser:
    parser = Parser(prog="prog")
    parser.add_argument("--number", type=int)
    return parser


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--number", "x"], ["--number", "'x'", "int", "--help"]),
        # No abbreviations: a new option could make them ambiguous.
        (["--numb", "1"], ["--numb 1", "did you mean --number?"]),
        (["--nothing-like-it"], ["--nothing-like-it", "--help"]),
        (["stray"], ["stray", "--help"]),
        (["--number"], ["--number", "one argument", "--help"]),
    ],
)
def test_bad_arguments_are_user_errors(argv, names):
    with pytest.raises(UserError) as caught:
        make_parser().parse_args(argv)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_is_no_error_and_ends_with_examples(capsys, option):
    parser = Parser(prog="prog", examples=["prog --number 1", "prog --number 2"])
    parser.add_argument("--number", type=int)
    assert exit_code(lambda: parser.parse_args([option])) == 0
    out = capsys.readouterr().out
    assert "--number" in out
    assert out.endswith("examples:\n  prog --number 1\n  prog --number 2\n")


def test_a_message_is_short_however_long_the_value():
    with pytest.raises(UserError) as caught:
        make_parser().parse_args(["--number", "9" * 10_000 + "x"])
    assert len(str(caught.value)) < 500
    assert "--number" in str(caught.value)


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "> /dev/full"])
@pytest.mark.parametrize("lines", [1, 200_000])
def test_an_output_that_is_closed_or_full(closed, lines):
    """Closed outputs give no message. Full ones give one line and exit code 2."""
    code = (
        "from jaxptd.errors import run_command;"
        f"run_command(lambda: print('\\n'.join(['line'] * {lines})))"
    )
    command = f'exec {sys.executable} -c "{code}" {closed}'
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    full = "full" in closed
    assert ended.returncode == (BAD_INPUT if full else 0), ended.stderr
    line = "error: cannot write the output: No space left on device; free some space, or write"
    assert ended.stderr.startswith(line) if full else ended.stderr == ""


@pytest.mark.parametrize("lines", [1, 200_000])  # less than a pipe holds, and far more
def test_a_reader_that_goes_away_is_no_error(lines):
    program = (
        "import sys; from jaxptd.errors import run_command; sys.stdin.readline();"
        f"run_command(lambda: print('\\n'.join(['line'] * {lines})))"
    )
    pipe = subprocess.PIPE
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # Python's default
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=buffered) as writer:
        writer.stdout.close()  # before it writes: it is waiting for a line
        writer.stdin.write(b"go\n")
        writer.stdin.close()
        assert writer.stderr.read() == b""
    assert writer.returncode == 0


def test_ctrl_c_is_one_line_and_the_shells_code(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("4", "4"),
        (4.5, "4.5"),
        ([1, "a"], "[1, 'a']"),
        ("größe", "größe"),
        ("a\nb\0\x1b[31m\udcff", r"a\nb\x00\x1b[31m\udcff"),
        ("a" * 80, "a" * 80),
        ("a" * 81, "a" * 77 + "..."),
        (10**10_000, "<int>"),
        ([10**10_000], "<list>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_quoted_value_is_short_and_on_one_line(value, shown):
    assert quoted(value) == shown
    assert len(quoted(value, 20)) <= 3 * 20


def test_a_value_that_contains_itself_is_quoted():
    value = []
    value.append(value)
    assert quoted(value) == "[[...]]"
    for _ in range(100_000):
        value = [value]
    assert quoted(value) == "<list>"


def test_bad_arguments_are_quoted_in_short():
    with pytest.raises(UserError) as caught:
        make_parser().parse_args(["--number", "x" * 200_000])
    assert str(caught.value).startswith("argument --number: invalid int value: 'xxxx")
    assert len(str(caught.value)) < 200


def test_an_error_that_names_no_variable_is_a_bug(monkeypatch):
    monkeypatch.setenv("JAX_ODD", "1")

    def main() -> None:
        raise ValueError("no variable of JAX's")

    with pytest.raises(ValueError, match="no variable"):
        run_command(main)


SAY = "import sys; from jaxptd.errors import UserError, run_command; "


@pytest.mark.parametrize(
    ("main", "redirect", "code", "line"),
    [
        ("print('line')", "> /dev/full", 2, "cannot write the output: No space left on device"),
        ("print('line ' * 10**6)", "> /dev/full", 2, "cannot write the output: No space left"),
        ("print('line')", ">&-", 0, ""),
        ("print('line')", "<&- >&- 2>&-", 0, ""),
        ("exec('raise UserError(1)')", "2> /dev/full", 2, ""),
        ("exec('raise UserError(1)')", ">&- 2>&-", 2, ""),
        ("exec('raise KeyboardInterrupt')", "2> /dev/full", 130, ""),
    ],
)
def test_streams_that_are_full_or_closed_change_no_exit_code(main, redirect, code, line):
    command = f'{sys.executable} -c "{SAY} run_command(lambda: {main})" {redirect}'
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # Python's default
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, env=buffered)
    assert ended.returncode == code
    assert line in ended.stderr
    assert ended.stderr.count("\n") == bool(line)


def test_a_closed_stream_does_not_give_its_number_to_a_file(tmp_path):
    for main, closed, code in (
        (f"open('{tmp_path}/file', 'w').fileno() in (0, 1, 2)", "<&- >&- 2>&-", 0),
        (
            "bool(__import__('os').system('echo a line'))",
            ">&-",
            0,
        ),  # a child process does not get it closed either
    ):
        command = f'{sys.executable} -c "{SAY} run_command(lambda: {main})" {closed}'
        assert subprocess.run(command, shell=True).returncode == code


# ---- notebooks ----------------------------------------------------------------------------------


def test_a_notebook_shows_the_line_alone(capsys):
    """IPython would print every frame: sixty lines about a misspelt word."""
    shell = pytest.importorskip("IPython").core.interactiveshell.InteractiveShell.instance()
    shell.run_cell("from jaxptd import Layout\nLayout(tp=0)", silent=True)
    out = capsys.readouterr().out.strip()
    said = "UserError: layout.tp=0: an axis has at least one device; use 1 or more"
    assert re.sub(r"\x1b\[[\d;]*m", "", out) == said


@pytest.mark.parametrize("kind", [UserError, ArgumentError])
def test_the_line_of_a_notebook_is_one(kind):
    assert kind("first line\n  second")._render_traceback_() == ["UserError: first line second"]


# ---- similar names ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tpp", "tp"),
        ("heads", "num_heads"),
        ("seq_parallel", "sequence_parallel"),
        ("extra", None),  # not beta2: only three letters of five agree
        ("x" * 10**6, None),
    ],
)
def test_the_name_that_is_meant(name, found):
    known = ("tp", "beta2", "num_heads", "sequence_parallel")
    remedy = f"did you mean {found}?" if found else "see there"
    assert did_you_mean(name, known, otherwise="see there") == remedy
