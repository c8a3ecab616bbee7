"""metrics.jsonl: rows that stay, lines that are not rows, and a temporarily full disk."""

import os

import pytest
from limited import largest_file

from jaxptd.config import Config
from jaxptd.run.folder import RunDir


def row(step: int, **more: float) -> dict:
    return {"step": step, "loss": 1.0 / step, "mfu": None, **more}


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    """A run of ten steps."""
    run = RunDir(tmp_path / "run")
    run.open(Config(), step=0)
    for step in range(1, 11):
        run.log(row(step))
    return run


@pytest.mark.parametrize(
    "cut", [b'{"step": 11, "lo', b"\x00\x00\x00\xff", b"11\n", b'{"loss": 1}\n']
)
def test_a_line_that_a_kill_or_a_crash_spoilt_is_left_out(run_dir, cut):
    with (run_dir.path / "metrics.jsonl").open("ab") as file:
        file.write(cut)
    run_dir.open(Config(), step=10)
    run_dir.log(row(11))
    assert run_dir.metrics() == [row(step) for step in range(1, 12)]


BAD_LINES = {
    "garbage": b"\x00\xff\xfe garbage\n",
    "a number of 10,000 digits": b'{"step": 3, "loss": ' + b"9" * 10_000 + b"}\n",
    "a step of 10,000 digits": b'{"step": ' + b"9" * 10_000 + b"}\n",
    "nan": b'{"step": 3, "loss": NaN}\n',
    "infinity": b'{"step": 3, "loss": -Infinity}\n',
    "beyond float64": b'{"step": 3, "loss": 1e999}\n',
    "nested too deep": b"[" * 100_000 + b"\n",
    "no object": b"[1, 2]\n",
    "no step": b'{"loss": 1}\n',
    "a step of text": b'{"step": "3"}\n',
    "a step that is true": b'{"step": true}\n',
    "a broken step": b'{"step": 3.5}\n',
    "step 0": b'{"step": 0}\n',
    "a row twice": b'{"step": 3, "loss": 7.0}\n',
    "half a row": b'{"step": 11, "lo\n',
    "a loss of text": b'{"step": 3, "loss": "x"}\n',
    "a loss that is true": b'{"step": 3, "loss": true}\n',
    "a loss of parts": b'{"step": 3, "loss": {"a": 1}}\n',
    "beyond int64": b'{"step": 3, "loss": 9223372036854775808}\n',
    "a step beyond int64": b'{"step": 9223372036854775808}\n',
    "an empty line": b"\n",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_file_with_other_lines_than_rows_is_kept_aside_and_the_run_has_the_good_ones(
    run_dir, line
):
    path = run_dir.path / "metrics.jsonl"
    path.write_bytes(line + path.read_bytes())
    before, lines = path.read_bytes(), []
    again = RunDir(run_dir.path, say=lines.append)
    again.open(Config(), step=10)
    assert again.metrics() == [row(step) for step in range(1, 11)]
    aside = run_dir.path / "metrics.jsonl.aside"
    assert aside.read_bytes() == before
    assert lines == [
        f"warning: {path} has lines that are no metrics (1); kept it as {aside} and "
        "continued with the good rows"
    ]
    again.open(Config(), step=10)
    assert len(lines) == 1


def test_every_file_that_is_set_aside_has_its_own_name(run_dir):
    for _ in range(3):
        with (run_dir.path / "metrics.jsonl").open("ab") as file:
            file.write(b"garbage\n")
        run_dir.open(Config(), step=10)
    names = sorted(path.name for path in run_dir.path.glob("metrics*"))
    assert names == ["metrics.jsonl", *(f"metrics.jsonl.aside{n}" for n in ("", 2, 3))]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_kept_aside(tmp_path, make):
    make(tmp_path / "metrics.jsonl")
    lines = []
    run = RunDir(tmp_path, say=lines.append)
    run.open(Config(), step=0)
    run.log(row(1))
    assert run.metrics() == [row(1)]
    assert len(lines) == 1
    assert os.path.lexists(tmp_path / "metrics.jsonl.aside")


def test_rows_that_cannot_be_written_are_written_later_and_the_run_goes_on(tmp_path, monkeypatch):
    lines = []
    run = RunDir(tmp_path, say=lines.append)
    run.open(Config(), step=0)
    run.log(row(1))
    with monkeypatch.context() as patch:
        patch.setattr(run._metrics, "path", tmp_path / "gone" / "metrics.jsonl")
        run.log(row(2))
        run.log(row(3))
    assert run.metrics() == [row(1)]
    run.log(row(4))
    assert run.metrics() == [row(step) for step in (1, 2, 3, 4)]
    assert len(lines) == 1
    assert lines[0].endswith("metrics.jsonl: No such file or directory; the run continues")


def test_a_disk_that_is_full_in_the_middle_of_a_row_keeps_no_half_of_it(run_dir):
    path = run_dir.path / "metrics.jsonl"
    before = path.read_bytes()
    with largest_file(len(before) + 10):
        run_dir.log(row(11))
        run_dir.log(row(12))
    assert path.read_bytes() == before
    run_dir.log(row(13))
    assert run_dir.metrics() == [row(step) for step in range(1, 14)]


def test_after_half_a_line_a_row_begins_on_its_own(run_dir):
    with (run_dir.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 11, "lo')
    run_dir.log(row(12))
    assert run_dir.metrics()[-1] == row(12)
