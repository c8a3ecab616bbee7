"""Two simultaneous commands in one run directory, in separate processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from runs import ROOT

# Waits at the end of step 3 for the test's signal.
WAITING = """
import os, sys, time
from jaxptd.errors import run_command
from jaxptd.run.folder import RunDir
from jaxptd.train import main

log, folder = RunDir.log, sys.argv.pop(1)

def wait(self, row):
    log(self, row)
    while row["step"] == 3 and not os.path.exists(f"{folder}/go"):
        time.sleep(0.05)

RunDir.log = wait
run_command(main)
"""
# For a process that is killed, perhaps while it writes a program into the cache.
NOT_CACHED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}


@pytest.fixture
def begin(train):
    """Starts the command in a process that waits in step 3."""
    started = []

    def begin(*options: str, **variables: str) -> subprocess.Popen:
        command = [sys.executable, "-c", WAITING, str(train.folder), *train.options, *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        each.communicate()


def wait_for_step(train, run: subprocess.Popen, step: int) -> None:
    while not any(row["step"] == step for row in train.run_dir.metrics()):
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)


@pytest.mark.slow
def test_the_second_of_two_runs_is_refused_and_the_first_is_not_disturbed(train, begin):
    short = ("--train.steps=5", "--train.eval_every=0", "--checkpoint.every=0")
    first = begin(*short)
    wait_for_step(train, first, 3)
    before = train.contents()
    line = train.refused(*short)
    assert line.startswith(
        f"error: train.run_dir={train.run_dir.path} is in use by process {first.pid} on "
    )
    assert line.endswith("UTC; wait until it ends, stop it, or use another directory\n")
    assert train.contents() == before
    (train.folder / "go").touch()
    _, err = first.communicate()
    assert (first.returncode, err) == (0, "")
    lines = (train.run_dir.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert "lock.json" not in train.contents()


@pytest.mark.slow
def test_after_a_kill_the_same_command_takes_the_lock_over(train, begin):
    killed = begin(**NOT_CACHED)
    wait_for_step(train, killed, 3)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert "lock.json" in train.contents()
    outcome = train()
    assert (outcome.code, outcome.err) == (0, "")
    line = f"took train.run_dir={train.run_dir.path} over from process {killed.pid} on "
    assert line in outcome.out
    assert "lock.json" not in train.contents()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_releases_the_lock(train, begin, number):
    stopped = begin("--train.steps=30")
    wait_for_step(train, stopped, 3)
    stopped.send_signal(number)
    (train.folder / "go").touch()
    out, err = stopped.communicate()
    assert err == ""
    assert "stopped at step 4: saved" in out
    assert "lock.json" not in train.contents()
