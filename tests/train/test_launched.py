"""Runs whose processes die and start again, under the supervisor, from states in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import CONFIG, STEPS, TEXT, numbers
from together import PATIENCE, ROOT, trainer

from jaxptd.run.folder import RunDir

SUPERVISED = """
import sys
from jaxptd.distributed.supervisor import Supervisor
code, count, restarts, *argv = sys.argv[1:]
def say(line):
    print(f"launch: {line}", file=sys.stderr, flush=True)
command = lambda number: [sys.executable, "-c", f"ATTEMPT = {number}\\n{code}", *argv]
sys.exit(Supervisor(command, count=int(count), restarts=int(restarts), say=say).run())
"""
# Each process is on a host of its own. One dies in a step, once a state of the step `kept` is
# complete; the disk of its host is gone with it.
DIES = """
import shutil
from jaxptd.checkpoint import memory

sys.argv = [each.replace("HOST", f"{{FOLDER}}/host{{RANK}}") for each in sys.argv]
os.makedirs(f"{{FOLDER}}/host{{RANK}}", exist_ok=True)
after_step = Training._after_step

def files(rank):
    return [name for _, _, names in os.walk(f"{{FOLDER}}/host{{rank}}") for name in names]

def dies(self, step, meter, *, last):
    if (ATTEMPT, RANK, step) == (0, {rank}, {step}):
        while sum(name.startswith(f"{kept:08d}.") for name in files(0) + files(1)) < 4:
            time.sleep(0.01)
        shutil.rmtree(f"{{FOLDER}}/host{rank}")
        os.kill(os.getpid(), 9)
    return after_step(self, step, meter, last=last)

Training._after_step = dies
"""


def run(folder: Path, patches: str, *overrides: str, count: int = 2, restarts: int = 1):
    """Runs the supervisor to its end."""
    (folder / "text.txt").write_text(TEXT)
    values = {
        "data.source": folder / "text.txt",
        "train.run_dir": folder / "run",
        "train.steps": STEPS,
        "train.sample_tokens": 0,
        "checkpoint.every": 5,
    }
    options = ["--config", str(CONFIG), *(f"--{key}={value}" for key, value in values.items())]
    code = trainer(f"FOLDER = {str(folder)!r}\n{patches}")
    words = [code, str(count), str(restarts), *options, *overrides]
    return subprocess.run(
        [sys.executable, "-c", SUPERVISED, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def check_curve(folder: Path, whole: list[dict]) -> None:
    rows = numbers(RunDir(folder / "run").metrics())
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, expected in zip(rows, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


MEMORY = ("--checkpoint.memory_every=2", "--checkpoint.memory_dir=HOST")


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_host_is_lost_and_the_run_goes_on_from_its_partners_copy(tmp_path, whole, rank):
    patches = DIES.format(rank=rank, step=9, kept=8)
    ended = run(tmp_path, patches, "--layout.tp=2", *MEMORY)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stderr.splitlines() if "launch: " in line] == [
        f"launch: process {rank} of 2 was killed by SIGKILL; restart 1 of 1"
    ]
    assert f"resuming at step 8 from {tmp_path}/host0/jaxptd-" in ended.stdout
    check_curve(tmp_path, whole)
    # The store has the last state, so memory has none.
    assert [os.listdir(tmp_path / f"host{rank}") for rank in (0, 1)] == [[], []]


LAYOUTS = [
    ("--layout.dp=2", "--layout.zero=3"),
    ("--layout.pp=2", "--layout.dp=2"),
    ("--layout.tp=4", "--layout.sequence_parallel=true"),
    ("--layout.cp=2", "--layout.zero=1"),
    ("--layout.row=2", "--layout.col=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_on_every_kind_of_layout(tmp_path, whole, layout):
    patches = DIES.format(rank=1, step=9, kept=8)
    ended = run(tmp_path, patches, *layout, *MEMORY)
    assert ended.returncode == 0, ended.stderr
    assert "resuming at step 8 from " in ended.stdout
    check_curve(tmp_path, whole)


@pytest.mark.slow
def test_with_a_newer_checkpoint_memory_is_not_read(tmp_path, whole):
    patches = DIES.format(rank=1, step=11, kept=8)
    ended = run(
        tmp_path,
        patches,
        "--layout.tp=2",
        *("--checkpoint.memory_every=4", "--checkpoint.memory_dir=HOST"),
        "--checkpoint.asynchronous=false",
    )
    assert ended.returncode == 0, ended.stderr
    assert f"resuming at step 10 from {tmp_path}/run/checkpoints" in ended.stdout
    check_curve(tmp_path, whole)
