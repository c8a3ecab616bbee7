"""The command in a separate process: full disk, kills, signals, a reader that goes away."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap

import pytest
from runs import (
    ROOT,
    SEQUENCE,
    STEPS,
    Trainer,
    numbers,
)

from jaxptd.commands.command_line import load_config
from jaxptd.run.folder import RunDir
from jaxptd.train import main

HURT = """
import os, resource, signal, sys, threading
from jaxptd.errors import run_command
from jaxptd.run.folder import RunDir
from jaxptd.train import main

log = RunDir.log

def hurt(self, row):
    log(self, row)
    if row["step"] == {step}:
        {what}

RunDir.log = hurt
run_command(main)
"""


# Disables writes to the program cache, about which JAX would warn on a full disk.
NOT_CACHED = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def hurt(train: Trainer, what: str, *, step: int, options=()) -> subprocess.CompletedProcess:
    """Runs the command in a process to which `what` happens at the end of `step`."""
    script = textwrap.dedent(HURT).format(step=step, what=what)
    command = [sys.executable, "-c", script, *train.options, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), NOT_CACHED: "1e9"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(train, whole):
    size = 10_000  # largest file: metrics still fit, a checkpoint's arrays do not
    full = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    saved = "[each.join() for each in threading.enumerate() if each.name == 'jaxptd-background']"
    ended = hurt(train, f"{saved}; {full}", step=7)
    assert ended.returncode == 2, ended
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert "could not save step 10" in ended.stderr
    assert "File too large; the last good checkpoint is step 5; " in ended.stderr
    assert train.steps == [5]
    assert "resuming at step 5" in train().out
    assert numbers(train.run_dir.metrics()) == whole


@pytest.mark.slow
def test_sigkill_and_the_same_command_again(train):
    options = ("--train.steps=30", "--layout.dp=2", "--layout.tp=2", SEQUENCE)
    other = RunDir(train.folder / "whole")
    assert main([*train.options, *options, f"--train.run_dir={other.path}"]) == 0
    killed = hurt(train, "os.kill(os.getpid(), signal.SIGKILL)", step=17, options=options)
    assert killed.returncode == -signal.SIGKILL
    assert [row["step"] for row in train.run_dir.metrics()] == list(range(1, 18))
    again = hurt(train, "pass", step=17, options=options)
    assert (again.returncode, again.stderr) == (0, "")
    # Step 15 was saved in the background, perhaps incompletely.
    assert re.search("resuming at step (10|15)", again.stdout)
    assert numbers(train.run_dir.metrics()) == numbers(other.metrics())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_from_outside(train, number, code):
    ended = hurt(train, f"os.kill(os.getpid(), signal.{number})", step=7)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert "stopped at step 8: saved; repeat the command to continue" in ended.stdout
    assert train.steps == [5, 8]


@pytest.mark.slow
def test_a_terminal_that_is_closed_stops_the_run_which_saves(train):
    """Makes later writes to stdout and stderr fail."""
    (reached, reaches), (goes, lets) = os.pipe(), os.pipe()
    terminal, there = pty.openpty()
    what = f"os.write({reaches}, b'x'), os.read({goes}, 1)"
    script = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    script += textwrap.dedent(HURT).format(step=7, what=what)
    process = subprocess.Popen(
        [sys.executable, "-c", script, *train.options],
        env={**os.environ, "PYTHONPATH": str(ROOT), NOT_CACHED: "1e9"},
        start_new_session=True,
        pass_fds=(reaches, goes),
        **dict.fromkeys(("stdin", "stdout", "stderr"), there),
    )
    os.close(there)
    while not select.select([reached], [], [], 0.1)[0]:
        assert process.poll() is None
        if select.select([terminal], [], [], 0)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    os.write(lets, b"x")
    assert process.wait() == 129
    for pipe in (reached, reaches, goes, lets):
        os.close(pipe)
    assert train.steps[-1] in (8, 9)
    assert [row["step"] for row in train.run_dir.metrics()] == list(range(1, train.steps[-1] + 1))


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_run(train):
    command = [sys.executable, "-m", "jaxptd.train", *train.options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0
    assert train.steps[-1] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("config", ["test-tiny", "test-dp2-tp4"])
def test_the_configs_do_what_their_first_lines_say(config, tmp_path):
    path = ROOT / "configs" / f"{config}.yaml"
    head = dict(
        line.removeprefix("# ").split(": ", 1)
        for line in path.read_text().splitlines()
        if line.startswith("# ") and ": " in line
    )
    assert head["Command"] == f"python -m jaxptd.train --config configs/{config}.yaml"
    command = [sys.executable, *head["Command"].split()[1:], f"--train.run_dir={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert f"{load_config(path).layout.num_devices} (simulated)." == head["Devices"]
    expected, tolerance = (float(word) for word in head["Expected loss"].split()[0::5][:2])
    assert RunDir(tmp_path).metrics()[-1]["loss"] == pytest.approx(expected, abs=tolerance)
