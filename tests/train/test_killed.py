"""A run that is killed over and over ends as if nobody had touched it."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "test-tiny.yaml"
STEPS, KILLS = 60, 30
NEVER = "run:never:1:0"
TIMES = {"tokens_per_second", "step_time", "mfu"}

# Kills itself some time after a moment of the run: its start, a step, or inside a save.
RUN = """
import os, random, signal, sys, threading, time
from jaxptd.checkpoint import arrays, manifest
from jaxptd.checkpoint.folders import Folders
from jaxptd.errors import run_command
from jaxptd.run.folder import RunDir
from jaxptd.train import main

owner, name, times, seconds = sys.argv.pop(1).split(":")
owner = {"log": RunDir, "arrays": arrays.ocp, "manifest": manifest,
         "folders": Folders, "run": None}[owner]
left = int(times)

def kill():
    os.kill(os.getpid(), 9)

def after():
    timer = threading.Timer(float(seconds), kill)
    timer.daemon = True
    timer.start()

if name == "start":
    after()
elif name != "never":
    function = getattr(owner, name)

    def counted(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            after()
        return function(*args, **kwargs)

    setattr(owner, name, counted)
run_command(main)
"""


def moments():
    """Moments in start-up, steps and saves: a function, which of its calls, and a delay."""
    draw = random.Random(0)
    places = [
        "run:start",
        "log:log",
        "arrays:save_async",
        "manifest:sync_files",
        "manifest:seal",
        "folders:move_into_place",
        "folders:delete",
    ]
    for place in itertools.cycle(places):
        longest = 4 if place == "run:start" else draw.choice([0, 0.03])
        yield f"{place}:{draw.randint(1, 2)}:{draw.uniform(0, longest)}"


def run(folder, moment):
    options = {
        "data.source": folder / "text.txt",
        "train.run_dir": folder / "run",
        "train.steps": STEPS,
        "train.sample_tokens": 0,
        "checkpoint.every": 3,
        "train.eval_every": 6,
    }
    command = [sys.executable, "-c", RUN, moment, "--config", str(CONFIG)]
    command += [f"--{key}={value}" for key, value in options.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if moment != NEVER:  # nor is a run killed while it writes a program into the cache
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def rows(folder):
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def started(folder):
    folder.mkdir()
    (folder / "text.txt").write_text("".join(f"line {i * i}\n" for i in range(3000)))
    return folder


@pytest.mark.slow
def test_thirty_kills_change_nothing(tmp_path):
    """Each step is in the metrics once, equal to the last digit, including evaluations.

    Hence every step had the same state and samples as in a run that nobody kills.
    """
    whole, killed = started(tmp_path / "whole"), started(tmp_path / "killed")
    assert run(whole, NEVER).returncode == 0

    def check(ended, folder):
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
        assert rows(folder) == rows(whole)
        assert (folder / "run" / "checkpoints" / "00000060").is_dir()

    reached = []
    for number, moment in enumerate(moments()):
        ended = run(killed, moment)
        if ended.returncode != -signal.SIGKILL:  # it ended before that moment: start another
            check(ended, killed)
            killed = started(tmp_path / f"killed{number}")
            continue
        metrics = killed / "run" / "metrics.jsonl"
        reached.append(len(rows(killed)) if metrics.exists() else 0)
        if len(reached) == KILLS:
            break
    check(run(killed, NEVER), killed)
    assert max(reached) > 30, reached  # runs continued, and some kills came late
